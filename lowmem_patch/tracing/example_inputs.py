"""Example inputs for a trace, made from what the model says of itself.

A transformers model names its main input, its forward names the rest, and its config gives sizes.
Where that leaves a choice (a spectrogram's layout, text alone or with an image), each candidate is
run on fake tensors and the first that runs is taken: no architecture is known by name.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lowmem_patch.errors import TraceError
from lowmem_patch.tracing.base_model import base_model, text_config
from lowmem_patch.tracing.diffusion_inputs import diffusion_inputs, is_diffusers
from lowmem_patch.tracing.inputs import ExampleInputs
from lowmem_patch.tracing.isolation import preserved
from lowmem_patch.tracing.shadow import make_shadow

_MOST_CANDIDATES = 24
_LARGEST_TOKEN = 1000
_FRAMES = 128  # of a spectrogram
_SAMPLES = 6400  # of raw audio: 20 frames of a wav2vec2


def make_example_inputs(
    model: Any,
    *,
    batch_size: int = 2,
    sequence_length: int | None = None,
    device: torch.device | str | None = None,
) -> ExampleInputs:
    """Inputs for a transformers, timm or diffusers model (also inside a PEFT wrapper), from its config.

    Args:
        sequence_length: tokens per row for models that read tokens (default 16).
        device: default: the device of the model's first parameter; the CPU for a meta model.

    Raises:
        TraceError: the model says nothing about its inputs (pass ``example_inputs=``), or they are too large.
    """
    base = base_model(model)
    parameter = next(base.parameters(), None)
    if device is None:
        device = torch.device("cpu") if parameter is None or parameter.is_meta else parameter.device
    dtype = next((p.dtype for p in base.parameters() if p.is_floating_point()), torch.float32)
    if _is_transformers(base):
        candidates = _Maker(base, batch_size, sequence_length or 16, device, dtype).candidates()
    elif (cfg := _timm_config(base)) is not None:
        settings = {"device": device, "dtype": dtype}
        candidates = (
            ExampleInputs((_drawn(torch.randn, batch_size, *size, **settings),))
            for size in _image_sizes(base, cfg)
        )
    elif is_diffusers(base):
        candidates = diffusion_inputs(base, batch_size, sequence_length, device, dtype)
    else:
        raise TraceError(
            f"{type(base).__name__} is neither a transformers, a timm nor a diffusers model, so its inputs "
            "are unknown: pass example_inputs= (a tensor, a tuple or a dict of keyword arguments)"
        )
    return _first_that_runs(base, list(itertools.islice(candidates, _MOST_CANDIDATES)))


def _drawn(draw: Callable[..., Tensor], *shape: int, **settings: Any) -> Tensor:
    """Random numbers of a shape that a user asks for."""
    try:
        return draw(shape, **settings)
    except (RuntimeError, TypeError, OverflowError) as error:
        size = " x ".join(f"{length:,}" for length in shape)
        raise TraceError(
            f"example inputs of {size} numbers do not fit memory: give fewer or shorter rows"
        ) from error


def inner_models(model: nn.Module) -> list[nn.Module]:
    """The model itself if its inputs are known; else the outermost models within whose are, and that train.

    A SentenceTransformer, a LightningModule or a DistributedDataParallel holds such models. Without any, the
    model itself.
    """
    found: dict[nn.Module, None] = {}

    def look(module: nn.Module) -> None:
        base = base_model(module)
        if _is_transformers(base) or _timm_config(base) is not None or is_diffusers(base):
            found[module] = None
            return
        for child in module.children():
            look(child)

    look(model)
    training = [one for one in found if any(p.requires_grad for p in one.parameters())]
    return training or list(found) or [model]


def inner_model(model: nn.Module) -> nn.Module:
    """The only one of :func:`inner_models`.

    Raises:
        TraceError: there are several.
    """
    found = inner_models(model)
    if len(found) > 1:
        names = [name for name, module in model.named_modules() if module in found]
        raise TraceError(
            f"{type(model).__name__} holds {len(found)} models that train ({', '.join(names)}): patch each "
            "by itself, or all at once with example_inputs="
        )
    return found[0]


def reads_tokens(model: nn.Module) -> bool:
    """Whether the length of a row is the user's choice, as it is for text."""
    main = getattr(base_model(model), "main_input_name", None)
    return "input_ids" in (main if isinstance(main, (list, tuple)) else [main])


def _is_transformers(model: Any) -> bool:
    return getattr(model, "config", None) is not None and hasattr(model, "main_input_name")


def _timm_config(model: Any) -> Any:
    return getattr(model, "pretrained_cfg", None) or getattr(model, "default_cfg", None)


