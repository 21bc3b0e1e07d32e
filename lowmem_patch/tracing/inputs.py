"""The arguments of one forward, as a user gives them."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from lowmem_patch.errors import TraceError


@dataclasses.dataclass(frozen=True)
class ExampleInputs:
    """Arguments of one forward; tensors may lie on any device."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def tensors(self) -> list[Tensor]:
        """Every tensor among them."""
        return [leaf for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Tensor)]

    def map(self, function: Any) -> ExampleInputs:
        """Apply ``function`` to every tensor."""
        args, kwargs = tree_map_only(Tensor, function, (self.args, self.kwargs))
        return ExampleInputs(args, kwargs)

    def __str__(self) -> str:
        named = {**{f"input {i}": v for i, v in enumerate(self.args)}, **self.kwargs}
        return ", ".join(
            f"{name} {'x'.join(map(str, v.shape))}"
            for name, v in named.items()
            if isinstance(v, Tensor)
        )


def as_example_inputs(inputs: Any) -> ExampleInputs:
    """A tensor, a tuple of arguments or a mapping of keyword arguments, as a user gives them.

    Raises:
        TraceError: it is something else, such as a list of rows, which is no batch yet.
    """
    if isinstance(inputs, ExampleInputs):
        return inputs
    if isinstance(inputs, Tensor):
        return ExampleInputs((inputs,))
    if hasattr(inputs, "keys"):
        return _by_name(dict(inputs))
    if isinstance(inputs, tuple):
        return ExampleInputs(inputs)
    kind = type(inputs).__name__
    mend = _MENDS.get(kind, "take one batch, such as next(iter(dataloader))")
    if isinstance(inputs, list) and inputs and all(isinstance(one, Tensor) for one in inputs):
        mend = (
            "a DataLoader gives images and labels in one. Give what the forward takes, such as batch[0], or "
            "a tuple of its arguments"
        )
    raise TraceError(
        "example_inputs must be one batch: a mapping of tensors (the forward's keyword arguments), a tuple "
        f"of its arguments, or one tensor. This is a {kind}: {mend}"
    )


def _by_name(inputs: dict[str, Any]) -> ExampleInputs:
    """Keyword arguments. Beside tensors a model may take lists, such as the sizes of images."""
    found = ExampleInputs((), inputs)
    for name, value in () if found.tensors else inputs.items():
        if type(value).__name__ == "ndarray":
            raise TraceError(f"example_inputs[{name!r}] is a numpy array: {_MENDS['ndarray']}")
        row = value[0] if isinstance(value, list) and value else None
        if isinstance(row, list) and row and isinstance(row[0], int):
            raise TraceError(
                f"example_inputs[{name!r}] is a list of lists of numbers: give a tensor, as a tokenizer "
                'with return_tensors="pt" does'
            )
    return found


def about_arguments(model: nn.Module, inputs: ExampleInputs, error: Exception) -> str:
    """For the message of a forward that failed: what it takes, where its arguments may be to blame."""
    if inputs.tensors and not inputs.args[1:] and not isinstance(error, (TypeError, ValueError)):
        return ""
    named = [
        name
        for name, parameter in inspect.signature(model.forward).parameters.items()
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    few = named if len(named) <= _MOST else [*named[:_MOST], "..."]
    takes = f"; its forward takes ({', '.join(few)})" if named else ""
    return takes + ("; are labels among the inputs?" if len(inputs.args) > 1 else "")


_MOST = 6  # names of arguments that an error lists
_MENDS = {
    "ndarray": "make a tensor of it by torch.from_numpy",
    "str": "let a tokenizer make tensors of it",
    "list": "give a batch that a DataLoader has collated, or a tuple of the forward's arguments",
}
