"""What the presets do to diffusion models: peak memory, GPU time and step time on one GPU.

    python benchmarks/diffusion.py --json benchmarks/results/diffusion-h200.json
    python benchmarks/diffusion.py --device cpu --only "Wan" --tiny    # a trial

A few blocks of each transformer at its published widths, and all of the UNet; random weights in bfloat16. The
loss is the mean square of the output. LoRA has rank 16, on attention alone or on all Linears. *checkpointing*
is diffusers' own, of every block. What is measured is told in ``benchmarks/architectures.py``.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import diffusers
import torch
from architectures import measured
from peft import LoraConfig
from torch import Tensor, nn

from lowmem_patch import patch_model
from lowmem_patch.bench import environment
from lowmem_patch.tracing.inputs import ExampleInputs

VARIANTS = ("unpatched", "checkpointing", "exact", "auto")
TARGETS = {"attention": ["to_q", "to_k", "to_v", "to_out.0"], "all": "all-linear"}


class Case(NamedTuple):
    """A model and its batch.

    Attributes:
        blocks: of the model, as a table says it.
        model: the class of diffusers.
        sizes: of its config.
        tiny: what a trial changes.
        inputs: of a step, from the config.
        ways: what trains: ``all weights``, or LoRA on ``attention`` or on ``all`` Linears.
    """

    blocks: str
    model: str
    sizes: dict[str, Any]
    tiny: dict[str, Any]
    inputs: Callable[[Any, bool], dict[str, Any]]
    ways: tuple[str, ...] = ("attention", "all")


def _flux(config: Any, tiny: bool) -> dict[str, Any]:
    image, text = (16, 8) if tiny else (4096, 512)
    return {
        "hidden_states": torch.randn(1, image, config.in_channels),
        "encoder_hidden_states": torch.randn(1, text, config.joint_attention_dim),
        "pooled_projections": torch.randn(1, config.pooled_projection_dim),
        "timestep": torch.rand(1),
        "img_ids": torch.zeros(image, 3),
        "txt_ids": torch.zeros(text, 3),
        "guidance": torch.ones(1),
    }


def _sd3(config: Any, tiny: bool) -> dict[str, Any]:
    side, text = (8, 8) if tiny else (128, 333)
    return {
        "hidden_states": torch.randn(2, config.in_channels, side, side),
        "encoder_hidden_states": torch.randn(2, text, config.joint_attention_dim),
        "pooled_projections": torch.randn(2, config.pooled_projection_dim),
        "timestep": torch.rand(2),
    }


def _wan(config: Any, tiny: bool) -> dict[str, Any]:
    frames, height, width, text = (2, 4, 4, 8) if tiny else (9, 60, 104, 512)
    return {
        "hidden_states": torch.randn(1, config.in_channels, frames, height, width),
        "encoder_hidden_states": torch.randn(1, text, config.text_dim),
        "timestep": torch.tensor([500]),
    }


def _pixart(config: Any, tiny: bool) -> dict[str, Any]:
    batch, side, text = (2, 8, 8) if tiny else (4, 128, 300)
    return {
        "hidden_states": torch.randn(batch, config.in_channels, side, side),
        "encoder_hidden_states": torch.randn(batch, text, config.caption_channels),
        "timestep": torch.arange(batch),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
    }


def _sdxl(config: Any, tiny: bool) -> dict[str, Any]:
    side, text = (8, 8) if tiny else (128, 77)
    return {
        "sample": torch.randn(2, config.in_channels, side, side),
        "timestep": torch.tensor([1, 2]),
        "encoder_hidden_states": torch.randn(2, text, config.cross_attention_dim),
    }


CASES = {
    "FLUX.1": Case(
        "2 + 4 blocks, 4096 + 512 tokens", "FluxTransformer2DModel",
        {"num_layers": 2, "num_single_layers": 4, "guidance_embeds": True},
        {"attention_head_dim": 16, "num_attention_heads": 2, "axes_dims_rope": (4, 6, 6),
         "joint_attention_dim": 32, "pooled_projection_dim": 16},
        _flux, ("attention", "all", "all weights"),
    ),
    "SD 3.5 medium": Case(
        "4 blocks, 2 x 4096 + 333 tokens", "SD3Transformer2DModel",
        {"num_layers": 4, "num_attention_heads": 24, "attention_head_dim": 64, "sample_size": 128,
         "in_channels": 16, "out_channels": 16, "caption_projection_dim": 1536, "qk_norm": "rms_norm",
         "pos_embed_max_size": 384},
        {"num_attention_heads": 2, "attention_head_dim": 16, "caption_projection_dim": 32,
         "joint_attention_dim": 32, "pooled_projection_dim": 16},
        _sd3,
    ),
    "Wan 2.1 1.3B": Case(
        "4 blocks, 14,040 tokens", "WanTransformer3DModel",
        {"num_layers": 4, "num_attention_heads": 12, "ffn_dim": 8960},
        {"num_attention_heads": 2, "attention_head_dim": 16, "ffn_dim": 64, "text_dim": 32},
        _wan,
    ),
    "PixArt-Sigma": Case(
        "4 blocks, 4 x 4096 tokens", "PixArtTransformer2DModel",
        {"num_layers": 4, "sample_size": 128, "caption_channels": 4096, "use_additional_conditions": False},
        {"num_attention_heads": 2, "attention_head_dim": 16, "cross_attention_dim": 32,
         "caption_channels": 32},
        _pixart, ("all weights",),
    ),
    "UNet of SDXL": Case(
        "all blocks, 2 x 128 x 128", "UNet2DConditionModel",
        {"sample_size": 128, "block_out_channels": (320, 640, 1280), "cross_attention_dim": 2048,
         "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
         "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
         "attention_head_dim": (5, 10, 20), "transformer_layers_per_block": (1, 2, 10),
         "use_linear_projection": True},
        {"block_out_channels": (32, 32, 64), "cross_attention_dim": 32, "attention_head_dim": (2, 2, 4),
         "transformer_layers_per_block": (1, 1, 1)},
        _sdxl, ("attention",),
    ),
}  # fmt: skip


def build(case: Case, way: str, device: str, tiny: bool) -> tuple[nn.Module, ExampleInputs]:
    """The model, which trains, and its inputs."""
    torch.manual_seed(0)
    with torch.device(device):
        sizes = {**case.sizes, **(case.tiny if tiny else {})}
        model = getattr(diffusers, case.model)(**sizes)
        given = case.inputs(model.config, tiny)
    model = model.to(torch.bfloat16).train()
    if way != "all weights":
        model.requires_grad_(False)
        adapter = LoraConfig(r=16, init_lora_weights="gaussian", target_modules=TARGETS[way])
        model.add_adapter(adapter)
        # as diffusers' scripts train them with mixed precision: adapters in bfloat16 here
        model.to(torch.bfloat16)
    floats = {
        name: value.to(torch.bfloat16)
        for name, value in given.items()
        if isinstance(value, Tensor) and value.is_floating_point()
    }
    return model, ExampleInputs((), {**given, **floats})


def variant_of(model: Any, name: str, inputs: ExampleInputs) -> Any:
    made = copy.deepcopy(model)
    if name == "checkpointing":
        made.enable_gradient_checkpointing()
    elif name != "unpatched":
        made = patch_model(made, name, example_inputs=inputs.kwargs)
    return made


def measure(case: Case, way: str, device: str, tiny: bool) -> dict[str, dict[str, float]]:
    model, inputs = build(case, way, device, tiny)
    return measured({v: variant_of(model, v, inputs) for v in VARIANTS}, inputs, device == "cuda")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--only", default="", help="only models whose name contains this")
    parser.add_argument("--tiny", action="store_true", help="narrow models and short inputs")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    chosen = {name: case for name, case in CASES.items() if options.only.lower() in name.lower()}
    if not chosen:
        parser.error(f"--only {options.only}: known are {', '.join(CASES)}")
    # cuDNN's attention of torch 2.11 ends in an illegal memory access at the lengths of FLUX, patched or not
    torch.backends.cuda.enable_cudnn_sdp(False)
    results: dict[str, Any] = {"environment": environment(options.device), "rows": []}
    results["environment"]["diffusers"] = diffusers.__version__
    for name, case in chosen.items():
        for way in case.ways:
            found = measure(case, way, options.device, options.tiny)
            results["rows"].append({"model": name, "blocks": case.blocks, "trains": way, **found})
            cells = (
                f"{v} {' '.join(f'{x:.1f}' for x in row.values())}" for v, row in found.items()
            )
            print(f"{name:16} {way:12}", " | ".join(cells), flush=True)
            if options.json:
                options.json.write_text(json.dumps(results, indent=1) + "\n")
            gc.collect()
            if options.device == "cuda":
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
