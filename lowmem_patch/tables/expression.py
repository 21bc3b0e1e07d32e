"""Activations written as text, such as ``x * sigmoid(1.5 * x)``, of which no code is run."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from lowmem_patch import reference
from lowmem_patch.constants import ACTIVATION_KINDS
from lowmem_patch.errors import FitError

_LONGEST = 1000  # characters; a deeper tree than these can write would exhaust Python's stack

_BINARY: Final[Mapping[type, Callable[[Any, Any], Any]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_UNARY: Final[Mapping[type, Callable[[Any], Any]]] = {
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
_CONSTANTS: Final = {"pi": math.pi, "e": math.e}


# Functions of tensors and numbers; numbers become tensors where torch wants them.
_FUNCTIONS: Final[dict[str, Callable[..., Any]]] = {
    **{kind: partial(reference.activate, kind=kind) for kind in ACTIVATION_KINDS},
    **{
        name: getattr(torch, name)
        for name in (
            "abs", "atan", "clamp", "cos", "cosh", "tanh", "erf", "erfc", "exp", "expm1", "log", "log1p",
            "maximum", "minimum", "sign", "sin", "sinh", "sqrt", "square", "where",
        )
    },
    **{
        name: getattr(F, name)
        for name in (
            "celu", "elu", "hardshrink", "hardtanh", "leaky_relu", "logsigmoid", "softplus", "softshrink",
            "softsign", "tanhshrink",
        )
    },
    "swish": F.silu,
}  # fmt: skip
_TENSORS_ALONE = frozenset(("maximum", "minimum", "where"))


def function_names() -> tuple[str, ...]:
    """The functions that a text may use, in alphabetical order."""
    return tuple(sorted(_FUNCTIONS))


def _known() -> str:
    return f"functions {', '.join(function_names())}"


def parse_activation(text: str) -> Callable[[Tensor], Tensor]:
    """The function of x that a text names (``mish``) or writes out (``x * tanh(softplus(x))``).

    Numbers, ``x``, ``pi``, ``e``, ``+ - * / **``, comparisons and the functions of `function_names` make
    a text; their further arguments are numbers (``elu(x, 0.5)``). Nothing else is looked up or run.

    Raises:
        FitError: the text is none of these; the error says which part.
    """
    if len(text) > _LONGEST:
        raise FitError(f"the expression has {len(text)} characters: it may have {_LONGEST} at most")
    try:
        body = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError) as error:
        raise FitError(f"{text!r} is no expression of x: {error}") from error
    if isinstance(body, ast.Name) and body.id in _FUNCTIONS:
        body = ast.Call(body, [ast.Name("x")], [])
    evaluate = _compiled(body, text)
    if not any(isinstance(node, ast.Name) and node.id == "x" for node in ast.walk(body)):
        raise FitError(f"{text!r} does not depend on x")

    def function(x: Tensor) -> Tensor:
        try:
            value = evaluate(x)
        except (ArithmeticError, RuntimeError, TypeError, ValueError) as error:
            raise FitError(f"{text!r} cannot be computed: {error}") from error
        if not isinstance(value, Tensor) or not value.is_floating_point():
            given = value.dtype if isinstance(value, Tensor) else type(value).__name__
            raise FitError(f"{text!r} gives no real numbers, but {given}")
        return value

    return function


def _compiled(node: ast.AST, text: str) -> Callable[[Tensor], Any]:
    """What a node computes of x; every other node is refused, before anything is computed."""
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            number = float(value)  # an int to a large power would take forever
            return lambda x: number
        case ast.Name(id=name):
            if name != "x" and name not in _CONSTANTS:
                hint = "a function needs its argument" if name in _FUNCTIONS else _known()
                raise FitError(f"{text!r}: {name!r} is not known: write x, pi or e ({hint})")
            return lambda x: x if name == "x" else _CONSTANTS[name]
        case (
            ast.BinOp(left=left, op=sign, right=right)
            | ast.Compare(left=left, ops=[sign], comparators=[right])
        ) if type(sign) in _BINARY:
            first, second = _compiled(left, text), _compiled(right, text)
            return lambda x: _BINARY[type(sign)](first(x), second(x))
        case ast.UnaryOp(op=sign, operand=operand) if type(sign) in _UNARY:
            inner = _compiled(operand, text)
            return lambda x: _UNARY[type(sign)](inner(x))
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]):
            if name not in _FUNCTIONS:
                raise FitError(f"{text!r}: {name!r} is none of the {_known()}")
            return partial(_call, name, [_compiled(argument, text) for argument in args])
    raise FitError(
        f"{text!r}: {ast.unparse(node)!r} is no number, x, sum, product, power or function of these"
    )


def _call(name: str, arguments: list[Callable[[Tensor], Any]], x: Tensor) -> Any:
    values = [argument(x) for argument in arguments]
    tensors = [
        torch.tensor(value, dtype=x.dtype) if isinstance(value, float) else value
        for value in (values if name in _TENSORS_ALONE else values[:1])
    ]
    return _FUNCTIONS[name](*tensors, *values[len(tensors) :])
