"""Shrink any transformers config: rules on the names of its numbers, not on architectures.

Which shrink a model survives depends on how its sizes hang together, so there are several, from
tiny to the defaults; the first whose model builds and runs is taken.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import timm

from zoo.fit import fit
from zoo.overrides import OVERRIDES

Rule = tuple[str, float]
VOCABULARY = 160
FIRST_SPECIAL = 128  # ids from here on are special tokens of shrunk configs

_DEPTH: tuple[Rule, ...] = (
    (r"kv_shared_layers$", 0),
    (r"layers?$|^n_layer$|depth$|num_hidden_layers|num_blocks|_blocks$|num_stages_", 2),
    (r"first_k_dense_replace", 1),
    (r"^depths$|layers_per_block|^num_layers_per", 1),
)
_VOCABULARY: tuple[Rule, ...] = (
    (r"vocab(ulary)?(_size)?$|vocab_size|num_embeddings$", VOCABULARY),
)
# an image of 64 pixels has 2 by 2 patches in the last of four stages
_WINDOW: Rule = (r"^window_size$", 2)
_QUERIES: Rule = (r"num_queries$", 8)
_WIDTHS: tuple[Rule, ...] = (
    (r"num_key_value_heads|num_kv_heads|kv_heads$", 2),
    (r"linear_num_key_heads|linear_num_value_heads", 4),
    (r"heads?$|n_head$|num_heads$", 4),
    (r"experts?_per_tok|moe_topk|moe_k$|top_k_experts", 2),
    (r"n_group$|topk_group", 1),
    (r"n_shared_experts|num_shared_experts", 1),
    (r"experts?$|num_.*experts", 4),
    (r"rope_head_dim|rotary_dim", 8),
    (r"width_coefficient|depth_coefficient", 0.5),
    (r"^n_groups$", 2),
    (r"upsample_groups", 32),
    _QUERIES,
    _WINDOW,
    (r"chunk_size$|state_size$|d_state$", 16),
    (r"head_dim|d_kv$|head_size$", 8),
    (r"rank$", 16),
    (r"intermediate|ffn|d_ff$|n_inner|mlp_dim|feedforward|inner_dim$", 48),
    (r"max_position|n_positions|n_ctx$|max_seq|max_sequence|max_target|context_length", 64),
    (r"^image_size$", 32),
    (r"^patch_size$", 8),
    (r"num_latents$|latent_query_num$", 8),
    (
        r"hidden_size|d_model|d_latents|n_embd|^dim$|_dim$|embedding_size|hidden_dim|proj_dim|embed_dim",
        32,
    ),
)
_OFF = re.compile(
    r"drop|spec_augment$|apply_spec_augment|jitter|router_z|mask_time_prob|mask_feature_prob"
)
_SPECIAL = re.compile(r"token_id$|token_index$|_token$|tok_id$|code_id$")
_SHARED_HEADS: tuple[Rule, ...] = ((r"num_key_value_heads|num_kv_heads|kv_heads$", 4),)


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _matching(rules: tuple[Rule, ...], name: str) -> float | None:
    return next((limit for pattern, limit in rules if re.search(pattern, name)), None)


# configs that name a timm model get timm's own test model
_TIMM_NAMES = ("backbone", "architecture")
_TIMM_BACKBONE = "test_resnet"


def _flat(rules: tuple[Rule, ...]) -> Callable[[str, Any], Any]:
    """Each matching number becomes its rule's, where it was larger; lists as well if they count layers."""

    def change(name: str, value: Any) -> Any:
        if name in _TIMM_NAMES and isinstance(value, str):
            return _TIMM_BACKBONE if timm.is_model(value) else value
        limit = _matching(rules, name)
        if limit is None:
            return value
        if _number(value):
            return min(value, type(value)(limit)) if value > 0 else value
        counts = isinstance(value, (list, tuple)) and value and all(_number(v) for v in value)
        if counts and _matching(_DEPTH, name) is not None:
            return type(value)(min(v, int(limit)) for v in value)
        return value

    return change


