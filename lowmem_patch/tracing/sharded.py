"""A model that came sharded (``tp_plan="auto"``): what it is as a whole, told by its config.

The forward of a sharded model talks to other processes, and its local shapes are those of one device.
So the plan is made on a twin: the same class from the same config, without data. It stands for the model
only where every module and every parameter's whole shape agree.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
from torch import nn

from lowmem_patch.errors import TraceError
from lowmem_patch.functional import is_sharded
from lowmem_patch.nn.context import is_fsdp_unit
from lowmem_patch.nn.own import is_own
from lowmem_patch.tracing.base_model import base_model

_MEND = "call patch_model before sharding, then shard the patched model"
# settings that a user, or activation checkpointing, may have changed since the model was built
_SETTINGS = (bool, int, float, str, partial)


def came_sharded(model: nn.Module) -> bool:
    """Whether a parameter is a DTensor."""
    return is_sharded(*model.parameters())


def whole_twin(model: Any) -> nn.Module:
    """The model with whole shapes, on the meta device.

    Raises:
        TraceError: FSDP2 sharded it, it has no config, or it is not what its config makes.
    """
    if any(is_fsdp_unit(module) for module in model.modules()):
        raise TraceError(
            "the model was sharded by FSDP2 (fully_shard) already, which sets weights in the very modules "
            f"that a patch replaces: {_MEND}"
        )
    twin: nn.Module = _from_config(model)
    _refuse_difference(model, twin)
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
    for name, parameter in twin.named_parameters():
        parameter.data = parameter.data.to(parameters[name].dtype)
        parameter.requires_grad_(parameters[name].requires_grad)
    for name, own in twin.named_modules():
        for key, value in vars(modules[name]).items():
            if key == "forward":
                # the class's own, which does not talk to other processes, but the planner sees that the
                # module has one, and leaves it in its place
                if not is_own(value):
                    own.__dict__[key] = partial(type(own).forward, own)
            elif isinstance(value, _SETTINGS):
                own.__dict__[key] = value
        # transformers' hook, without which adapters in checkpointed blocks get no gradient
        if "_require_grads_hook" in vars(modules[name]):
            own.enable_input_require_grads()
    return twin


def _from_config(model: Any) -> Any:
    """The same class from the same config, and the same adapters around it."""
    base = base_model(model)
    config = getattr(base, "config", None)
    if config is None:
        raise TraceError(
            f"the model's parameters are sharded already (DTensor), and {type(base).__name__} has no config "
            f"that tells what it is as a whole: {_MEND}"
        )
    try:
        with torch.device("meta"):
            twin = type(base)(copy.deepcopy(config))
            if model is not base:
                adapters = {name: copy.deepcopy(c) for name, c in model.peft_config.items()}
                (first, config), *others = adapters.items()
                twin = type(model)(twin, config, adapter_name=first)
                for name, config in others:
                    twin.add_adapter(name, config)
                twin.base_model.set_adapter(model.active_adapters)
    except Exception as error:  # of a foreign constructor anything may come
        raise TraceError(
            f"the model's parameters are sharded already (DTensor), and its config does not make a "
            f"{type(base).__name__} ({type(error).__name__}: {error}): {_MEND}"
        ) from error
    return twin


def _refuse_difference(model: nn.Module, twin: nn.Module) -> None:
    kinds = ({n: type(m).__name__ for n, m in whole.named_modules()} for whole in (model, twin))
    shapes = ({n: tuple(p.shape) for n, p in whole.named_parameters()} for whole in (model, twin))
    for what, (found, made) in (("module", tuple(kinds)), ("parameter", tuple(shapes))):
        for name in {**found, **made}:
            if found.get(name) != made.get(name):
                raise TraceError(
                    "the model's parameters are sharded already (DTensor), and it is not what its config "
                    f"makes: {what} {name} is {found.get(name)}, by the config {made.get(name)}: {_MEND}"
                )
