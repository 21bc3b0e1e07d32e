"""Norms that wait: one for its Linear behind row moves, and one whose input is computed again."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lowmem_patch.functional import in_compiler, ms_norm, without_torch_function
from lowmem_patch.nn.chain_steps import Leaf, Step, Value, autocast_of
from lowmem_patch.nn.chains import Caller, Chain, saved_for
from lowmem_patch.nn.context import is_foreign, needs_gradient, unfreed
from lowmem_patch.nn.defer import defer
from lowmem_patch.nn.deferred import Deferred, value_of
from lowmem_patch.nn.deferred_ops import Activation, Dropped
from lowmem_patch.nn.op import Op, Projection, strides_like
from lowmem_patch.nn.stored import keep, project

if TYPE_CHECKING:
    from lowmem_patch.nn.norms import MSNorm


class Norm(Op):
    """A norm that waits behind row moves, so that it and its Linear save one tensor between them.

    The sources are x, and gamma and beta as the forward had them. Where somebody reads the values later, and
    in backward, the module may have others (torch.func.functional_call, a parametrization, another eps).

    Args:
        module: the norm.
        x: its input.
    """

    saves = False
    holds = True

    def __init__(self, module: MSNorm, x: Tensor) -> None:
        self.module = module
        self.settings = module.settings_for(x)
        self.to = module.output_dtype(x)  # autocast may be another one where the value is computed
        self.scales, self.shifts = (one is not None for one in module.own_affine())

    def of(self, x: Tensor, *parameters: Tensor) -> Deferred:
        if in_compiler():
            return keep(value_of(self._read(x, *parameters)), self, (x, *parameters))
        return defer(self, (x, *parameters))

    def dtype(self, sources: tuple[Tensor, ...]) -> torch.dtype:
        return self.to

    def compute(self, *sources: Tensor, z_dtype: torch.dtype | None = None) -> Tensor:
        """The norm with what the forward had."""
        x, *parameters = sources
        given = iter(parameters)
        weight = next(given) if self.scales else None
        bias = next(given) if self.shifts else None
        return ms_norm(x, weight, bias, self.settings, self.to, z_dtype=z_dtype)[0]

    def saving_z(self, *sources: Tensor) -> Tensor:
        """The norm for a gradient: z tells it whatever gamma is, and nobody checks this one."""
        is_z = not (self.scales or self.shifts)  # the output itself
        z_dtype = self.to if torch.is_grad_enabled() and not is_z else None
        return self.compute(*sources, z_dtype=z_dtype)

    def _read(self, x: Tensor, *parameters: Tensor) -> Tensor:
        """The norm as its Linear shall read it."""
        module = self.module
        own = [parameter for parameter in module.own_affine() if parameter is not None]
        same = len(own) == len(parameters) and all(map(lambda a, b: a is b, own, parameters))
        if in_compiler() or (same and module.settings_for(x) == self.settings):
            return module.normed(x, self.to)
        return self.saving_z(x, *parameters)

    def gradients(self, dy: Tensor, *sources: Tensor) -> tuple[Tensor | None, ...]:
        with torch.enable_grad():
            # leaves: hooks of the parameters themselves would run here, too
            leaves = [source.detach().requires_grad_(source.requires_grad) for source in sources]
            wanted = [leaf for leaf in leaves if leaf.requires_grad]
            found = iter(torch.autograd.grad(self.saving_z(*leaves), wanted, dy))
        return tuple(next(found) if leaf.requires_grad else None for leaf in leaves)

    def moved(self, h: Deferred, move: Callable[[Tensor], Tensor]) -> Any:
        h.was_bypassed = True
        x, *parameters = h.sources
        return self.of(move(x), *parameters)

    def linear(self, h: Deferred, to: Projection, dtype: torch.dtype) -> Any:
        h.was_bypassed = True
        if in_compiler():
            return project(self._read(*h.sources), to, dtype)
        if h._normed is None:
            h._normed = self._read(*h.sources)  # once for q, k and v
        return project(h._normed, to, dtype)

    def dropped(self, h: Deferred, p: float) -> Any:
        return Dropped.of(h, p, (h.plain(),), None)


def norm_of_computed(
    module: MSNorm, x: Tensor, compute: Callable[..., Tensor] | None = None
) -> Deferred | None:
    """The norm of what an activation makes; it and the activation are computed again of what that saves.

    None where x holds values that nobody computes again, where others than Linears read the norm, and where a
    compiler looks on.

    Args:
        compute: gives the norm's value, of x and the module's parameters; by default what `Norm` computes.
    """
    if not isinstance(x, Deferred) or in_compiler() or not module.waits_for_linears():
        return None
    with without_torch_function():
        own = [parameter for parameter in module.own_affine() if parameter is not None]
        waits = type(x.op) is Activation and not x.is_changed() and needs_gradient(x)
        if not waits or any(map(is_foreign, own)):
            return None
        norm, leaves = Norm(module, x), [Leaf() for _ in (x, *own)]
        places = {leaf: place for place, leaf in enumerate(leaves)}
        step = Step(compute or norm.saving_z, tuple(leaves), {})
        like, autocast = Value(x.shape, strides_like(x), norm.to), autocast_of(x.device.type)
        op = Chain(step, places, like, autocast, Caller(moved=True))
        return defer(op, (saved_for(x), *map(unfreed, own)))
