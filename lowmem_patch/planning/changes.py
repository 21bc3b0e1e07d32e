"""What is no longer as it was patched: looked at once, at the first training forward, and by reports.

A patched model is changed by other code without its knowledge: adapters are added, layers are frozen, a
library sets forwards of its own over ours. Nothing of that makes the model wrong, but it saves less than
the plan said, and who is not told pays without knowing.
"""

from __future__ import annotations

import gc
import inspect
import types
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from lowmem_patch.functional import in_compiler
from lowmem_patch.nn.adapters import is_adapter_forward
from lowmem_patch.nn.norms import MSNorm
from lowmem_patch.nn.own import Own, given_forward, is_own
from lowmem_patch.planning.names import listed
from lowmem_patch.planning.plan import Plan
from lowmem_patch.planning.report import RECORD, AsPatched, Record
from lowmem_patch.strategies.lora import trained_lora_layers
from lowmem_patch.strategies.swap import is_replacement
from lowmem_patch.tracing.trace import describe

_MEND = "call patch_model(model) again, which plans for the model as it is now"
_listed = partial(listed, most=2)
# where torch.compile, FSDP1 and torch's checkpoint wrapper hold the module that they call
_AROUND = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
# what other libraries put between the parts of a parameter's name
_WRAPPERS = ("base_layer", "original_module", *_AROUND)


def watch_first_forward(model: nn.Module, plan: Plan, *, adapters: bool) -> None:
    """Remember how the model is now, and warn at its first training forward of what has changed.

    Args:
        model: the patched model, with its record.
        plan: what was done to it.
        adapters: whether adapter layers that are added later would be patched, too.
    """
    replaced = plan.replaced
    calling = (name.rpartition(".")[0] for name in replaced)
    others = (patch.module for patch in plan.patches if patch.site not in replaced)
    given = (name for name in others if is_own(given_forward(model.get_submodule(name))))
    watched = dict.fromkeys((*replaced, *calling, *given))
    forwards = {name: _forward_of(model.get_submodule(name)) for name in watched}
    linears = tuple(linear.module for patch in plan.folded for linear in patch.step.linears)
    facts = AsPatched(_trains(model), replaced, forwards, adapters, linears)
    model.__dict__[RECORD].as_patched = facts
    model.register_forward_pre_hook(Own(_look))


def no_longer_as_patched(model: nn.Module) -> list[str]:
    """Sentences about what has changed since the patch so that less is saved; none if nothing has.

    ``model`` is the very object that was patched.
    """
    record: Record | None = model.__dict__.get(RECORD)
    facts = None if record is None else record.as_patched
    if facts is None:
        return []
    wrong = list(_folds(model, facts))
    less = list(_adapters(model, facts))
    if not (wrong or less):  # who adds adapters freezes the rest: one sentence is enough
        less = list(_training(model, facts))
    if gone := _gone(model, facts):
        less.append(f"{len(gone)} patched modules were replaced since the patch ({_listed(gone)})")
    return [*wrong, *(f"{sentence}: {_MEND}" for sentence in less), *_forwards(model, facts)]


def has_adapter(module: nn.Module | None) -> bool:
    """Whether PEFT put a layer or a copy of its own in the place of a module."""
    return hasattr(module, "base_layer") or hasattr(module, "original_module")


def _look(model: nn.Module, args: Any) -> None:
    """Forward pre-hook of a patched model, until its first training forward."""
    if in_compiler() or not (model.training and torch.is_grad_enabled()):
        return
    for key, hook in list(model._forward_pre_hooks.items()):
        if isinstance(hook, Own) and hook.func is _look:
            model._forward_pre_hooks.pop(key, None)  # replicas of nn.DataParallel share the table
    facts = model.__dict__[RECORD].as_patched
    found = [*no_longer_as_patched(model), *_optimizers(model, facts)]
    if found:
        warnings.warn("; ".join(found), stacklevel=2)


def _adapters(model: nn.Module, facts: AsPatched) -> Iterator[str]:
    if not facts.adapters:
        return
    modules = dict(model.named_modules())
    new = [
        name
        for name in trained_lora_layers(modules)
        if not is_adapter_forward(given_forward(modules[name])) and name not in facts.forwards
    ]
    if new:
        yield f"{len(new)} adapter layers were added since the patch and may save more ({_listed(new)})"


