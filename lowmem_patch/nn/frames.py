"""Functions that torch.compile follows where it traces a call of them, and compiles at no other place."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch._C._dynamo.eval_frame as frames

_Function = TypeVar("_Function", bound=Callable[..., object])


def never_compiled_alone(function: _Function) -> _Function:
    """``function``, which runs as it is written, with all that it calls, where torch calls it.

    Behind a break of a graph torch compiles each Python function that runs as a frame of its own. The guards
    of such a frame do not tell one ``func`` of a ``__torch_function__`` from another: what was compiled for
    ``logits.logsumexp(-1)`` ran for ``logits / 2``, too. Where the compiler traces a call, the function still
    becomes a part of the graph. This is a mark on the code: a call takes no longer, as it does within
    ``torch.compiler.disable``.
    """
    action = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(action, action))
    return function
