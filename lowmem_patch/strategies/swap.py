"""Patches that put another module in the place of a leaf of the model, or of a function that is called."""

from __future__ import annotations

import dataclasses
import types
import weakref
from typing import Any

from torch import nn
from torch.nn.utils import parametrize

from lowmem_patch.nn.activations import PackedDropout
from lowmem_patch.nn.modes import CallInstead, run_under
from lowmem_patch.nn.norms import MSNorm
from lowmem_patch.nn.own import PLACED, Own, align_as, is_compiled_function
from lowmem_patch.strategies.protocol import Patch, Target
from lowmem_patch.tracing.call_arguments import CalledFunction

ORIGINAL = "_lowmem_patch_original"  # where a replacement holds the module that it stands for
_SHARED = (
    "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs", "_backward_hooks", "_backward_pre_hooks", "_is_full_backward_hook",
    "_buffers", "_non_persistent_buffers_set", "_state_dict_hooks", "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
)  # fmt: skip
_ADDED_TO = ("_parameters", "_modules")  # by users, on an activation or a dropout too
_MARK = "_lowmem_patch_"  # how names of attributes begin that are this package's
# where a replacement holds the names of its own attributes; others are the user's
_OWN_NAMES = f"{_MARK}own_names"


@dataclasses.dataclass(frozen=True)
class Swap(Patch):
    """A module that is replaced; the replacement shares its parameters, buffers and hooks.

    Attributes:
        function: where the site is one that a module's forward calls, and no module: the forward is told to
            call the replacement.
        saves: bytes that the replacement of a function saves, which nobody could tell from its module's.
    """

    function: CalledFunction | None = dataclasses.field(default=None, kw_only=True)
    saves: int = dataclasses.field(default=0, kw_only=True)

    @property
    def module(self) -> str:
        return self.site if self.function is None else self.site.removesuffix(f".{self.function}")

    def make(self, original: nn.Module) -> nn.Module:
        """What takes the place of ``original``, or of what that calls."""
        raise NotImplementedError

    def apply(self, target: Target) -> None:
        original = target.model.get_submodule(self.module)
        if self.function is not None:
            run_under(original, CallInstead, self.function, self.make(original))
            return
        new = self.make(original)
        new.training = original.training
        own = frozenset((*vars(new), *PLACED))
        for shared in _SHARED:  # a user's hooks and buffers stay where they are
            setattr(new, shared, getattr(original, shared))
        _bind_hooks(original, new)
        for table in _ADDED_TO:
            mine = vars(new)[table]
            mine.update({n: v for n, v in vars(original)[table].items() if n not in mine})
        # what other code may read off the original (variance_epsilon, normalized_shape) stays readable, and
        # so do marks: of transformers, without which a later post_init() initialises the weights again
        for name, value in vars(original).items():
            readable = isinstance(value, (int, float, tuple, str, type(None)))
            if readable and name not in vars(new):
                setattr(new, name, value)
        align_as(new, original)
        # not registered: it is no submodule, but travels with every copy of its replacement
        new.__dict__.update({ORIGINAL: original, _OWN_NAMES: own})
        target.put(new, original)


def is_replacement(module: nn.Module) -> bool:
    """Whether the module was put in place of another one."""
    return ORIGINAL in module.__dict__


def put_back(model: nn.Module) -> None:
    """The original in the place of each replacement, wherever that is now."""
    for parent in list(model.modules()):
        for slot, current in list(parent._modules.items()):
            if current is not None and is_replacement(current):
                parent._modules[slot] = _original_of(current)


def _original_of(current: nn.Module) -> nn.Module:
    original: nn.Module = current.__dict__[ORIGINAL]
    original.training = current.training
    align_as(original, current)
    # unlike the tables of hooks, no object that both hold
    original._is_full_backward_hook = current._is_full_backward_hook
    _bind_hooks(current, original)
    if isinstance(current, PackedDropout) and isinstance(original, nn.Dropout):
        original.p, original.inplace = current.p, current.inplace  # users set p on every dropout
    if isinstance(current, MSNorm) and current.eps_name:
        setattr(original, current.eps_name, getattr(current, current.eps_name))
    parametrized = parametrize.is_parametrized(current)
    # what .to(), pruning and others have put in the place of its parameters, and what was added to them
    for table in _ADDED_TO:
        theirs, mine = vars(original)[table], vars(current)[table]
        kept = {n: v for n, v in mine.items() if v is not None or n in theirs}
        if parametrized:
            kept.pop("parametrizations", None)
        theirs.clear()
        theirs.update(kept)
    _carry_attributes(current, original)
    if parametrized:
        parametrize.transfer_parametrizations_and_params(current, original)
    return original


def _carry_attributes(current: nn.Module, original: nn.Module) -> None:
    """Set on ``original`` what somebody set on its replacement; a forward goes with that."""
    own = current.__dict__.get(_OWN_NAMES)
    if own is None:  # a pickle of an older version
        return
    for name, value in vars(current).items():
        foreign = not (name in own or name.startswith(_MARK) or isinstance(value, Own))
        if not foreign or is_compiled_function(value):  # which runs the replacement
            continue
        if isinstance(value, types.MethodType) and value.__self__ is current:
            value = types.MethodType(value.__func__, original)
        original.__dict__[name] = value


def _bind_hooks(old: nn.Module, new: nn.Module) -> None:
    """Tell hooks that torch bound to ``old`` (``with_module=True``) that ``new`` takes its place."""
    for hook in old._load_state_dict_pre_hooks.values():
        bound: Any = hook
        if getattr(bound, "with_module", False) and bound.module() is old:
            bound.module = weakref.ref(new)
