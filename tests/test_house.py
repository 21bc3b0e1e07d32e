"""Figures of the house that must not grow again; CONTRIBUTING has the table."""

from __future__ import annotations

import ast
from pathlib import Path

FILES = sorted((Path(__file__).parent.parent / "lowmem_patch").rglob("*.py"))
LARGEST_COMPLEXITY = 15
LONGEST_FUNCTION = 60
BRANCHES = (
    ast.If, ast.For, ast.While, ast.IfExp, ast.ExceptHandler, ast.comprehension, ast.Assert,
)  # fmt: skip
# words of a private language, which a stranger cannot know
PRIVATE_WORDS = ("raised_", "lowers", "Lowered", "follow_joint", "strangers", "spoiled", "Standing")


def functions() -> list[tuple[str, ast.AST]]:
    return [
        (f"{file.name}:{node.name}", node)
        for file in FILES
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]


def complexity(function: ast.AST) -> int:
    """Cyclomatic complexity: branches, conditions of comprehensions, and operands of and/or."""
    count = 1
    for node in ast.walk(function):
        count += isinstance(node, BRANCHES)
        if isinstance(node, ast.comprehension):
            count += len(node.ifs)
        elif isinstance(node, ast.BoolOp):
            count += len(node.values) - 1
    return count


def files_with(text: str) -> list[str]:
    return [file.name for file in FILES if text in file.read_text(encoding="utf-8")]


def test_no_function_has_many_branches() -> None:
    assert not [name for name, node in functions() if complexity(node) > LARGEST_COMPLEXITY]


def test_no_function_is_long() -> None:
    lengths = {name: node.end_lineno - node.lineno + 1 for name, node in functions()}  # type: ignore[attr-defined]
    assert not [name for name, length in lengths.items() if length > LONGEST_FUNCTION]


def test_few_files_know_what_a_norm_adds_to_its_weight() -> None:
    assert len(files_with("weight_offset")) <= 5


def test_one_function_asks_whether_a_compiler_runs() -> None:
    assert len(files_with("is_compiling")) == 1


def test_one_file_has_a_table_of_torch_functions() -> None:
    assert files_with('"view"') == ["op_roles.py"]


def test_no_private_words() -> None:
    assert not [word for word in PRIVATE_WORDS if files_with(word)]


def test_complexity_counts_branches() -> None:
    function = ast.parse("def f(x):\n    if x and x > 1:\n        return [i for i in x if i]\n")
    assert complexity(function) == 5
