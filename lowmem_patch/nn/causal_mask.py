"""Causal attention without a mask under torch.compile, as in eager mode.

Where padding and positions mask nothing more, transformers gives attention no mask: fused kernels know the
causal one, and take keys and values of fewer heads. It looks at values for that. A compiler cannot, so that
it makes one, and attention takes a slower kernel, on keys and values that are repeated for each query head.
But the graph tells on what the mask depends. One that no input reaches is computed once, while the model is
compiled, and compared.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx, nn

from lowmem_patch.functional import compilers_output, in_compiler, is_exporting

_KEY = "lowmem_patch_causal"
_NAMES = frozenset(operator.__all__)
_OPERATORS = frozenset(getattr(operator, name) for name in _NAMES)  # and_, or_ write nothing
_IN_PLACE = frozenset(
    getattr(operator, name)
    for name in _NAMES
    if name == "setitem" or (name[0] == "i" and _NAMES & {name[1:], f"{name[1:]}_"})
)


def drop_causal_mask(
    module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Forward pre-hook of an attention module of transformers: no ``attention_mask`` that says no more than
    ``is_causal`` of `torch.nn.functional.scaled_dot_product_attention`."""
    if not in_compiler() or is_exporting():
        return None
    mask = kwargs.get("attention_mask")
    if not isinstance(mask, Tensor) or kwargs.get("is_causal") is not None:
        return None
    known = _is_causal_sdpa(module) and _is_causal_mask()
    return (args, {**kwargs, "attention_mask": None}) if known else None


def _is_causal_sdpa(module: nn.Module) -> bool:
    implementation = getattr(getattr(module, "config", None), "_attn_implementation", None)
    return implementation == "sdpa" and getattr(module, "is_causal", True)


def _is_causal_mask() -> bool:
    """Whether what the function that is being compiled calls ``mask`` is the causal one for any input."""
    frame = compilers_output().current_tx
    node: fx.Node = frame.symbolic_locals["mask"].as_proxy().node
    if _KEY not in node.meta:  # one mask serves all layers
        try:
            node.meta[_KEY] = _is_causal(_constant(node, {}))
        except Exception:  # a graph may hold any function, also one that runs in its place alone
            node.meta[_KEY] = False
    found: bool = node.meta[_KEY]
    return found


# torch.compiler.assume_constant_result, without its import of the compiler
_is_causal_mask._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch's mark


class _InputError(Exception):
    """A value that depends on an input of the graph, or that somebody writes into."""


def _constant(node: Any, known: dict[fx.Node, Any]) -> Any:
    """The value of a node that no input reaches."""
    if not isinstance(node, fx.Node):
        return node
    if node not in known:
        if node.op not in ("call_function", "call_method") or any(map(_writes, node.users)):
            raise _InputError
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda one: _constant(one, known))
        target: Any = node.target
        with torch.no_grad():
            if node.op == "call_method":
                known[node] = getattr(args[0], target)(*args[1:], **kwargs)
            else:
                known[node] = target(*args, **kwargs)
    return known[node]


def _writes(user: fx.Node) -> bool:
    if user.target in _IN_PLACE or "out" in user.kwargs:
        return True
    name = getattr(user.target, "__name__", str(user.target))
    return name.endswith("_") and not name.endswith("__") and user.target not in _OPERATORS


def _is_causal(mask: Any) -> bool:
    if not isinstance(mask, Tensor) or mask.dim() != 4 or mask.shape[-1] != mask.shape[-2]:
        return False
    causal = torch.ones(mask.shape[-2:], dtype=torch.bool, device=mask.device).tril()
    if mask.dtype == torch.bool:
        return bool((mask == causal).all())
    hidden = mask <= torch.finfo(mask.dtype).min
    return bool(((mask == 0) == causal).all() and (hidden != causal).all())
