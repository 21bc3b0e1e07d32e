"""Numbers of a shrunk config that must hang together: rotary sections, stages, windows, image sizes."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

from zoo.arrays import parts


def fit(config: Any) -> None:
    """Mend a shrunk config and the configs inside it, the inner ones first."""
    for part in reversed(list(parts(config))):
        _fit_rotary(part)
        _fit_stages(part)
        _fit_windows(part)
        _fit_tiles(part)
        _fit_pooling(part)


def _sections(config_class: Any) -> int:
    """Sections of a multimodal rotary embedding that the models of this config read, 0 for none.

    Where a config names no sections the code has its own, which fit no shrunk head.
    """
    folder = Path(str(inspect.getfile(config_class))).parent
    sources = "".join(path.read_text(encoding="utf-8") for path in folder.glob("modeling_*.py"))
    default = re.search(r"mrope_section\W+\[([\d, ]+)\]", sources)
    if default is not None:
        return len(default.group(1).split(","))
    return 3 if "mrope_section" in sources else 0


def _fit_rotary(config: Any) -> None:
    """Sections of multimodal rotary embeddings must fill half a head."""
    values = vars(config)
    rope, width = values.get("rope_parameters"), values.get("hidden_size")
    if not isinstance(rope, dict) or not width:
        return
    parts = len(rope["mrope_section"]) if "mrope_section" in rope else _sections(type(config))
    if parts and not any(isinstance(value, dict) for value in rope.values()):
        size = values.get("head_dim") or width // (values.get("num_attention_heads") or 1)
        half = int(size * (rope.get("partial_rotary_factor") or 1.0)) // 2
        rope["mrope_section"] = [half // parts] * (parts - 1) + [half - half // parts * (parts - 1)]


def _fit_stages(config: Any) -> None:
    """A backbone must have the stages that its user reads: one layer for each."""
    wanted = getattr(config, "out_indices", None) or ()
    depth = getattr(config, "num_hidden_layers", None)
    if isinstance(depth, int) and hasattr(config, "stage_names") and wanted:
        config.num_hidden_layers = max(depth, len(wanted)) if depth < max(wanted) else depth
        stages = [f"stage{i}" for i in range(1, config.num_hidden_layers + 1)]
        config.stage_names = ["stem", *stages]
        if max(wanted) > len(stages):
            config.out_indices = list(range(1, len(wanted) + 1))


def _fit_windows(config: Any) -> None:
    """A window that is counted in pixels holds whole groups of the patches that are merged."""
    values = vars(config)
    window, merged, side = (
        values.get(name) for name in ("window_size", "spatial_merge_size", "patch_size")
    )
    if all(isinstance(value, int) for value in (window, merged, side)):
        config.window_size = max(window, 2 * merged * side)


def _fit_tiles(config: Any) -> None:
    """Images that are cut into tiles: one tile, of the vision model's size."""
    size = getattr(vars(config).get("vision_config"), "image_size", None)
    if isinstance(size, int) and vars(config).get("image_grid_pinpoints"):
        config.image_grid_pinpoints = [[size, size]]


def _fit_pooling(config: Any) -> None:
    """Patches that become fewer tokens, or fewer and wider ones."""
    values = vars(config)
    vision = vars(values.get("vision_config") or config)
    size, side = vision.get("image_size"), vision.get("patch_size")
    if values.get("mm_tokens_per_image") and isinstance(size, int) and isinstance(side, int):
        config.mm_tokens_per_image = max(1, size // side // 2) ** 2
    if values.get("pixel_shuffle_ratio") and "intermediate_size" in values:
        config.intermediate_size = int(values["hidden_size"] / values["pixel_shuffle_ratio"] ** 2)
