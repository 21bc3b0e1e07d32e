"""Gated norms that save the gate and one tensor beside it: ``norm(x) * act(gate)``, ``norm(x * act(gate))``.

In the first form the norm saves its output, which the product needs, and the Linear behind it computes the
product again from both (as of a SwiGLU). In the second x and the gate are saved, and the Linear computes the
product and the norm again; where others read it, or a compiler looks on, the norm's output is saved as well.
"""

from __future__ import annotations

from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from lowmem_patch.formulas import FORWARD
from lowmem_patch.functional import ActivationKind, NormSettings, activation, in_compiler, ms_norm
from lowmem_patch.nn.context import is_foreign, needs_gradient
from lowmem_patch.nn.deferred import value_of
from lowmem_patch.nn.deferred_norms import norm_of_computed
from lowmem_patch.nn.deferred_ops import Activation, Normed
from lowmem_patch.nn.norms import MSRMSNorm
from lowmem_patch.nn.stored import attach


class GatedMSRMSNorm(MSRMSNorm):
    """In the place of a gated RMSNorm, whose weight it shares.

    Attributes:
        gating: the product with the gate, as a deferred op; None where the norm's input is multiplied.
        kind: the activation of the gate.
        groups: of the channels, each of which is normalised by itself.
        arguments: the names of the forward's arguments.
        needs_gate: the original's forward asks for a gate.
    """

    gating: Activation | None
    kind: ActivationKind
    groups: int
    arguments: tuple[str, str]
    needs_gate: bool

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """x and the gate, ``[..., N]``, by place or by name -> ``[..., N]``; without a gate, where the
        original needs none, the norm alone.

        Raises:
            TypeError: other arguments.
        """
        x, gate = map(value_of, self._bound(args, kwargs))
        dtype = self.output_dtype(x)
        if self.gating is not None:
            y = self.normed(x, dtype)
            return y if gate is None else self._product(self.gating, gate, value_of(y))
        given = x if gate is None else self._multiplied(gate, x)
        if self.groups > 1:
            return self._of_groups(given, x, dtype)
        made = norm_of_computed(self, given)
        return self.normed(value_of(given), dtype) if made is None else made

    def _bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        x, gate = self.arguments
        given = dict(zip(self.arguments, args, strict=False)) | kwargs
        whole = len(given) == len(args) + len(kwargs) and given.keys() <= {x, gate}
        if not whole or x not in given or (self.needs_gate and given.get(gate) is None):
            raise TypeError(f"{type(self).__name__} takes {x} and {gate}")
        return given[x], given.get(gate)

    def _product(self, gating: Activation, gate: Tensor, y: Tensor) -> Tensor:
        waits = needs_gradient(gate) or needs_gradient(y)
        if waits and _are_alike(gate, y) and not is_foreign(gate) and not is_foreign(y):
            return gating.of((gate, y))
        return self._in_full_precision(gate, y).to(y.dtype)

    def _multiplied(self, gate: Tensor, x: Tensor) -> Tensor:
        """The norm's input times the gate; of float16 in float32, as it was: float16 has no room for it."""
        if not _are_alike(gate, x) or x.dtype == torch.float16:
            return self._in_full_precision(gate, x)
        waits = self.waits_for_linears() and (needs_gradient(gate) or needs_gradient(x))
        if waits and not (in_compiler() or is_foreign(gate) or is_foreign(x)):
            return Activation(self.kind).of((gate, x))
        return activation(gate, self.kind, x)

    def _in_full_precision(self, gate: Tensor, x: Tensor) -> Tensor:
        wide = torch.promote_types(torch.promote_types(gate.dtype, x.dtype), torch.float32)
        return x.to(wide) * FORWARD[self.kind](gate.to(wide))

    def _of_groups(self, given: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
        """The norm of each group: z is saved, and the Linear computes the product again."""
        low = min(dtype, x.dtype, key=attrgetter("itemsize"))
        norm = partial(_norm_of_groups, self.groups, self.settings_for(x), low, dtype)
        made = norm_of_computed(self, given, lambda x, weight: norm(x, weight)[0])
        if made is not None:
            return made
        weight = self.weight
        assert weight is not None
        y, z = norm(value_of(given), weight)
        if in_compiler() or not needs_gradient(z) or is_foreign(z) or is_foreign(weight):
            return y
        return attach(y, Normed(False, self._affine(weight, None)), (z,))

    def extra_repr(self) -> str:
        form = "norm(x) * {}(gate)" if self.gating is not None else "norm(x * {}(gate))"
        parts = [super().extra_repr(), form.format(self.kind)]
        return ", ".join(parts + [f"groups={self.groups}"] * (self.groups > 1))


def _are_alike(gate: Tensor, other: Tensor) -> bool:
    return gate.dtype == other.dtype and gate.shape == other.shape


def _norm_of_groups(
    groups: int,
    settings: NormSettings,
    low: torch.dtype,
    dtype: torch.dtype,
    x: Tensor,
    weight: Tensor,
) -> tuple[Tensor, Tensor]:
    """The RMSNorm of each of several groups of channels in ``dtype``, and z in the dtype ``low``; the weight
    has a number for each channel."""
    split = x.reshape(*x.shape[:-1], groups, x.shape[-1] // groups)
    z = ms_norm(split, None, None, settings, low)[0].view(x.shape)
    return torch.mul(z, weight).to(dtype), z
