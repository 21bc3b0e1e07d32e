"""Arrays that models of the zoo read, in the sizes that their configs give."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor


def parts(config: Any) -> Iterator[Any]:
    """A config and the configs inside it, the outer ones first."""
    level = [config]
    while level:
        yield from level
        level = [c for owner in level for c in vars(owner).values() if hasattr(c, "to_dict")]


def part(config: Any, name: str) -> Any:
    """The first config of this name inside a config, or the config itself."""
    found = [vars(owner)[name] for owner in parts(config) if vars(owner).get(name) is not None]
    return found[0] if found else config


def number(model: Any, *names: str, default: int) -> int:
    """The first of these numbers that the model's config or a part of it gives."""
    configs = list(parts(model.config))
    for name in names:
        for config in configs:
            value = getattr(config, name, None)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return default


def tokens(model: Any) -> Tensor:
    return torch.randint(3, min(100, number(model, "vocab_size", default=100)), (2, 16))


def states(*names: str) -> Callable[[Any], Tensor]:
    return lambda model: torch.randn(2, 16, number(model, *names, default=32))


def boxes(model: Any) -> Tensor:
    corners = torch.randint(0, 10, (2, 16, 2))
    points = number(model, "dim_bbox", default=4) // 2
    return torch.cat([corners + i for i in range(points)], -1)


def image(model: Any) -> Tensor:
    size = number(model, "image_size", default=64)
    return torch.randn(2, number(model, "num_channels", default=3), size, size)


def image_pairs(model: Any) -> Tensor:
    return torch.stack((image(model), image(model)), 1)


def patch_rows(model: Any) -> Tensor:
    """Two images as rows of flattened patches, for models that read them with their grids."""
    channels = number(model, "in_channels", "num_channels", "in_chans", default=3)
    side = number(model, "patch_size", default=14)
    depth = number(model, "temporal_patch_size", "patch_temporal", default=1)
    return torch.randn(2 * 16, channels * depth * side * side)


def grids(model: Any) -> Tensor:
    return torch.tensor([[1, 4, 4], [1, 4, 4]])


def series(model: Any) -> Tensor:
    length = number(model, "context_length", default=16)
    channels = number(model, "num_input_channels", default=0)
    # with lags, a model that lists its features reads that much more of the past
    lags = max(getattr(model.config, "lags_sequence", None) or [0])
    return torch.randn(2, length + lags, *([channels] if channels else []))


def time_features(model: Any) -> Tensor:
    lags = max(getattr(model.config, "lags_sequence", None) or [0])
    length = number(model, "context_length", default=16) + lags
    return torch.randn(2, length, getattr(model.config, "num_time_features", 1))


def future(model: Any) -> Tensor:
    return torch.randn(2, number(model, "prediction_length", default=8))


def future_features(model: Any) -> Tensor:
    length = number(model, "prediction_length", default=8)
    return torch.randn(2, length, getattr(model.config, "num_time_features", 1))


def frames(model: Any) -> int:
    """A window of Whisper's length where the config gives one, else a short one."""
    return 2 * number(model, "max_source_positions", default=64)


def bins(model: Any) -> int:
    return number(
        model, "num_mel_bins", "feature_size", "input_feat_size", "input_size", "input_dim", "n_mels",
        "num_mel_filters", default=80,
    )  # fmt: skip


def spectrogram(model: Any) -> Tensor:
    return torch.randn(2, bins(model), frames(model))


def features(model: Any) -> Tensor:
    return torch.randn(2, 128, bins(model))


def patch_images(model: Any) -> Tensor:
    rows = patch_rows(model)
    side = number(model, "patch_size", default=14)
    return rows.unflatten(-1, (-1, side, side))


def codebooks(model: Any) -> int:
    return number(model, "num_codebooks", "n_q", "num_quantizers", "num_channels", default=4)


def codes(*shape: int) -> Tensor:
    return torch.randint(3, 30, shape)


def patch_strip(model: Any) -> Tensor:
    """Patches of two images side by side, in one image that is a patch high."""
    side = number(model, "patch_size", default=14)
    return torch.randn(1, number(model, "num_channels", default=3), side, 2 * 16 * side)


def positions(model: Any) -> Tensor:
    """Column and row of each patch of two images of 4 by 4."""
    return torch.cartesian_prod(*2 * [torch.arange(4)]).expand(2, 16, 2)


def patch_map(model: Any) -> Tensor:
    """Embeddings of the patches of two images, as a convolution leaves them."""
    side = number(model, "image_size", default=64) // number(model, "patch_size", default=8)
    return torch.randn(2, number(model, "hidden_size", default=32), side, side)
