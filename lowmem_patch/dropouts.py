"""What a call of torch's dropout asks for."""

from __future__ import annotations

from typing import Any, NamedTuple

__all__ = ["DropoutCall", "dropout_call"]


class DropoutCall(NamedTuple):
    """``p`` is 0 where the call does nothing: outside training, or for a probability of 0."""

    p: float
    in_place: bool


def dropout_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> DropoutCall:
    """Read the arguments of ``F.dropout`` or ``torch.dropout``, which name ``training`` differently."""
    p = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
    training = kwargs.get("training", kwargs.get("train", True))
    training = args[2] if len(args) > 2 else training
    in_place = args[3] if len(args) > 3 else kwargs.get("inplace", False)
    return DropoutCall(float(p) if training else 0.0, bool(in_place))
