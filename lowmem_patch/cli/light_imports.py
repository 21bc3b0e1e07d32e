"""What makes a look at a config quick: libraries that it does not need, the garbage collector, threads.

Libraries that other libraries import when they find them take up to a second each: bitsandbytes (which PEFT
and transformers import), torchvision, scipy and scikit-learn (which transformers imports for images, for
losses of detectors and for text generation).
"""

from __future__ import annotations

import contextlib
import gc
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_NOT_FOR_TEXT = ("torchvision", "scipy", "sklearn")
# keys of a config.json, or parts of them, of a model that may ask for them
_NOT_TEXT = ("image", "vision", "video", "backbone", "timm", "audio", "auto_map", "quantization")


@contextlib.contextmanager
def light_imports(model: str) -> Iterator[None]:
    """While this is open, what ``model`` (a folder or a hub id) does not need cannot be imported.

    Nothing is done in a process that has imported transformers before: it knows its libraries.
    """
    hidden = {"bitsandbytes", *(_NOT_FOR_TEXT if _reads_text_alone(model) else ())}
    if {"transformers", "peft"} & sys.modules.keys():
        hidden = set()
    hidden -= sys.modules.keys()
    modules: dict[str, Any] = sys.modules
    modules |= dict.fromkeys(hidden)  # None: there is no such module
    try:
        yield
    finally:
        for name in hidden:
            del modules[name]


def _reads_text_alone(model: str) -> bool:
    """Whether the model reads text alone, as far as a config.json says that need not be loaded first."""
    path: Any = Path(model).expanduser() / "config.json"
    try:
        if not path.is_file():
            import huggingface_hub

            path = huggingface_hub.try_to_load_from_cache(model, "config.json")
        config = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, TypeError, ValueError):  # not in the cache, no name of the hub's, no JSON
        return False
    if not isinstance(config, dict) or "model_type" not in config:  # timm's has none
        return False
    return not any(word in key for key in config for word in _NOT_TEXT)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """While this is open, torch computes on one thread.

    The numbers of a probe are few, and threads that wait for work take a second on a busy machine.
    """
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextlib.contextmanager
def uncollected_imports() -> Iterator[Callable[[], None]]:
    """While this is open, the garbage collector rests, which would walk a million imported objects again and
    again: a sixth of the processor's time. For a process that runs one command.

    What is yielded is called when the imports are done: they leave the collector's sight, for a search for
    new caches too, and it works again.
    """
    enabled = gc.isenabled()
    gc.disable()

    def done() -> None:
        from lowmem_patch.tracing.isolation import find_caches

        find_caches()
        gc.freeze()
        if enabled:
            gc.enable()

    try:
        yield done
    finally:
        if _tells_what_was_not_collected():
            gc.unfreeze()
        if enabled:
            gc.enable()


def _tells_what_was_not_collected() -> bool:
    """Whether Triton is there and was built with nanobind, as since 3.9: that prints a line for each object
    which is alive when the process ends."""
    library = sys.modules.get("triton._C.libtriton")
    if library is None:
        return False
    return any(type(one).__module__ == "nanobind" for one in vars(library).values())
