"""What torch is set to where a patched module runs: autocast, gradients, hooks, tensors' classes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules import module as all_modules

from lowmem_patch.functional import is_exporting, is_ordinary, is_transformed
from lowmem_patch.nn.own import aligns_devices_alone
from lowmem_patch.nn.watched import Watched


def autocast_dtype(device: str, dtype: torch.dtype) -> torch.dtype | None:
    """The dtype to which autocast casts a Linear's input of ``dtype``, or None: it leaves float64 alone."""
    if dtype == torch.float64 or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


def product_dtype(given: torch.dtype, weight: Tensor) -> torch.dtype | None:
    """The dtype of a Linear's product of an input of dtype ``given``; None where torch refuses mixed ones."""
    # as `autocast_dtype`, without its call: readers ask each time
    device = weight.device.type
    if given == torch.float64 or not torch.is_autocast_enabled(device):
        return given if weight.dtype == given else None
    return torch.get_autocast_dtype(device)


def to_save(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """A weight for an op of ours that computes in ``dtype`` and saves the weight as it is given.

    Parameters, and views of them, are in memory anyway. One that is computed (standardised, normed) is cast
    first, as torch's own op saves that cast, and nobody the weight itself.
    """
    if weight.dtype == dtype:
        return weight
    whole = weight if weight._base is None else weight._base
    return weight if isinstance(whole, nn.Parameter) else weight.to(dtype)


def has_hooks(module: nn.Module) -> bool:
    """Whether torch looks for tensors among what enters and leaves the module, to hook on, or calls hooks for
    every module, ours and those that ours stand for."""
    return bool(
        module._backward_hooks
        or module._backward_pre_hooks
        or all_modules._global_forward_hooks
        or all_modules._global_forward_pre_hooks
        or all_modules._global_backward_hooks
        or all_modules._global_backward_pre_hooks
    )


def one_tensor(module: nn.Module, x: Any, others: tuple[Any, ...], named: dict[str, Any]) -> Tensor:
    """The tensor with which a module was called that was planned for one, by place or by whatever name its
    original gives it, beside arguments that are None.

    Raises:
        TypeError: it was called with something else.
    """
    given = [value for value in (x, *others, *named.values()) if value is not None]
    if len(given) != 1 or not isinstance(given[0], Tensor):
        raise TypeError(
            f"{type(module).__name__} takes one tensor, as where it was patched, and was called with "
            f"{len(given)} arguments: call patch_model again, with example_inputs that take this path"
        )
    return given[0]


def own_tensor(module: nn.Module, name: str) -> Any:
    """What a module's forward finds by the name of a parameter, past nn.Module's search, which takes time: a
    tensor, or None.

    It is an attribute where torch prunes it, and where a block that FSDP1 wraps runs again.
    """
    found = module._parameters.get(name)
    return module.__dict__.get(name) if found is None else found


def is_fsdp_unit(module: nn.Module) -> bool:
    """Whether FSDP2 frees the weights of this very module after its forward: it gathers them again for
    backward through the tensors that leave the module, and changes its class to one with ``unshard``."""
    return hasattr(type(module), "unshard")


def holds_weights(module: nn.Module) -> bool:
    """Whether the weights of this very module stay where they are until its backward.

    Those of an FSDP2 unit, of ZeRO-3, which marks them, and of accelerate's offloading come back when a
    gradient comes to the module's output.
    """
    offloaded = hasattr(module, "_hf_hook") and not aligns_devices_alone(module)
    return not (
        is_fsdp_unit(module) or hasattr(module._parameters.get("weight"), "ds_id") or offloaded
    )


def may_be_freed() -> bool:
    """Whether somebody may free a module's weights until its own backward: FSDP and ZeRO do, whose processes
    form a group."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def unfreed(tensor: Tensor) -> Tensor:
    """The tensor; a copy, with its gradient, of a parameter that FSDP2 may free before somebody reads what
    waits."""
    whole = tensor if tensor._base is None else tensor._base
    return tensor.clone() if isinstance(whole, nn.Parameter) and may_be_freed() else tensor


def trains_here() -> bool:
    """Whether autograd keeps what an op saves: not where somebody exports the model, nor under transforms of
    torch.func or in forward mode, in which torch's own functions run."""
    # the first of the two says so in one call
    return torch.is_grad_enabled() and (is_ordinary() or not (is_exporting() or is_transformed()))


def needs_gradient(tensor: Tensor) -> bool:
    """Whether autograd would keep anything for an op on this tensor, and it is run to train."""
    return tensor.requires_grad and trains_here()


def is_foreign(tensor: object) -> bool:
    """Whether this is a tensor of somebody else's subclass (DTensor, torchao), or none at all: such are
    left to the subclass's own functions."""
    kind = type(tensor)
    if kind is Tensor or kind is nn.Parameter or kind is Watched:
        return False
    return not isinstance(tensor, FakeTensor)


def is_freed(tensor: Tensor) -> bool:
    """Whether somebody freed a tensor's memory, as FSDP1 does between its forwards. What torch.func wraps has
    none to ask for."""
    wrapped: bool = torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    return not wrapped and not tensor.untyped_storage().nbytes()


def train(weight: Tensor | None, bias: Tensor | None) -> bool:
    """Whether gamma or beta trains."""
    own = weight is not None and weight.requires_grad
    return own or (bias is not None and bool(bias.requires_grad))