_RATIO = re.compile(
    r"hidden_size|d_model|n_embd|^dim$|_dim$|^dims$|embed_dims?$|embed_dim_per_stage|embedding_size|hidden_dim|channels$|channel_list$|widths$"
    r"|intermediate|ffn|d_ff$|mlp_dim|proj_dim|conv_dim|filters$|_sizes$|rank$|head_dim|feedforward"
)
_NOT_WIDTH = re.compile(r"num_channels|image|patch(es)?(_size)?$|kernel")
# one number of these is of the data, a list has the widths of stages
_OF_DATA = re.compile(r"(in|input|out|audio)_channels")


def _scaled(factor: int) -> Callable[[str, Any], Any]:
    """Widths divided by one factor, so that their ratios, and the numbers of heads, stay."""
    depth = _flat((*_DEPTH, *_VOCABULARY, _WINDOW, _QUERIES, (r"^image_size$", 64)))

    def divide(value: Any) -> Any:
        return max(4, int(value) // factor) if value > factor else value

    def change(name: str, value: Any) -> Any:
        if _RATIO.search(name) and not _NOT_WIDTH.search(name):
            if type(value) is int and not _OF_DATA.search(name):
                return divide(value)
            if isinstance(value, (list, tuple)) and value and all(type(v) is int for v in value):
                return type(value)(divide(v) for v in value)
        return depth(name, value)

    return change


# numbers that a config leaves open (None), though its model cannot be built without them
_OPEN: tuple[Rule, ...] = (
    (r"vocab_size$", VOCABULARY),
    (r"pad_token_id", 1),
    (r"sliding_window$", 8),
    (r"num_key_value_heads|kv_heads$", 4),
    (r"experts?_per_tok|moe_topk|moe_k$|top_k", 2),
    (r"n_group$|topk_group|n_shared_experts|first_k_dense_replace", 1),
    (r"experts$", 4),
    (r"moe_intermediate_size|expert_.*intermediate_size", 48),
)


def _filled(name: str, value: Any) -> Any:
    if value is None:
        limit = _matching(_OPEN, name)
        return None if limit is None else int(limit)
    return _flat((*_DEPTH, *_VOCABULARY, *_WIDTHS))(name, value)


_CHANGES: dict[str, Callable[[str, Any], Any]] = {
    "flat": _flat((*_DEPTH, *_VOCABULARY, *_WIDTHS)),
    "flat, open numbers filled": _filled,
    "flat, no grouped heads": _flat((*_SHARED_HEADS, *_DEPTH, *_VOCABULARY, *_WIDTHS)),
    "scaled by 8": _scaled(8),
    "scaled by 4": _scaled(4),
    "shallow": _flat((*_DEPTH, *_VOCABULARY)),
    "shallow, own vocabulary": _flat(_DEPTH),
    "default": lambda name, value: value,
}


def _off(name: str, value: Any) -> Any:
    """Nothing random: dropouts 0, augmentation off."""
    if not _OFF.search(name):
        return value
    if isinstance(value, bool):
        return False
    return type(value)(0) if isinstance(value, (int, float)) else value


def _special(name: str, value: Any, taken: dict[str, int], small: bool) -> Any:
    """Special tokens into the shrunk vocabulary, each name its own."""
    if not small or not _SPECIAL.search(name) or not _number(value) or value < FIRST_SPECIAL:
        return value
    return taken.setdefault(name, FIRST_SPECIAL + len(taken) % (VOCABULARY - FIRST_SPECIAL))


def _values(config: Any) -> dict[str, Any]:
    return {k: v for k, v in config.__dict__.items() if not k.startswith("_")}


def _layer_types(values: dict[str, Any], depth: int = 2) -> None:
    """Lists with an entry per layer keep one entry of each of the first kinds."""
    for name, value in values.items():
        per_layer = name.endswith(
            ("layer_types", "layers_block_type", "layers_types", "block_types")
        )
        if per_layer and isinstance(value, (list, tuple)) and len(value) > depth:
            kinds = list(dict.fromkeys(value))[:depth]
            values[name] = [*kinds, *value[: depth - len(kinds)]]


def _defaults(config_class: Any) -> dict[str, Any]:
    """The constructor's arguments with their defaults; configs of transformers 5.0 are no dataclasses."""
    if dataclasses.is_dataclass(config_class):
        return {field.name: field.default for field in dataclasses.fields(config_class)}
    parameters = inspect.signature(config_class).parameters.values()
    return {parameter.name: parameter.default for parameter in parameters}


def _construct(
    config: Any,
    change: Callable[[str, Any], Any],
    taken: dict[str, int],
    small: bool,
    given: Iterable[str],
) -> Any:
    """A new config of the same class from changed arguments, so that derived values are derived anew."""
    from transformers import PreTrainedConfig

    arguments: dict[str, Any] = {}
    defaults = _defaults(type(config))
    for name, value in _values(config).items():
        if isinstance(value, PreTrainedConfig):
            arguments[name] = _construct(value, change, taken, small, ())
            continue
        if name not in defaults:
            continue
        default = defaults[name]
        if default is not value and default != value and name not in given:
            continue  # derived from others
        new = _special(name, _off(name, change(name, value)), taken, small)
        if name in given or (new is not value and new != value):
            arguments[name] = new
    made = type(config)(**arguments)
    if getattr(config, "out_indices", None):  # properties of backbones
        made.out_indices = config.out_indices
    return made


def _mutate(
    config: Any,
    change: Callable[[str, Any], Any],
    taken: dict[str, int],
    small: bool,
    given: Iterable[str],
) -> Any:
    """The same config object with changed attributes: derived values are shrunk by their own names."""
    from transformers import PreTrainedConfig

    values = _values(config)
    changed: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, PreTrainedConfig):
            _mutate(value, change, taken, small, ())
        else:
            changed[name] = _special(name, _off(name, change(name, value)), taken, small)
    if small:
        _layer_types(changed)
    changed.update({name: values[name] for name in given if name in values})
    if "head_dim" in changed and changed["head_dim"] is None:
        changed["head_dim"] = changed["hidden_size"] // changed["num_attention_heads"]
    for name, value in changed.items():
        if value is not values[name]:
            try:
                setattr(config, name, value)
            except (AttributeError, TypeError, ValueError):
                continue  # read-only: derived from others
    return config


