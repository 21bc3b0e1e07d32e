"""PatchConfig: what a user asks for. A preset is nothing but such a file under ``configs/``."""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Iterable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from lowmem_patch.constants import STEP_BITS
from lowmem_patch.errors import ConfigError

CHOICES = {
    "norms": ("auto", "fold", "share", "keep"),
    "activations": ("auto", "codes", "recompute", "keep"),
    "linear_inputs": ("one_copy", "activation_dtype", "keep"),
    "attention": ("fused", "keep"),
    "head": ("chunked", "keep"),
    "storage": ("exact", "eight_bit"),
}


@dataclasses.dataclass(frozen=True)
class PatchConfig:
    """What may be done to norms, activations, the inputs of Linears, attention and the head.

    Args:
        norms: ``"share"``, and ``"auto"``, which means that, never change a weight; ``"fold"`` folds
            gamma and beta into the next Linears where that is legal and shares elsewhere; ``"keep"``
            leaves norms alone.
        activations: ``"codes"`` keeps codes (approximate gradient); ``"recompute"`` is exact;
            ``"auto"`` recomputes where the next Linear needs the activation's output for its own
            weight gradient and uses codes elsewhere; ``"keep"`` leaves activations alone. In the others ReLU
            and its kin get codes of 1 bit, which are exact, where that saves anything.
        bits: of a code, 1 to 4; docs/step-tables.md says how far from the truth each is.
        linear_inputs: ``"one_copy"`` lets adapters and autocast share one copy of a Linear's input;
            ``"activation_dtype"`` does so too and computes float32 adapters on a bf16 model in bf16, as
            autocast would; both keep the masks of dropouts in bits, and no output of a Linear for a trained
            scale behind it; ``"keep"`` leaves all these to the framework, except that readers of a patched
            norm share its output under autocast.
        attention: ``"fused"`` hands fused attention its queries in the memory order in which a Linear reads
            the output, which then keeps no copy of it. For less time it runs transformers' rotary embeddings
            of q and k as one op, joins the gradients of a joint q, k, v in one pass, and gives compiled
            attention no mask where the mask is the causal one. ``"keep"`` leaves all four alone.
        head: ``"chunked"`` computes logits where they are read, and a cross entropy of them a chunk of rows
            at a time; exact. ``"keep"`` leaves the head alone.
        fit: the bytes that a training step may take on one device, as ``patch_model`` takes them
            (``24GiB``, a number of bytes, ``auto``); None: no budget.
        storage: ``"eight_bit"`` stores the inputs of Linears that train, and q, k, v and the output of fused
            attention, in 8 bits between forward and backward: the forward is the same, gradients are
            approximate. ``"exact"`` saves them in their own dtype.
        name: shown in reports.

    Raises:
        ConfigError: a value is none of the choices.
    """

    norms: str = "auto"
    activations: str = "auto"
    bits: int = 3
    linear_inputs: str = "activation_dtype"
    attention: str = "fused"
    head: str = "chunked"
    fit: str | int | None = None
    storage: str = "exact"
    name: str = dataclasses.field(default="custom", compare=False)

    def __post_init__(self) -> None:
        for key, choices in CHOICES.items():
            value = getattr(self, key)
            if value not in choices:
                raise ConfigError(f"{key}: {value!r} is not one of {', '.join(choices)}")
        if self.bits not in STEP_BITS or type(self.bits) is not int:
            raise ConfigError(f"bits: {self.bits!r} is not one of {', '.join(map(str, STEP_BITS))}")
        if not isinstance(self.name, str):
            raise ConfigError(f"name: {self.name!r} is no name: write it in quotes")
        if isinstance(self.fit, bool) or not isinstance(self.fit, (str, int, type(None))):
            raise ConfigError(
                f"fit: {self.fit!r} is no budget: write it as 24GiB, as bytes, or auto"
            )

    def to_dict(self) -> dict[str, str | int | None]:
        return dataclasses.asdict(self)


