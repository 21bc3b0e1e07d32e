"""One table of torch function names: complete in itself, true of torch, and the only one."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import flex_attention

import lowmem_patch
from lowmem_patch.constants import ACTIVATION_KINDS
from lowmem_patch.tracing import op_roles
from lowmem_patch.tracing.op_roles import NEVER_WRITES, Role, function_name, names_with, role_of

PACKAGE = Path(lowmem_patch.__file__).parent
NAMES = sorted(name for _, names in op_roles._TABLE for name in names)
# of other libraries, and of other versions of torch than the oldest or the newest that is supported
ELSEWHERE = {
    "fused_layer_norm", "grouped_mm", "_grouped_mm", "const_data_ptr", "mutable_data_ptr",
}  # fmt: skip
CLASS_NAMES = "tracing/categories.py"  # which looks for the same words in the names of classes
USERS_NAMES = "tables/expression.py"  # the functions that an expression of a user may name
# kinds of activations are names of ours, though torch's functions are called so as well
OTHERS = set(NAMES) - set(ACTIVATION_KINDS)
MOST_NAMES = 2  # that a file may name side by side without being a second table


def test_each_name_stands_once() -> None:
    assert [name for name, count in Counter(NAMES).items() if count > 1] == []


def test_each_role_has_a_name() -> None:
    assert [role for role in Role if not names_with(role)] == []


@pytest.mark.parametrize("name", sorted(set(NAMES) - ELSEWHERE))
def test_each_name_is_a_function_of_torch(name: str) -> None:
    homes = (Tensor, torch, F, torch._C._nn, torch.ops.aten, flex_attention)
    assert any(hasattr(home, name) for home in homes)


@pytest.mark.parametrize(
    ("function", "role"),
    [
        (torch.roll, Role.ROLL),
        (Tensor.roll, Role.ROLL),
        (Tensor.T.__get__, Role.MOVE_AXES),  # type: ignore[attr-defined]
        (Tensor.__getitem__, Role.INDEX),
        (F.linear, Role.LINEAR),
        (F.scaled_dot_product_attention, Role.FUSED_ATTENTION),
        (Tensor.cumsum, Role(0)),
    ],
)
def test_roles_of_functions(function: object, role: Role) -> None:
    assert role_of(function_name(function)) == role  # type: ignore[arg-type]


@pytest.mark.parametrize("name", sorted(names_with(NEVER_WRITES)))
def test_no_name_of_an_in_place_function_never_writes(name: str) -> None:
    assert not name.endswith("_") or name.startswith("__") or name == "requires_grad_"


def tables(source: str) -> list[list[str]]:
    """Literals of a source file that name several torch functions side by side."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Tuple, ast.Set, ast.List)):
            items: list[ast.expr | None] = [*node.elts]
        elif isinstance(node, ast.Dict):
            items = node.keys
        else:
            continue
        named = [i.value for i in items if isinstance(i, ast.Constant) and i.value in OTHERS]
        if len(named) > MOST_NAMES:
            found.append(named)
    return found


def test_no_other_file_has_a_table() -> None:
    second = {
        str(path.relative_to(PACKAGE)): found
        for path in sorted(PACKAGE.rglob("*.py"))
        if not str(path).endswith(("tracing/op_roles.py", CLASS_NAMES, USERS_NAMES))
        and (found := tables(path.read_text(encoding="utf-8")))
    }
    assert second == {}
