"""MS norms: LayerNorm and RMSNorm that keep their output and not their input (MS-BP, arXiv 2406.16282).

The output is also what the next Linear keeps, so the norm itself keeps one number per row. With a
folded affine the output is z itself; with an affine that stays (``share``) backward recovers
z = (y - beta) / gamma.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lowmem_patch.errors import PatchError, UnfoldedWeightsError
from lowmem_patch.functional import compiled, is_sharded, ms_layer_norm, ms_norm_pair, ms_rms_norm
from lowmem_patch.nn.context import (
    autocast_dtype,
    has_backward_hooks,
    is_sharded_alone,
    needs_gradient,
)
from lowmem_patch.nn.deferred import value_of
from lowmem_patch.nn.deferred_ops import DeferredNorm, Kept
from lowmem_patch.nn.narrow import attach_copy

__all__ = ["MSLayerNorm", "MSNorm", "MSRMSNorm", "StockMSLayerNorm", "StockMSRMSNorm"]


class MSNorm(nn.Module):
    """Base of both; made from an existing norm by :meth:`from_module`, whose parameters it shares.

    Attributes:
        eps: as in the original.
        weight_offset: 1.0 where the original multiplies by ``1 + weight`` (Gemma), else 0.0.
        folded: the affine lives in the next Linears; weight and bias stay behind as identities, so
            that the state dict is the original's.
        feeds_autocast: all readers are ops that autocast casts: the output takes autocast's dtype.
        full_precision_autocast: under autocast the original computes and returns float32.
        output: the dtype follows the ``input`` (Gemma), the ``weight`` (T5) or ``both``, promoted (LLaMA).
        sunk: the output is deferred behind row moves, to the Linear that reads it.
        one_copy: ``always`` or ``autocast``: readers that cast the output keep no copy of their own.
        shares_copy: Linears among other readers get one narrow copy of a wide output under autocast.
        lowers: adapters that read the output compute in its dtype (see :class:`Deferred`).
    """

    weight: nn.Parameter | None
    bias: nn.Parameter | None
    centered: bool

    def __init__(
        self,
        weight: nn.Parameter | None,
        bias: nn.Parameter | None,
        eps: float,
        *,
        weight_offset: float = 0.0,
        folded: bool = False,
        feeds_autocast: bool = False,
        full_precision_autocast: bool = False,
        output: str = "input",
        sunk: bool = False,
        one_copy: str | None = None,
        lowers: bool = False,
        shares_copy: bool = False,
    ) -> None:
        nn.Module.__init__(self)  # past a stock norm, which would make parameters of its own
        self.register_parameter("weight", weight)
        self.register_parameter("bias", bias)
        self.eps = eps
        self.weight_offset = weight_offset
        self.folded = folded
        self.feeds_autocast = feeds_autocast
        self.full_precision_autocast = full_precision_autocast
        self.output = output
        self.sunk = sunk
        self.one_copy = one_copy
        self.lowers = lowers
        self.shares_copy = shares_copy

    def normalize(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """The norm's value in ``dtype``, by default :meth:`output_dtype`."""
        weight, bias = (None, None) if self.folded else (self.weight, self.bias)
        dtype = dtype or self.output_dtype(x)
        if torch.compiler.is_compiling():
            narrow = self._narrow_dtype(x) if self.shares_copy else None
            settings = (self.eps, self.weight_offset, self.centered, dtype, narrow)
            return compiled.norm(x, weight, bias, *settings)
        if self.centered:
            return ms_layer_norm(x, self.eps, weight, bias, dtype, self.weight_offset)
        return ms_rms_norm(x, self.eps, weight, self.weight_offset, out_dtype=dtype)

    def output_dtype(self, x: Tensor) -> torch.dtype:
        """The dtype that the original would return, or the one its readers would cast that to."""
        narrow = autocast_dtype(x.device.type, x.dtype)
        if narrow is not None:
            if self.feeds_autocast:
                return narrow
            if self.full_precision_autocast:
                return torch.float32
        if self.output == "input" or self.weight is None:
            return x.dtype
        if self.output == "weight":
            return self.weight.dtype
        return torch.promote_types(x.dtype, self.weight.dtype)

    def forward(self, x: Tensor) -> Tensor | Kept:
        """``[..., N] -> [..., N]``; deferred where it is sunk or casts wait, and a gradient is wanted."""
        if self.folded and torch.is_grad_enabled():
            self._refuse_training()
        x = value_of(x)  # of an activation or a gated product that waits
        # who reads a DTensor looks for one, by isinstance
        watched = has_backward_hooks(self) or is_sharded_alone(self) or is_sharded(x)
        if self.sunk and not watched and needs_gradient(x):
            dtype = self.output_dtype(x)  # autocast may be another one where the value is computed
            return DeferredNorm(x, dtype, partial(self.normalize, dtype=dtype), self.lowers)
        if self.shares_copy and not torch.compiler.is_compiling():
            narrow = self._narrow_dtype(x)
            if narrow is not None:
                return self._pair(x, narrow)
        y = self.normalize(x)
        if self.one_copy is None or watched or not needs_gradient(y):
            return y
        waits = self.one_copy == "always" or torch.is_autocast_enabled(y.device.type)
        return Kept(y, self.lowers) if waits else y

    def _refuse_training(self) -> None:
        for parameter in (self.weight, self.bias):
            if parameter is not None and parameter.requires_grad:
                raise PatchError(
                    "a norm whose affine was folded into the next Linears was set to train "
                    "(requires_grad), which would have no effect: call patch_model again, after the "
                    "last change of what trains and after get_peft_model"
                )

    def _narrow_dtype(self, x: Tensor) -> torch.dtype | None:
        """The dtype in which autocast would make a copy of the output for each Linear that reads it."""
        narrow = autocast_dtype(x.device.type, x.dtype)
        if narrow is None or not torch.is_grad_enabled():
            return None
        return narrow if narrow.itemsize < self.output_dtype(x).itemsize else None

    def _pair(self, x: Tensor, narrow: torch.dtype) -> Tensor:
        weight, bias = (None, None) if self.folded else (self.weight, self.bias)
        y, copy = ms_norm_pair(
            x,
            self.eps,
            weight,
            bias,
            centered=self.centered,
            wide=self.output_dtype(x),
            narrow=narrow,
            weight_offset=self.weight_offset,
        )
        attach_copy(y, copy)
        return y

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        if self.folded:
            self.refuse_unfolded(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def refuse_unfolded(self, state_dict: dict[str, Any], prefix: str) -> None:
        """Raise when the weights to be loaded are not those of a folded model.

        Raises:
            UnfoldedWeightsError: gamma is not 1 (0 for 1 + w norms) or beta is not 0.
        """
        for name, identity in (("weight", 1.0 - self.weight_offset), ("bias", 0.0)):
            value = state_dict.get(prefix + name)
            if value is not None and bool((value != identity).any()):
                raise UnfoldedWeightsError(
                    f"{prefix}{name} is not {identity:g} everywhere, but this norm's affine was folded "
                    "into the next Linears: load into an unpatched model (unpatch_model) and patch "
                    "again, or load weights that `lowmem-patch convert` folded"
                )

    def extra_repr(self) -> str:
        size = None if self.weight is None else self.weight.numel()
        parts = [f"{size}", f"eps={self.eps:g}", "fold" if self.folded else "share"]
        if self.weight_offset:
            parts.append(f"weight_offset={self.weight_offset:g}")
        if self.sunk:
            parts.append("sunk")
        return ", ".join(parts)


class MSLayerNorm(MSNorm):
    """LayerNorm over the last dimension that keeps its output (paper, MS-LayerNorm)."""

    centered = True


class MSRMSNorm(MSNorm):
    """RMSNorm over the last dimension that keeps its output (paper, MS-RMSNorm)."""

    centered = False


class StockMSLayerNorm(MSLayerNorm, nn.LayerNorm):  # type: ignore[misc]  # its weight may be None
    """In place of a `torch.nn.LayerNorm`, which it still is to whoever asks: transformers' Trainer decays
    the weights of no such module."""


class StockMSRMSNorm(MSRMSNorm, nn.RMSNorm):  # type: ignore[misc]  # its weight may be None
    """In place of a `torch.nn.RMSNorm`, which it still is to whoever asks."""