def preset_names() -> tuple[str, ...]:
    """Names of the presets that ship with the package."""
    folder = resources.files("lowmem_patch") / "configs"
    return tuple(sorted(Path(f.name).stem for f in folder.iterdir() if f.name.endswith(".yaml")))


def load_config(config: str | Path | Mapping[str, Any] | PatchConfig) -> PatchConfig:
    """Turn a preset's name, a YAML path, a mapping or a PatchConfig into a PatchConfig.

    Raises:
        ConfigError: no such preset or file, invalid YAML, an unknown key or value.
    """
    if isinstance(config, PatchConfig):
        return config
    if isinstance(config, Mapping):
        return _from_mapping(config, name="custom", where="config")
    if not isinstance(config, str | os.PathLike):
        raise ConfigError(
            f"a preset is a name, a path, a mapping or a PatchConfig, and no {type(config).__name__}: give a "
            "batch as example_inputs="
        )
    text = str(config)
    if text in preset_names():
        source = resources.files("lowmem_patch") / "configs" / f"{text}.yaml"
        return _parse(source.read_text(encoding="utf-8"), name=text, where=f"preset {text}")
    path = Path(text)
    if path.suffix not in (".yaml", ".yml"):
        raise ConfigError(
            f"unknown preset {text!r}: use one of {', '.join(preset_names())}, or a path ending in .yaml"
            f"{did_you_mean([text], preset_names())}"
        )
    try:
        content = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ConfigError(f"there is no config file {path.resolve()}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read config file {text}: {error}") from error
    return _parse(content, name=path.stem, where=text)


ConfigLike = str | Path | Mapping[str, Any] | PatchConfig


def given_config(
    preset: ConfigLike | None, config: ConfigLike | None, default: ConfigLike = "auto"
) -> ConfigLike:
    """What was asked for under one of two names of one argument, or the default where nothing was.

    Raises:
        ConfigError: both were given.
    """
    if preset is not None and config is not None:
        raise ConfigError("preset and config are two names of one argument: give one of them")
    given = config if preset is None else preset
    return default if given is None else given


class _Loader(yaml.SafeLoader):
    """Refuses a key that stands twice, of which YAML would take the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        twice = next((key for place, key in enumerate(keys) if key in keys[:place]), None)
        if twice is not None:
            raise yaml.constructor.ConstructorError(
                None, None, f"{twice} stands twice", node.start_mark
            )
        return super().construct_mapping(node, deep)


def _parse(content: str, *, name: str, where: str) -> PatchConfig:
    try:
        data = yaml.load(content, _Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{where} is not valid YAML: {error}") from error
    if not isinstance(data, Mapping):
        found = "is empty" if data is None else f"holds a {type(data).__name__}"
        raise ConfigError(f"{where} {found}: it must hold keys such as 'norms: share'")
    return _from_mapping(data, name=name, where=where)


def _from_mapping(data: Mapping[str, Any], *, name: str, where: str) -> PatchConfig:
    known = {field.name for field in dataclasses.fields(PatchConfig)}
    unknown = [str(key) for key in data if key not in known]
    if unknown:
        words = all(isinstance(value, str | int | None) for value in data.values())
        batch = "" if words else " (a batch is given as example_inputs=)"
        raise ConfigError(
            f"{where}: unknown key {', '.join(unknown)}; known keys are {', '.join(sorted(known))}"
            f"{did_you_mean(unknown, known)}{batch}"
        )
    try:
        return PatchConfig(**{"name": name, **data})
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def did_you_mean(given: Iterable[str], known: Iterable[str], cutoff: float = 0.6) -> str:
    """A question for the known words that are spelt most like those that were given; ``cutoff`` as of
    `difflib.get_close_matches`."""
    names = tuple(known)
    close = [word for one in given for word in difflib.get_close_matches(one, names, 1, cutoff)]
    return f" (did you mean {', '.join(close)}?)" if close else ""
