"""Arguments and options that several commands share."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Annotated

import typer  # noqa: TID251 - the command line is what typer is for

if TYPE_CHECKING:
    import torch

__all__ = [
    "BatchOption",
    "DebugOption",
    "Dtype",
    "JsonOption",
    "LengthOption",
    "ModelArgument",
    "PresetOption",
    "RevisionOption",
    "StoredDtype",
    "TrustOption",
    "torch_dtype",
]


class Dtype(enum.StrEnum):
    """Dtypes that can be asked for."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class StoredDtype(enum.StrEnum):
    """The same, or as stored."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="A folder, a hub id (org/name) or a timm name (timm/...)."
    ),
]
PresetOption = Annotated[
    str, typer.Option("--preset", help="auto, exact, paper, or the path of a YAML file.")
]
RevisionOption = Annotated[
    str | None, typer.Option("--revision", help="Branch, tag or commit on the hub.")
]
TrustOption = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code", help="Run Python code that the checkpoint brings (dangerous)."
    ),
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON object instead of tables.")
]
DebugOption = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
BatchOption = Annotated[int, typer.Option("--batch-size", min=1, help="Rows of the example input.")]
LengthOption = Annotated[
    int | None,
    typer.Option("--seq-len", min=1, help="Tokens per row, for models that read tokens."),
]


def torch_dtype(dtype: Dtype | StoredDtype | None) -> torch.dtype | None:
    """The torch dtype of an option; None for auto or nothing."""
    import torch

    found = None if dtype is None else getattr(torch, dtype.value, None)
    return found if isinstance(found, torch.dtype) else None