def _folds(model: nn.Module, facts: AsPatched) -> Iterator[str]:
    """What is no longer right, since other code takes folded weights for stock ones."""
    modules = dict(model.named_modules())
    adapted = [name for name in facts.folded if has_adapter(modules.get(name))]
    if adapted:
        yield (
            f"adapters were put on {len(adapted)} Linears into which norms had been folded "
            f"({_listed(adapted)}): they fit these weights alone, and are wrong on the stock model; merge "
            "them and save the whole model, or call unpatch_model before get_peft_model and patch_model after"
        )


def _optimizers(model: nn.Module, facts: AsPatched) -> Iterator[str]:
    """Moments of folded weights that are there before the first step: of the weights as they were."""
    if not facts.folded:
        return
    folded = tuple(f"{name}." for name in facts.folded)
    held = {id(p): n for n, p in model.named_parameters() if n.startswith(folded)}
    for optimizer in gc.get_objects():
        if not issubclass(type(optimizer), torch.optim.Optimizer):
            continue
        moved = [held[id(parameter)] for parameter in optimizer.state if id(parameter) in held]
        if moved:
            yield (
                f"an optimizer has a state of {len(moved)} weights into which norms were folded "
                f"({_listed(moved)}): it is wrong unless the same norms had been folded when it was made; "
                "make the optimizer after the patch"
            )


def _trains(model: nn.Module) -> dict[str, bool]:
    """Which parameters train, by the names that they have without wrappers; adapters are left out, and
    folded norms, which say themselves that they must not train."""
    layers = [f"{name}." for name, module in model.named_modules() if hasattr(module, "base_layer")]
    own = tuple(f"{layer}base_layer." for layer in layers)
    folded = [f"{n}." for n, m in model.named_modules() if isinstance(m, MSNorm) and m.folded]
    found: dict[str, bool] = {}
    for name, parameter in model.named_parameters():
        given: Any = parameter
        if not isinstance(given, nn.Parameter):
            continue  # torch.func.functional_call's
        if name.startswith((*layers, *folded)) and not name.startswith(own):
            continue
        parts = name.split(".")
        while "modules_to_save" in parts:  # followed by an adapter's name
            start = parts.index("modules_to_save")
            del parts[start : start + 2]
        name = ".".join(part for part in parts if part not in _WRAPPERS)
        found[name] = found.get(name, False) or parameter.requires_grad
    return found


def _training(model: nn.Module, facts: AsPatched) -> Iterator[str]:
    now = _trains(model)
    changed = {name: was for name, was in facts.trains.items() if now.get(name, was) is not was}
    new = [name for name, trained in changed.items() if not trained]
    frozen = [name for name, trained in changed.items() if trained]
    if new:
        yield f"{len(new)} parameters train now that did not train at the patch ({_listed(new)})"
    if frozen:
        yield f"{len(frozen)} parameters that trained at the patch are frozen now ({_listed(frozen)})"


def _forward_of(module: nn.Module) -> str:
    """Whose code a call of the module runs, past the wrappers that call what they wrap."""
    forward: Any = given_forward(module)
    if forward is None:
        forward = type(module).forward
    while True:
        if hasattr(forward, "__wrapped__"):
            forward = inspect.unwrap(forward)
        elif isinstance(forward, partial):
            forward = forward.func
        elif isinstance(forward, types.MethodType):
            forward = forward.__func__
        else:
            break
    code = getattr(forward, "__code__", None)
    if code is None:
        return repr(type(forward))
    return f"{forward.__module__}.{code.co_qualname}"


def _gone(model: nn.Module, facts: AsPatched) -> list[str]:
    modules = dict(model.named_modules(remove_duplicate=False))
    return [
        name
        for name in facts.replaced
        if name in modules and not any(map(is_replacement, modules[name].modules()))
    ]


def _without_wrappers(module: nn.Module) -> nn.Module:
    """The module that wrappers call in the end, or the module itself."""
    children = dict(module.named_children())
    inner = next((children[name] for name in _AROUND if name in children), None)
    return module if inner is None else _without_wrappers(inner)


def _forwards(model: nn.Module, facts: AsPatched) -> Iterator[str]:
    modules, gone = dict(model.named_modules(remove_duplicate=False)), _gone(model, facts)
    changed: dict[str, list[str]] = {}  # by the library whose forward it is
    for name, was in facts.forwards.items():
        if name not in modules or name in gone:
            continue
        forward = _forward_of(_without_wrappers(modules[name]))
        if forward != was:
            changed.setdefault(forward.partition(".")[0], []).append(name)
    for library, names in changed.items():
        places = _listed([describe(modules[name], name) for name in names])
        yield (
            f"{len(names)} modules got a forward of {library} since the patch, which runs in the place of "
            f"what was patched ({places}): let {library} set it before patch_model, or not at all, or "
            f"{_MEND}"
        )