def _apply(config: Any, values: dict[str, Any]) -> None:
    for path, value in values.items():
        *parents, name = path.split(".")
        owner = config
        for parent in parents:
            owner = getattr(owner, parent)
        setattr(owner, name, value)


def _optional_parts(config_class: Any) -> dict[str, Any]:
    """Towers that a config leaves out unless they are given."""
    parts = getattr(config_class, "sub_configs_defaults", None) or {}
    return {
        name: {}
        for name in ("vision_config", "audio_config")
        if getattr(parts.get(name), "optional", False)
    }


_SUPPLIED = {"initializer_range": 0.02, "rope_theta": 10000.0, "spatial_merge_size": 2}


def supply(config: Any, error: AttributeError) -> bool:
    """Give the config a value that its model reads and its class does not define, if a rule knows one."""
    from transformers import PreTrainedConfig

    owner, name = error.obj, error.name
    if not isinstance(owner, PreTrainedConfig) or name is None:
        return False
    if "drop" in name:
        setattr(owner, name, 0.0)
    elif name in _SUPPLIED:
        setattr(owner, name, _SUPPLIED[name])
    else:
        limit = _matching((*_DEPTH, *_VOCABULARY, *_SHARED_HEADS, *_WIDTHS), name)
        if limit is None:
            return False
        setattr(owner, name, int(limit))
    return True


def shrunk_configs(model_type: str, config_class: Any) -> Iterator[tuple[str, Any]]:
    """Configs from the smallest to the default one, each with the name of its shrink.

    A way that fails to make a config is skipped, unless it is the last one.
    """
    override = OVERRIDES.get(model_type, {})
    for name in override.get("shrinks", _CHANGES):
        change = _CHANGES[name]
        small = "default" not in name and "own vocabulary" not in name
        for make in (_construct, _mutate):
            try:
                given = {**_optional_parts(config_class), **override.get("arguments", {})}
                config = make(config_class(**given), change, {}, small, given)
                fit(config)
                _apply(config, override.get("values", {}))
            except Exception:  # whatever a foreign config refuses: the next way may do
                if name == "default" and make is _mutate:
                    raise
                continue
            yield f"{name}, {'constructed' if make is _construct else 'set'}", config
