"""LoRA layers that read one tensor, of which the first that is called computes the outputs of all.

`lowmem_patch.functional.sibling_linears` computes them. The others fetch theirs, each at its own call, where
their input and weights are still those that the first one saw; otherwise they compute it themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lowmem_patch.functional import AdaptedLinear, in_compiler, is_ordinary, sibling_linears
from lowmem_patch.nn.context import is_foreign
from lowmem_patch.nn.deferred import Deferred
from lowmem_patch.nn.low_rank import Products, low_rank_products
from lowmem_patch.nn.op import Projection


class _Waiting(NamedTuple):
    """An output that its layer has not fetched yet, and what it was computed of."""

    output: Tensor
    x: Tensor
    to: Projection
    versions: tuple[int, ...]

    def is_of(self, x: Tensor, to: Projection) -> bool:
        if in_compiler():  # which sees no versions; the plan knows no write into x
            return self.x is x
        pairs = zip(_tensors(self.x, self.to), _tensors(x, to), strict=True)
        same = all(own is one for own, one in pairs) and _scale(self.to) == _scale(to)
        return same and self.versions == _versions(x, to)


class Siblings:
    """The layers, in the order of their calls; copies and pickles take it along with them."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self.layers = tuple(layers)
        # of each layer but the first; no dict: torch 2.11 breaks a graph that writes into one
        self._waiting: tuple[_Waiting | None, ...] = ()
        self._is_in_vain = False

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_waiting": ()}

    def output(
        self, layer: nn.Module, x: Tensor, products: Products, low_precision: bool
    ) -> Tensor | None:
        """A layer's output; None where it has to compute it itself.

        Args:
            layer: one of the layers.
            x: its input, ordinary or deferred.
            products: what it computes.
            low_precision: as of `lowmem_patch.nn.adapters.use_adapter`.
        """
        place = next((i for i, one in enumerate(self.layers) if one is layer), None)
        to, dtype, rest = products
        # no place: a replica of nn.DataParallel
        if place is None or rest or not (in_compiler() or is_ordinary()):
            return None
        if place:
            return self._fetched(place, x, to)
        if self._waiting:  # whoever should have fetched it read something else
            self._is_in_vain = True
            self._waiting = ()
        return None if self._is_in_vain else self._first_output(x, to, dtype, low_precision)

    def _fetched(self, place: int, x: Tensor, to: Projection) -> Tensor | None:
        if not self._waiting:
            return None
        found = self._waiting[place - 1]
        rest = (*self._waiting[: place - 1], None, *self._waiting[place:])
        self._waiting = () if rest.count(None) == len(rest) else rest
        if found is None or found.is_of(x, to):
            return None if found is None else found.output
        self._is_in_vain = True
        return None

    def _first_output(
        self, x: Tensor, to: Projection, dtype: torch.dtype, low_precision: bool
    ) -> Tensor | None:
        linears = [to]
        for layer in self.layers[1:]:
            found = low_rank_products(layer, x.dtype, low_precision)
            if found is None or found[1] != dtype or found[2]:
                return None
            linears.append(found[0])
        if not all(_fits(x, one) for one in linears):
            return None
        value = x.op.saved_value(x, dtype) if isinstance(x, Deferred) else x
        if value is None:
            return None
        outputs = sibling_linears(value, [AdaptedLinear(*one) for one in linears], dtype)  # type: ignore[arg-type]
        compiling = in_compiler()
        self._waiting = tuple(
            [
                _Waiting(y, x, one, () if compiling else _versions(x, one))
                for y, one in zip(outputs[1:], linears[1:], strict=True)
            ]
        )
        return outputs[0]


def _tensors(x: Tensor, to: Projection) -> tuple[Any, ...]:
    weight, bias, adapter = to
    return (x, weight, bias) if adapter is None else (x, weight, bias, *adapter[:2])


def _versions(x: Tensor, to: Projection) -> tuple[int, ...]:
    return tuple(tensor._version for tensor in _tensors(x, to) if tensor is not None)


def _scale(to: Projection) -> float | None:
    return None if to.adapter is None else to.adapter.scale


def _fits(x: Tensor, to: Projection) -> bool:
    """Whether autograd records this Linear by itself, of whole tensors on one device."""
    weight, bias, adapter = to
    if adapter is None:
        return False
    lora_A, lora_B, _ = adapter
    given = [tensor for tensor in (weight, bias, lora_A, lora_B) if tensor is not None]
    if any(
        is_foreign(one) or one.device != x.device or not one.is_floating_point() for one in given
    ):
        return False
    # a trainer that shards gathers each layer's weights at its own call (DeepSpeed's ZeRO-3)
    if weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
        return False
    if lora_A.shape != (lora_B.shape[-1], x.shape[-1]) or len(lora_B) != len(weight):
        return False
    return x.requires_grad or any(one.requires_grad for one in given)