def _image_sizes(model: Any, cfg: Any) -> list[tuple[int, int, int]]:
    """Channels, height and width: those that the model was made for, where it says so, and not its pretrained
    weights'. Its first convolution may read channels that it made itself (TResNet's pixels in depth)."""
    known = cfg if isinstance(cfg, dict) else vars(cfg)
    channels, height, width = (int(s) for s in known["input_size"])
    sizes = (getattr(module, "img_size", None) for module in model.modules())
    own = next((size for size in sizes if isinstance(size, (tuple, list)) and len(size) == 2), None)
    if own is not None:
        height, width = map(int, own)
    name = known.get("first_conv")
    first = dict(model.named_modules()).get(name) if isinstance(name, str) else None
    read = first.in_channels if isinstance(first, nn.Conv2d) else channels
    return [(each, height, width) for each in dict.fromkeys((read, channels))]


def _first_that_runs(model: Any, candidates: list[ExampleInputs]) -> ExampleInputs:
    """The first candidate that the forward accepts, on fake tensors or else with data; a single one is
    not tried."""
    name = type(model).__name__
    if not candidates:
        raise TraceError(
            f"{name} reads {getattr(model, 'main_input_name', 'arguments')!r}, for which no example can be "
            "made: pass example_inputs="
        )
    if len(candidates) == 1:
        return candidates[0]
    error: Exception | None = None
    data = not any(parameter.is_meta for parameter in model.parameters())
    for run in (_run_fake, _run_real) if data else (_run_fake,):
        for candidate in candidates:
            try:
                run(model, candidate)
                return candidate
            except Exception as refused:  # a foreign forward may raise anything
                error = refused if candidate is candidates[0] else error
    tried = "; ".join(str(candidate) for candidate in candidates[:3])
    raise TraceError(
        f"{name} ran on none of {len(candidates)} example inputs ({tried}, ...): pass example_inputs=. "
        f"The first said: {type(error).__name__}: {error}"
    ) from error


def _run_fake(model: Any, inputs: ExampleInputs) -> None:
    shadow = make_shadow(model, inputs)
    with shadow.running(), torch.no_grad():
        shadow.model(*shadow.inputs.args, **shadow.inputs.kwargs)


def _run_real(model: Any, inputs: ExampleInputs) -> None:
    with torch.no_grad(), preserved(model):
        model.eval()(*inputs.args, **inputs.kwargs)


