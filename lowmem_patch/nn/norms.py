"""MS norms: LayerNorm and RMSNorm that save their output and not their input (MS-BP, arXiv 2406.16282).

The next Linear saves the output as well, so the norm itself saves one number per row. Backward recovers
z = (y - beta) / gamma; where gamma is near 0, the norm and its Linears save z. A folded norm's output is z.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lowmem_patch.constants import STOCK_NAMES
from lowmem_patch.functional import (
    Affine,
    NormSettings,
    below_modes,
    checkpointed_block,
    compiled,
    in_compiler,
    is_exporting,
    ms_norm,
    packs_saved_tensors,
)
from lowmem_patch.nn.context import (
    autocast_dtype,
    is_foreign,
    is_fsdp_unit,
    may_be_freed,
    needs_gradient,
    one_tensor,
    train,
    trains_here,
)
from lowmem_patch.nn.deferred import value_of
from lowmem_patch.nn.deferred_norms import Norm, norm_of_computed
from lowmem_patch.nn.deferred_ops import Normed, Saved, Shared
from lowmem_patch.nn.gamma_checks import GammaChecks
from lowmem_patch.nn.gammas import can_be_checked, check_gammas, refuse_changes, refuse_unfolded
from lowmem_patch.nn.stored import attach, keep
from lowmem_patch.nn.turned_norms import saved_output
from lowmem_patch.nn.watched import mark, marked_as, watch


@dataclasses.dataclass(frozen=True)
class OutputUse:
    """What becomes of a norm's output.

    Attributes:
        feeds_autocast: all readers are ops that autocast casts: the output takes autocast's dtype.
        full_precision_autocast: under a GPU's autocast the original computes and returns float32.
        output: the dtype follows the ``input`` (Gemma), the ``weight`` (T5) or ``both``, promoted (LLaMA).
        behind_row_moves: the output is deferred behind row moves, to the Linear that reads it.
        of_computed: an activation makes the input, which is computed again, and Linears alone read the
            output, its rows as they are: the norm is computed again as well.
        one_copy: ``always`` or ``autocast``: readers that cast the output keep no copy of their own.
        shares_copy: under autocast, Linears among other readers get one low-precision copy of the output.
        output_saved: an op that is no Linear saves the output, so that the norm had better save it too.
        output_moved: Linears read views of the output that are not contiguous: each would save a copy of the
            output, and saves none of z.
        lies_as_input: no Linear and no matmul reads the output: it lies in memory as the input does, as that
            of elementwise operators would. Fused attention's then does, too: a Linear saves no copy of it.
        turned: it is of queries or keys, which a rotary embedding turns (`lowmem_patch.nn.turned_norms`).
    """

    feeds_autocast: bool = False
    full_precision_autocast: bool = False
    output: str = "input"
    behind_row_moves: bool = False
    of_computed: bool = False
    one_copy: str | None = None
    shares_copy: bool = False
    output_saved: bool = False
    output_moved: bool = False
    lies_as_input: bool = False
    turned: bool = False


class MSNorm(nn.Module):
    """LayerNorm or RMSNorm in the place of an existing norm, whose parameters it shares.

    Attributes:
        settings: what it computes.
        folded: the affine lives in the next Linears; weight and bias stay behind as identities, so
            that the state dict is the original's.
        use: of its output.
        eps_name: the attribute that holds eps, as it did in the original: users set it. None in it leaves
            eps to torch, which takes that of the input's dtype in float64. Empty: that of ``settings`` stays.
        names: of gamma and beta in the state dict; empty: there is none. `NamedMSNorm` has others than these.
        turns_back: whether the rotary embedding behind it has an inverse; None before the first one.
        in_eight_bits: the output is saved in 8 bits; where somebody packs what is saved, hooks do it.
        dim: that it normalises; -1, or 1, whose entries lie last in the output's memory.
    """

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(
        self,
        weight: nn.Parameter | None,
        bias: nn.Parameter | None,
        settings: NormSettings,
        *,
        folded: bool = False,
        use: OutputUse = OutputUse(),
        eps_name: str = "",
        names: tuple[str, str] = STOCK_NAMES,
        dim: int = -1,
    ) -> None:
        nn.Module.__init__(self)  # past a stock norm, which would make parameters of its own
        for name, parameter in zip(names, (weight, bias), strict=True):
            if name:
                self.register_parameter(name, parameter)
        self.names = names
        self.settings = settings
        self.folded = folded
        self.use = use
        self.eps_name = eps_name
        self.gamma_checks = GammaChecks()
        self.in_eight_bits = False
        self.dim = dim
        self.turns_back: bool | None = None

    def normalize(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """The norm's value in ``dtype``."""
        if in_compiler() and not is_exporting():
            return compiled.norm(*self._in_graph(x, dtype))
        return ms_norm(x, *self.own_affine(), self.settings_for(x), dtype)[0]

    def _in_graph(self, x: Tensor, dtype: torch.dtype) -> tuple[Any, ...]:
        """The arguments of `compiled.norm`."""
        weight, bias = self.own_affine()
        low = self._low_dtype(x) if self.use.shares_copy and self.gamma_checks.recovers_z else None
        # a high-precision output must not be computed from a low-precision z
        saved, saves_z = low or dtype, low is None and self._compiled_saves_z(weight, bias)
        saved_as = None if saves_z else self.gamma_checks.saved_as(saved)
        return x, weight, bias, self.settings_for(x), dtype, saved, saved_as

    def settings_for(self, x: Tensor) -> NormSettings:
        """What is computed of ``x`` now: eps is an attribute that users set."""
        eps = getattr(self, self.eps_name) if self.eps_name else self.settings.eps
        if eps is None and x.dtype == torch.float64:
            eps = torch.finfo(torch.float64).eps
        if eps is None or eps == self.settings.eps:
            return self.settings
        return self.settings._replace(eps=eps)

    def own_affine(self) -> tuple[Any, Any]:
        """weight and bias, tensors or None; none where they were folded into the next Linears."""
        if self.folded:
            return None, None
        own = self._parameters  # nn.Module's own look-up costs as much as a small kernel
        if "weight" in own and "bias" in own:
            return own["weight"], own["bias"]
        return self.weight, self.bias  # parametrized, pruned, or a replica of nn.DataParallel

    def output_dtype(self, x: Tensor) -> torch.dtype:
        """The dtype that the original would return, or the one its readers would cast that to."""
        return self._output_dtype(x, autocast_dtype(x.device.type, x.dtype))

    def _output_dtype(self, x: Tensor, low: torch.dtype | None) -> torch.dtype:
        """As `output_dtype`, under an autocast to ``low``."""
        use = self.use
        if low is not None:
            if use.feeds_autocast:
                return low
            if use.full_precision_autocast and x.device.type != "cpu":  # whose autocast leaves it
                return torch.float32
        weight = None if use.output == "input" else self.weight
        if weight is None or weight.dtype == x.dtype:
            return x.dtype
        own = weight.dtype
        return own if use.output == "weight" else torch.promote_types(x.dtype, own)

    def forward(self, x: Any = None, *others: Any, **named: Any) -> Tensor:
        """``[..., N] -> [..., N]``; a deferred tensor where a Linear shall save something else."""
        if x is None or others or named:
            x = one_tensor(self, x, others, named)
        if self.folded:
            refuse_changes(self)
        made = norm_of_computed(self, x)
        return self._of_values(value_of(x)) if made is None else made

    def _of_values(self, x: Tensor) -> Tensor:
        if self.dim != -1:
            y = self.normed(x.movedim(self.dim, -1))
            return marked_as(y, y.movedim(-1, self.dim))
        # a compiler lays tensors out by itself, and cannot sort strides that are symbols
        if self.use.lies_as_input and not (in_compiler() or x.is_contiguous()):
            order = sorted(range(x.dim()), key=x.stride, reverse=True)
            if order[-1] == x.dim() - 1:
                y = self.normed(x.permute(order))
                return marked_as(y, y.permute(sorted(order, key=order.__getitem__)))
        waits = self.use.behind_row_moves and needs_gradient(x) and not is_foreign(x)
        if waits and not is_fsdp_unit(self):
            return Norm(self, x).of(x, *(p for p in self.own_affine() if p is not None))
        return self.normed(x)

    def normed(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """The norm in ``dtype``, by default :meth:`output_dtype`, as its readers shall read it."""
        dtype = self.output_dtype(x) if dtype is None else dtype
        if in_compiler():
            return self._compiled(x, dtype)
        weight, _ = self.own_affine()
        foreign = is_foreign(x) or (weight is not None and is_foreign(weight))
        if foreign or not trains_here():
            return self.normalize(x, dtype)
        return below_modes(self._saving, x, dtype)  # type: ignore[no-any-return]  # it calls any function

    def _saving(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """The norm where autograd saves for its backward."""
        weight, bias = self.own_affine()
        own_trains = train(weight, bias)
        trains = own_trains or x.requires_grad
        saves_z = trains and self._saves_z(weight, bias, own_trains)
        copy = self._low_dtype(x) if self.use.shares_copy else None
        # what Linears save in the place of the output: a copy of it, z, or both
        saved = dtype if copy is None else copy
        dtypes = (dtype, copy, saved if saves_z else None)
        settings, stored = self.settings_for(x), self.in_eight_bits and not packs_saved_tensors()
        alone = (self.use.turned, trains, copy is None, not saves_z, not stored)
        saved_as = partial(saved_output, self) if all(alone) else None
        y, *more = ms_norm(
            x, weight, bias, settings, *dtypes, trains=trains, eight_bits=stored, saved_as=saved_as
        )
        if trains:
            mark(y)
        # an adapter may save the copy of what needs no gradient
        if copy is None and not saves_z:
            return self._shared(y) if trains else y
        affine = None
        if saves_z:
            affine = self._affine(weight, bias)
        else:
            self._confirm_in_backward(y, saved)
        sources = tuple(source for source in more if source is not None)
        return attach(y, Normed(copy is not None, affine), sources)

    def _confirm_in_backward(self, y: Tensor, saved: torch.dtype) -> None:
        """Let backward ask, where the norm saved its output (in ``saved``) without a wait for gamma."""
        check, node = self.gamma_checks.of_forward, y.grad_fn
        if check is not None and check.expected and node is not None and hasattr(node, "confirm"):
            node.confirm = partial(self.gamma_checks.confirm, check, saved)

    def _shared(self, y: Tensor) -> Tensor:
        """The output, which the norm itself saves."""
        self._confirm_in_backward(y, y.dtype)
        return attach(y, Shared(y.grad_fn)) if self._is_one_copy(y) else watch(y)

    def waits_for_linears(self) -> bool:
        """Whether Linears alone read the output, and would compute it again from a few tensors."""
        return self.use.of_computed and not (self.folded or self.in_eight_bits)

    def _compiled(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """The norm as a compiler sees it."""
        if self.in_eight_bits and trains_here() and not is_foreign(x):
            y, *near = compiled.stored_norm(*self._in_graph(x, dtype))
            return keep(y, Normed(False, None), tuple(near)) if y.requires_grad else y
        y = self.normalize(x, dtype)
        return Saved().of(y) if needs_gradient(y) and self._is_one_copy(y) else y

    def _is_one_copy(self, y: Tensor) -> bool:
        """Whether readers that cast the output shall keep no copy of their own."""
        wanted = self.use.one_copy
        return wanted == "always" or (
            wanted == "autocast" and torch.is_autocast_enabled(y.device.type)
        )

    def _saves_z(self, weight: Tensor | None, bias: Tensor | None, trains: bool) -> bool:
        if weight is None and bias is None:
            return False
        checks = self.gamma_checks
        by_itself = trains and not self.use.output_saved
        if by_itself and self.use.output_moved:
            return True
        if checks.assumed is not None:
            return not checks.assumed
        block = checkpointed_block() if trains else None
        if block is not None and any(map(_is_made_anew, (weight, bias))):
            return True  # what a parametrization computes has another place in the second run
        if block is None or not can_be_checked(weight, bias):
            return self._is_told_to_save_z(weight, bias, trains, by_itself)
        decide = partial(self._is_told_to_save_z, weight, bias, trains, by_itself)
        return checks.decided(block, decide, weight, bias)

    def _compiled_saves_z(self, weight: Tensor | None, bias: Tensor | None) -> bool:
        """As `_saves_z` for a compiler, under which nobody checks gamma."""
        if weight is None and bias is None:
            return False
        by_itself = train(weight, bias) and not self.use.output_saved
        return by_itself or not self.gamma_checks.recovers_z

    def _is_told_to_save_z(
        self, weight: Tensor | None, bias: Tensor | None, trains: bool, by_itself: bool
    ) -> bool:
        """What the values of gamma and beta say."""
        checks = self.gamma_checks
        if checks.gathered:  # to ask for its values would stop the host at each norm
            return by_itself or can_be_checked(weight, bias)
        check = checks.of_forward if trains else checks.last
        if check is not None and check.was_of(weight, bias):
            if check.expected or (by_itself and check.expected is not None):
                return not check.expected
            return not checks.told(check)
        if not can_be_checked(weight, bias):
            return by_itself
        if not by_itself:
            check_gammas([self])  # which nobody may do in a CUDA graph
        return by_itself or checks.last is None or not checks.told(checks.last)

    def _affine(self, weight: Tensor | None, bias: Tensor | None) -> Affine:
        """gamma and beta with which the Linears compute the output again."""
        if may_be_freed():  # the Linears' backward may come before the norm's
            weight = None if weight is None else weight.detach().clone()
            bias = None if bias is None else bias.detach().clone()
        return Affine(weight, bias, self.settings)

    def _low_dtype(self, x: Tensor) -> torch.dtype | None:
        """The dtype in which autocast would make a copy of the output for each Linear that reads it."""
        low = autocast_dtype(x.device.type, x.dtype)
        if low is None or not torch.is_grad_enabled():
            return None
        return low if low.itemsize < self._output_dtype(x, low).itemsize else None

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        self.gamma_checks.forget()
        apply: Any = super()._apply  # has no types
        return apply(*args, **kwargs)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        if self.folded:
            refuse_unfolded(self, state_dict, prefix)
        self.gamma_checks.forget()
        super()._load_from_state_dict(state_dict, prefix, *args)
        # for a compiler, which has its graphs made anew where this tells otherwise
        check_gammas([self])

    def extra_repr(self) -> str:
        size = None if self.weight is None else self.weight.numel()
        parts = [f"{size}", f"eps={self.settings.eps:g}", "fold" if self.folded else "share"]
        if self.settings.identity_weight != 1.0:
            parts.append("1 + weight")
        if self.use.behind_row_moves:
            parts.append("behind_row_moves")
        if self.dim != -1:
            parts.append(f"dim={self.dim}")
        return ", ".join(parts)


def _is_made_anew(vector: Any) -> bool:
    """Whether gamma or beta is computed of parameters at each look; FSDP's are views of what is held."""
    return vector is not None and vector.grad_fn is not None and not vector._is_view()


class MSLayerNorm(MSNorm):
    """LayerNorm over the last dimension that saves its output (paper, MS-LayerNorm)."""


class MSRMSNorm(MSNorm):
    """RMSNorm over the last dimension that saves its output (paper, MS-RMSNorm)."""


class StockMSLayerNorm(MSLayerNorm, nn.LayerNorm):  # type: ignore[misc]  # its weight may be None
    """In place of a `torch.nn.LayerNorm`, which it still is to whoever asks: transformers' Trainer decays
    the weights of no such module."""


class StockMSRMSNorm(MSRMSNorm, nn.RMSNorm):  # type: ignore[misc]  # its weight may be None
    """In place of a `torch.nn.RMSNorm`, which it still is to whoever asks."""


class NamedMSNorm(MSNorm):
    """In place of a norm whose gamma and beta have names of their own."""

    def __getattr__(self, name: str) -> Any:
        called = dict(zip(STOCK_NAMES, self.__dict__.get("names", STOCK_NAMES), strict=True))
        own = called.get(name, name)
        if own == name:
            return super().__getattr__(name)
        return getattr(self, own) if own else None


class NamedMSLayerNorm(NamedMSNorm, MSLayerNorm):
    """See `NamedMSNorm`."""


class NamedMSRMSNorm(NamedMSNorm, MSRMSNorm):
    """See `NamedMSNorm`."""
