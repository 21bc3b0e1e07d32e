"""What a patch hangs on a module that stays in its place: hooks, and a forward in the place of its class's.

Each is an `Own`: a function and its first arguments, which copies and pickles take along, and by whose class
it is found again, wherever other code has moved its module.
"""

from __future__ import annotations

import copy
import inspect
import sys
import types
from functools import partial, update_wrapper
from typing import Any

from torch import nn

_REPLICATE = "_replicate_for_data_parallel"
_OF_LINEAR = nn.Linear.forward
# attributes that hold a forward, and what accelerate keeps beside one
PLACED = ("forward", "_old_forward", "_hf_hook", _REPLICATE)


class Own(partial[Any]):
    """A hook or a forward of this package; a forward has its module as the first argument."""

    def __deepcopy__(self, memo: Any) -> Own:
        keywords = copy.deepcopy(self.keywords, memo)
        return Own(self.func, *copy.deepcopy(self.args, memo), **keywords)

    @property
    def __signature__(self) -> inspect.Signature | None:
        """That of the class's forward: transformers looks at it to tell which arguments an encoder takes."""
        module = self.args[0] if self.args else None
        if not isinstance(module, nn.Module):
            return None
        return inspect.signature(types.MethodType(type(module).forward, module))

    def __reduce__(self) -> Any:
        if getattr(self.func, "copied", False):  # no file has it: the class's own comes back
            return getattr, (self.args[0], "forward")
        return super().__reduce__()


def is_own(hook: Any) -> bool:
    """Whether a hook or forward is one of this package's, which torch may have wrapped."""
    return isinstance(getattr(hook, "hook", hook), Own)


def aligns_devices_alone(module: nn.Module) -> bool:
    """Whether accelerate's hook on a module (``device_map``) moves inputs and outputs between devices, and
    leaves the weights where they are."""
    accelerate: Any = sys.modules.get("accelerate.hooks")
    hook = getattr(module, "_hf_hook", None)
    if accelerate is None or hook is None:
        return False
    hooks = hook.hooks if type(hook) is accelerate.SequentialHook else (hook,)
    return all(type(one) is accelerate.AlignDevicesHook and not one.offload for one in hooks)


def align_as(module: nn.Module, other: nn.Module) -> None:
    """Give ``module``, which takes the place of ``other``, accelerate's hook of that one, or none."""
    if "_hf_hook" in module.__dict__:
        for name in ("_hf_hook", "_old_forward", "forward"):
            module.__dict__.pop(name, None)
    around = other.__dict__.get("forward")
    if "_hf_hook" in other.__dict__ and isinstance(around, partial):
        own = types.MethodType(type(module).forward, module)
        hooked = update_wrapper(partial(around.func, module), own)
        vars(module).update(_hf_hook=other._hf_hook, _old_forward=own, forward=hooked)


def _forward_slot(module: nn.Module) -> str:
    """The attribute that holds the module's own forward: accelerate puts it aside, and calls it there."""
    aside = module.__dict__.get("_old_forward")
    own = _is_of_class(module, aside) or is_own(aside)
    return "_old_forward" if own and aligns_devices_alone(module) else "forward"


def _is_of_class(module: nn.Module, forward: Any) -> bool:
    function = getattr(forward, "__func__", None)
    # a scripted class has none
    return function is not None and function is getattr(type(module), "forward", None)


def given_forward(module: nn.Module) -> Any:
    """The forward that this very module was given, which runs beneath accelerate's hook; or None."""
    return module.__dict__.get(_forward_slot(module))


def give_forward(module: nn.Module, function: Any, *settings: Any) -> None:
    """Set ``function(module, *settings, ...)`` as the forward of this very module."""
    setattr(module, _forward_slot(module), Own(function, module, *settings))
    setattr(module, _REPLICATE, partial(_replicate, module))


def give_forward_around(module: nn.Module, function: Any, *settings: Any) -> None:
    """Set ``function(module, *settings, given, ...)``, where ``given`` is for `inner_forward`."""
    given = given_forward(module)
    give_forward(module, function, *settings, given if is_own(given) else None)


def inner_forward(module: nn.Module, given: Own | None) -> partial[Any]:
    """The forward that the module had before; that of a replica has the replica."""
    # a pickle brings the class's forward back for one that no file has; a compiler sees a partial in an `Own`
    if isinstance(given, partial):
        return partial(given.func, module, *given.args[1:])
    return partial(type(module).forward, module)


def drop_forward(module: nn.Module) -> None:
    """Take off what `give_forward` set."""
    _take_off(module, _forward_slot(module))


def _take_off(module: nn.Module, slot: str) -> None:
    if slot == "forward":
        del module.__dict__[slot]
    else:
        module.__dict__[slot] = types.MethodType(type(module).forward, module)


def _replicate(module: nn.Module) -> nn.Module:
    """As nn.DataParallel asks for it: what holds the module holds the replica there."""
    replica: nn.Module = getattr(type(module), _REPLICATE)(module)
    for name, value in vars(module).items():
        if isinstance(value, types.MethodType) and value.__self__ is module:
            replica.__dict__[name] = types.MethodType(value.__func__, replica)
        elif isinstance(value, partial) and value.args[:1] and value.args[0] is module:
            replica.__dict__[name] = type(value)(
                value.func, replica, *value.args[1:], **value.keywords
            )
    return replica


def runs_class_forward(module: nn.Module) -> bool:
    """Whether this very module has no forward but its class's, which a pickle or `remove_own` brings back."""
    forward = given_forward(module)
    return forward is None or _is_of_class(module, forward)


def has_foreign_forward(module: nn.Module) -> bool:
    """Whether somebody else gave this very module a forward."""
    return not runs_class_forward(module) and not is_own(given_forward(module))


def multiplies_as_linear(module: nn.Module) -> bool:
    """Whether a module's class has the forward of nn.Linear: somebody may have given the module another class
    since the patch, or nn.Linear another forward."""
    return type(module).forward is _OF_LINEAR


def is_compiled_function(function: Any) -> bool:
    """Whether ``torch.compile`` made it of another function."""
    return hasattr(function, "_torchdynamo_orig_callable")


def within_compiled(module: nn.Module) -> nn.Module | None:
    """What ``torch.compile(module)`` wraps and calls; None for a module that it has not made."""
    return dict(module.named_children()).get("_orig_mod")


def remove_own(module: nn.Module) -> None:
    """Take hooks and forward off again, also where somebody put the forward aside to call it from his own."""
    for hooks in (
        module._forward_pre_hooks,
        module._forward_hooks,
        module._load_state_dict_pre_hooks,
    ):
        for key in [key for key, hook in hooks.items() if is_own(hook)]:
            del hooks[key]
            module._forward_pre_hooks_with_kwargs.pop(key, None)
    for name, forward in list(vars(module).items()):
        if not isinstance(forward, Own):
            continue
        module.__dict__.pop(_REPLICATE, None)
        _take_off(module, name)