class _Maker:
    """Makes tensors by the names of a forward's arguments."""

    def __init__(
        self, model: Any, batch: int, length: int, device: Any, dtype: torch.dtype
    ) -> None:
        self.batch, self.length, self.device, self.dtype = batch, length, device, dtype
        self.config = model.config
        self.configs = list(_with_parts(self.config))
        parameters = inspect.signature(model.forward).parameters
        self.accepted = list(parameters)
        variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        self.required = [
            name
            for name, p in parameters.items()
            if p.default is inspect.Parameter.empty and p.kind not in variadic
        ]
        main = model.main_input_name
        self.main = list(main) if isinstance(main, (list, tuple)) else [main]

    def candidates(self) -> Iterator[ExampleInputs]:
        """The named main input first, then text alone, then with each other modality of the forward."""
        decodes = getattr(self.config, "is_encoder_decoder", False)
        decoder = [n for n in ("decoder_input_ids",) if decodes and n in self.accepted]
        sets = [(*names, *self.required, *decoder) for names in self._choices()]
        for names in dict.fromkeys(tuple(dict.fromkeys(names)) for names in sets):
            options = [_MAKERS[name](self) if name in _MAKERS else [] for name in names]
            for values in itertools.product(*options):
                yield ExampleInputs((), dict(zip(names, values, strict=True)))

    def _choices(self) -> list[list[str]]:
        """Names of inputs that a forward may be called with, beside those that it requires."""
        known = [n for n in _MAKERS if n in self.accepted]
        main = [n for n in self.main if n in self.accepted] or known[:1]
        modalities = [n for n in _MODALITIES if n in known]
        if main == ["input_ids"] and not modalities:
            return [main]  # a model of one input has nothing to choose
        texts = [["input_ids"]] if "input_ids" in known else []
        pairs = [[*text, modality] for text in texts for modality in modalities]
        return [main, *texts, *pairs, *([modality] for modality in modalities)]

    def number(self, *names: str) -> int | None:
        """The first of these numbers that the config or one of its parts gives."""
        for name in names:
            for config in self.configs:
                value = getattr(config, name, None)
                if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                    return value
        return None

    def noise(self, *shape: int) -> Tensor:
        return _drawn(torch.randn, *shape, device=self.device, dtype=self.dtype)

    def tokens(self) -> list[Tensor]:
        """Ordinary tokens: not those that the config names (padding masks, an image token wants an image)."""
        size = self._vocabulary()
        named = {
            value
            for config in self.configs
            for key, value in vars(config).items()
            if key.endswith(("token_id", "token_index")) and isinstance(value, int)
        }
        allowed = [i for i in range(max(2, min(size, _LARGEST_TOKEN))) if i not in named] or [0]
        drawn = _drawn(partial(torch.randint, len(allowed)), self.batch, self.length)
        return [torch.tensor(allowed)[drawn].to(self.device)]

    def decoder_tokens(self) -> list[Tensor]:
        """Tokens, or those of several codebooks one below the other."""
        options, books = self.tokens(), self.number("num_codebooks")
        return [*options, *(option.repeat(books, 1) for option in options if books)]

    def _vocabulary(self) -> int:
        """Tokens of the text model; of the smallest, where an encoder and a decoder read their own."""
        config = self.config
        try:
            text = text_config(config)
        except ValueError:  # several
            sizes = [getattr(part, "vocab_size", None) for part in self.configs]
            return min((size for size in sizes if isinstance(size, int)), default=2)
        return int(getattr(text, "vocab_size", None) or self.number("vocab_size") or 2)

    def mask(self) -> list[Tensor]:
        return [torch.ones(self.batch, self.length, dtype=torch.long, device=self.device)]

    def states(self) -> list[Tensor]:
        width = self.number("hidden_size", "d_model", "embed_dim", "dim")
        return [] if width is None else [self.noise(self.batch, self.length, width)]

    def _image(self) -> tuple[int, int, int]:
        vision = getattr(self.config, "vision_config", None)
        sizes = [getattr(c, "image_size", None) for c in (vision, *self.configs) if c is not None]
        size = next((size for size in sizes if size), 224)
        height, width = (size, size) if isinstance(size, int) else tuple(size)[-2:]
        return self.number("num_channels", "in_channels", "in_chans") or 3, height, width

    def images(self) -> list[Tensor]:
        """A batch of images; of clips where the config counts frames; of lists with one image."""
        frames = self.number("num_frames")
        single = self.noise(self.batch, *self._image())
        several = self.noise(self.batch, frames or 1, *self._image())
        return [single, several] if frames is None else [several, single]

    def videos(self) -> list[Tensor]:
        frames = self.number("num_frames", "frames_per_clip") or 2
        return [self.noise(self.batch, frames, *self._image())]

    def waves(self) -> list[Tensor]:
        """Raw audio, with and without a dimension for channels, or a spectrogram of fixed length."""
        bins, length = self.number("num_mel_bins"), self.number("max_length")
        channels = self.number("audio_channels") or 1
        options = [self.noise(self.batch, _SAMPLES), self.noise(self.batch, channels, _SAMPLES)]
        if bins is not None and length is not None:
            options.insert(0, self.noise(self.batch, length, bins))
        return options

    def spectrograms(self) -> list[Tensor]:
        """Features by frames or frames by features; Whisper's convolutions read a full window."""
        bins = self.number(
            "num_mel_bins", "feature_size", "input_feat_per_channel", "num_mel_filters", "n_mels",
            "feature_projection_input_dim", "input_dim", "mel_bins", "hidden_size",
        )  # fmt: skip
        if bins is None:
            return []
        full = self.number("max_source_positions")
        options = [self.noise(self.batch, _FRAMES, bins), self.noise(self.batch, bins, _FRAMES)]
        if full is not None:
            options.insert(0, self.noise(self.batch, bins, 2 * full))
        return [*options, self.noise(self.batch, 1, _FRAMES, bins)]


_MAKERS = {
    "input_ids": _Maker.tokens,
    "decoder_input_ids": _Maker.decoder_tokens,
    "pixel_values": _Maker.images,
    "pixel_values_videos": _Maker.videos,
    "input_values": _Maker.waves,
    "input_features": _Maker.spectrograms,
    "attention_mask": _Maker.mask,
    "inputs_embeds": _Maker.states,
    "hidden_states": _Maker.states,
}
_MODALITIES = ("pixel_values", "pixel_values_videos", "input_values", "input_features")


def _with_parts(config: Any) -> Iterator[Any]:
    """A config and the configs inside it."""
    yield config
    for value in vars(config).values():
        if hasattr(value, "to_dict") and hasattr(value, "__dict__"):
            yield from _with_parts(value)
