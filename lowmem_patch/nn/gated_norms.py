"""Gated norms that save the gate and one tensor beside it: ``norm(x) * act(gate)``, ``norm(x * act(gate))``.

In the first form the norm saves its output, which the product needs, and the Linear behind it computes the
product again from both (as of a SwiGLU). In the second the product is not saved: x and the gate are, and
the norm's output, which the Linear saves as well.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from lowmem_patch.functional import (
    ActivationKind,
    Affine,
    activation,
    in_compiler,
    ms_norm,
)
from lowmem_patch.nn.context import is_foreign, may_be_freed, needs_gradient
from lowmem_patch.nn.deferred import value_of
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
    """

    gating: Activation | None
    kind: ActivationKind
    groups: int
    arguments: tuple[str, str]

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """x and the gate, ``[..., N]``, by place or by name -> ``[..., N]``; without a gate the norm alone.

        Raises:
            TypeError: other arguments.
        """
        x, gate = map(value_of, self._bound(args, kwargs))
        if self.gating is not None:
            y = self.normed(x)
            return y if gate is None else self._product(self.gating, gate, value_of(y))
        if gate is not None:
            x = activation(gate, self.kind, x)
        return self.normed(x) if self.groups == 1 else self._of_groups(x)

    def _bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        if not kwargs and len(args) == 2:
            return args
        given = dict(zip(self.arguments, args, strict=False)) | kwargs
        x, gate = self.arguments
        if x not in given or len(given) != len(args) + len(kwargs) or not given.keys() <= {x, gate}:
            raise TypeError(f"{type(self).__name__} takes {x} and {gate}")
        return given[x], given.get(gate)

    def _product(self, gating: Activation, gate: Tensor, y: Tensor) -> Tensor:
        waits = needs_gradient(gate) or needs_gradient(y)
        if waits and gate.dtype == y.dtype and not is_foreign(gate) and not is_foreign(y):
            return gating.of((gate, y))
        return activation(gate, self.kind, y).to(y.dtype)

    def _of_groups(self, x: Tensor) -> Tensor:
        """The norm of each group, times the weight, which has a number for each channel: z is saved, and the
        Linear computes the product again."""
        weight = self.weight
        assert weight is not None
        dtype = self.output_dtype(x)
        low = min(dtype, x.dtype, key=attrgetter("itemsize"))
        split = x.reshape(*x.shape[:-1], self.groups, -1)
        z = ms_norm(split, None, None, self._settings_for(x), low)[0].view(x.shape)
        y = torch.mul(z, weight).to(dtype)
        if in_compiler() or not needs_gradient(z) or is_foreign(z) or is_foreign(weight):
            return y
        given = weight.detach().clone() if may_be_freed() else weight
        return attach(y, Normed(False, Affine(given, None, self.settings)), (z,))

    def extra_repr(self) -> str:
        form = "norm(x) * {}(gate)" if self.gating is not None else "norm(x * {}(gate))"
        parts = [super().extra_repr(), form.format(self.kind)]
        return ", ".join(parts + [f"groups={self.groups}"] * (self.groups > 1))
