"""What is no longer as it was patched: looked at by training forwards, and by reports.

A patched model is changed by other code without its knowledge: adapters are added, layers are frozen, a
library sets forwards of its own over ours. Nothing of that makes the model wrong, but it saves less than
the plan said, or has approximate gradients where a new plan would have none, and who is not told pays
without knowing. Each kind of change is said once.
"""

from __future__ import annotations

import gc
import inspect
import types
import warnings
import weakref
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
_OWN = "lowmem_patch."  # forwards of this package
_MOST_STATES = 256  # are remembered: who draws the layers that train finds ever new ones
_Change = tuple[str, str]  # its kind, and what is said of it


def watch_forwards(model: nn.Module, plan: Plan, *, adapters: bool) -> None:
    """Remember how the model is now, and warn at its training forwards of what has changed.

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
    return [] if record is None else [*_changes(model, record).values()]


def _changes(model: nn.Module, record: Record) -> dict[str, str]:
    """The sentences, each by the kind of the change."""
    facts = record.as_patched
    if facts is None:
        return {}
    wrong = dict(_folds(model, facts))
    less = dict(_adapters(model, facts))
    if not (wrong or less):  # who adds adapters freezes the rest: one sentence is enough
        less = dict(_training(model, facts, len(record.report.approximate)))
    if gone := _gone(model, facts):
        less["gone"] = (
            f"{len(gone)} patched modules were replaced since the patch ({_listed(gone)})"
        )
    return (
        wrong
        | {kind: f"{text}: {_MEND}" for kind, text in less.items()}
        | dict(_forwards(model, facts))
    )


class _Look:
    """How a model was at its last training forward, in what takes a forward microseconds to compare.

    What somebody takes out of the model does not live on: the tables of parameters go with the first module
    that does. No reference is to a parameter, which torch could not swap any more
    (`torch.utils.swap_tensors`).
    """

    def __init__(self) -> None:
        self.tables: list[dict[str, nn.Parameter | None]] | None = None  # the modules' own
        self.children: list[tuple[weakref.ref[nn.Module], str, weakref.ref[nn.Module]]] = []
        self.modules: list[weakref.ref[nn.Module]] = []  # whose tables these are
        self.states: set[bytes] = set()  # which parameters trained
        self.kinds: set[str] = set()  # of the changes that were said

    def is_of_now(self, model: nn.Module) -> bool:
        """Whether nothing is new since a forward before; of replicas of nn.DataParallel, whose parameters are
        made anew for each forward, nothing is."""
        return hasattr(model, "_is_replica") or (self._has_same_modules() and self._knows_state())

    def _has_same_modules(self) -> bool:
        """Whether modules are still those that were taken."""
        for parent, name, child in self.children:
            holder = parent()
            if holder is None or holder._modules.get(name) is not child():
                return False
        return self.tables is not None

    def _knows_state(self) -> bool:
        """Whether the same parameters trained in a forward before; this one counts for the next."""
        tables = self.tables or ()
        state = bytes([one is not None and one.requires_grad for t in tables for one in t.values()])
        known = state in self.states
        if len(self.states) >= _MOST_STATES:
            self.states.clear()
        self.states.add(state)
        return known

    def take(self, model: nn.Module, facts: AsPatched) -> None:
        """The model as it is now."""
        if not self._has_same_modules():
            self._take_modules(model, facts)
        self._knows_state()

    def _take_modules(self, model: nn.Module, facts: AsPatched) -> None:
        look = weakref.ref(self)

        def forget(_: Any) -> None:
            one = look()
            if one is not None:
                one.tables = None

        owners = [module for module in model.modules() if module._parameters]
        self.tables = [module._parameters for module in owners]
        self.modules = [weakref.ref(module, forget) for module in owners]
        self.children, self.states = [], set()
        for path in facts.forwards:
            parent, _, name = path.rpartition(".")
            holder = _module_at(model, parent)
            child = None if holder is None else holder._modules.get(name)
            if holder is not None and child is not None:
                self.children.append((weakref.ref(holder), name, weakref.ref(child)))


_LOOKS: weakref.WeakKeyDictionary[Record, _Look] = weakref.WeakKeyDictionary()


def _module_at(model: nn.Module, path: str) -> nn.Module | None:
    found: nn.Module | None = model
    for name in path.split(".") if path else ():
        found = None if found is None else found._modules.get(name)
    return found


def has_adapter(module: nn.Module | None) -> bool:
    """Whether PEFT put a layer or a copy of its own in the place of a module."""
    return hasattr(module, "base_layer") or hasattr(module, "original_module")


def _look(model: nn.Module, args: Any) -> None:
    """Forward pre-hook of a patched model."""
    if in_compiler() or not (model.training and torch.is_grad_enabled()):
        return
    record: Record = model.__dict__[RECORD]
    facts, look = record.as_patched, _LOOKS.get(record)
    if facts is None or (look is not None and look.is_of_now(model)):
        return
    found = _changes(model, record)
    if look is None:
        look = _LOOKS[record] = _Look()
        found |= dict(_optimizers(model, facts))
    else:
        found.pop("frozen", None)  # who freezes later loses nothing that he had
    look.take(model, facts)
    new = {kind: text for kind, text in found.items() if kind not in look.kinds}
    look.kinds.update(new)
    if new:
        warnings.warn("; ".join(new.values()), stacklevel=2)


def _adapters(model: nn.Module, facts: AsPatched) -> Iterator[_Change]:
    if not facts.adapters:
        return
    modules = dict(model.named_modules())
    new = [
        name
        for name in trained_lora_layers(modules)
        if not is_adapter_forward(given_forward(modules[name])) and name not in facts.forwards
    ]
    if new:
        text = f"{len(new)} adapter layers were added since the patch and may save more"
        yield "adapters", f"{text} ({_listed(new)})"


def _folds(model: nn.Module, facts: AsPatched) -> Iterator[_Change]:
    """What is no longer right, since other code takes folded weights for stock ones."""
    modules = dict(model.named_modules())
    adapted = [name for name in facts.folded if has_adapter(modules.get(name))]
    if adapted:
        text = (
            f"adapters were put on {len(adapted)} Linears into which norms had been folded "
            f"({_listed(adapted)}): they fit these weights alone, and are wrong on the stock model; merge "
            "them and save the whole model, or call unpatch_model before get_peft_model and patch_model after"
        )
        yield "folds", text


def _optimizers(model: nn.Module, facts: AsPatched) -> Iterator[_Change]:
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
            text = (
                f"an optimizer has a state of {len(moved)} weights into which norms were folded "
                f"({_listed(moved)}): it is wrong unless the same norms had been folded when it was made; "
                "make the optimizer after the patch"
            )
            yield f"optimizer {id(optimizer)}", text


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


def _training(model: nn.Module, facts: AsPatched, approximate: int) -> Iterator[_Change]:
    """``approximate``: at so many sites gradients are."""
    now = _trains(model)
    changed = {name: was for name, was in facts.trains.items() if now.get(name, was) is not was}
    new = [name for name, trained in changed.items() if not trained]
    frozen = [name for name, trained in changed.items() if trained]
    if new:
        text = f"{len(new)} parameters train now that did not train at the patch ({_listed(new)})"
        if approximate:
            text += f", with approximate gradients at {approximate} sites"
        yield "trains", text
    if frozen:
        text = f"{len(frozen)} parameters that trained at the patch are frozen now"
        yield "frozen", f"{text} ({_listed(frozen)})"


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
    """Modules that were replaced, or got a forward, by the patch, where others stand now that have none."""
    modules = dict(model.named_modules(remove_duplicate=False))
    return [
        name
        for name, was in facts.forwards.items()
        if name in modules
        and (name in facts.replaced or was.startswith(_OWN))
        and not any(map(_is_given, modules[name].modules()))
    ]


def _is_given(module: nn.Module) -> bool:
    """Whether it is a patch's module, or somebody gave it a forward."""
    return is_replacement(module) or given_forward(module) is not None


def _without_wrappers(module: nn.Module) -> nn.Module:
    """The module that wrappers call in the end, or the module itself."""
    children = dict(module.named_children())
    inner = next((children[name] for name in _AROUND if name in children), None)
    return module if inner is None else _without_wrappers(inner)


def _forwards(model: nn.Module, facts: AsPatched) -> Iterator[_Change]:
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
        text = (
            f"{len(names)} modules got a forward of {library} since the patch, which runs in the place of "
            f"what was patched ({places}): let {library} set it before patch_model, or not at all, or "
            f"{_MEND}"
        )
        yield f"forwards of {library}", text
