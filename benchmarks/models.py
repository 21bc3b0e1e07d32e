"""What patching saves on whole models: saved bytes anywhere, peak memory and step time on a GPU.

    python benchmarks/models.py                        # byte counts at real widths, two layers, any machine
    python benchmarks/models.py --device cuda          # one GPU: act, peak and step time as well
    python benchmarks/models.py --json results.json

Byte counts come from fake tensors and are exact and deterministic. On a GPU, ``act`` is what is still
allocated between forward and backward, ``peak`` the peak of a training step (forward, loss, backward, fused
AdamW) above what rests between steps, ``step`` the median time of one. The variants of a case take turns,
as in ``lowmem-patch bench``; peers take part when importable. Most cases are some of a model's blocks,
without its head, as their results say; whole models are in ``benchmarks/whole.py``.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import timm
import torch
from peft import LoraConfig, get_peft_model
from timm.models.vision_transformer import VisionTransformer
from torch import nn
from transformers import LlamaModel, Qwen2Config, Qwen2Model

from lowmem_patch import bench
from lowmem_patch.bench import SHAPES, Comparison, Shape, compare, compiled, environment
from lowmem_patch.errors import VariantError
from lowmem_patch.planning.report import block_name
from lowmem_patch.tracing.example_inputs import make_example_inputs
from lowmem_patch.tracing.inputs import ExampleInputs
from lowmem_patch.tracing.shadow import make_shadow
from lowmem_patch.tracing.trace import trace_forward

LLAMA_LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
VIT_LINEARS = r".*blocks.*\.(qkv|attn\.proj|fc1|fc2)"


@dataclasses.dataclass(frozen=True)
class Case:
    """One training set-up of a shape. ``adapt`` decides what trains."""

    name: str
    shape: Shape
    adapt: Callable[[nn.Module], nn.Module]
    block: str  # the block whose bytes are shown, behind the first


def qwen(layers: int) -> nn.Module:
    """Qwen2-0.5B shapes, bf16."""
    config = Qwen2Config(
        hidden_size=896, intermediate_size=4864, num_attention_heads=14, num_key_value_heads=2,
        num_hidden_layers=layers, vocab_size=151936,
    )  # fmt: skip
    return Qwen2Model(config).to(torch.bfloat16)


def efficientnet(_layers: int) -> nn.Module:
    return timm.create_model("efficientnet_b0")


def full(model: nn.Module) -> nn.Module:
    return model


def lora(
    targets: Any, rank: int, adapter_autocast: bool = True
) -> Callable[[nn.Module], nn.Module]:
    def adapt(model: nn.Module) -> nn.Module:
        config = LoraConfig(r=rank, target_modules=targets)
        return get_peft_model(model, config, autocast_adapter_dtype=adapter_autocast)

    return adapt


QV = ["q_proj", "v_proj"]
ALL, BF16 = LLAMA_LINEARS, False
LLAMA, LLAMA_3 = SHAPES["llama-7b"], SHAPES["llama-3-8b"]
VIT, ROBERTA, SWIN = SHAPES["vit-b"], SHAPES["roberta-base"], SHAPES["swin-t"]
QWEN = Shape(qwen, 24, 4, 2048, False, "Qwen2-0.5B", 24)
EFFICIENTNET = Shape(efficientnet, None, 128, None, True, "EfficientNet-B0", head=True)
CASES = [
    Case("LLaMA-7B LoRA all, PEFT defaults", LLAMA, lora(ALL, 16), "layers.1"),
    Case("LLaMA-7B LoRA all, bf16 adapters", LLAMA, lora(ALL, 16, BF16), "layers.1"),
    Case("LLaMA-7B LoRA q,v, PEFT defaults", LLAMA, lora(QV, 16), "layers.1"),
    Case("LLaMA-7B LoRA q,v, bf16 adapters", LLAMA, lora(QV, 16, BF16), "layers.1"),
    Case("LLaMA-7B full", LLAMA, full, "layers.1"),
    Case("Llama-3-8B LoRA all, PEFT defaults", LLAMA_3, lora(ALL, 16), "layers.1"),
    Case("Qwen2-0.5B full", QWEN, full, "layers.1"),
    Case("ViT-B/16 full", VIT, full, "blocks.1"),
    Case("ViT-B/16 LoRA all", VIT, lora(VIT_LINEARS, 4), "blocks.1"),
    Case("ViT-B/16 LoRA qkv", VIT, lora(r".*blocks.*\.qkv", 4), "blocks.1"),
    Case("RoBERTa-base full", ROBERTA, full, "encoder.layer.1"),
    Case("Swin-T full", SWIN, full, "layers.1.blocks.1"),
    Case("EfficientNet-B0 full", EFFICIENTNET, full, "blocks.1"),
]


def with_lomem(model: nn.Module, _inputs: ExampleInputs) -> nn.Module:
    """The paper's own kernels in the sites that the paper patches."""
    try:
        import lomem.nn as peer  # type: ignore[import-not-found]  # built by hand, if at all
    except ImportError as error:
        raise VariantError("lomem is not installed") from error
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not isinstance(base, (LlamaModel, VisionTransformer)):
        raise VariantError(f"lomem is set in by hand, and not for {type(base).__name__}")
    for name, module in list(model.named_modules()):
        kind = type(module).__name__
        size = getattr(getattr(module, "weight", None), "numel", lambda: 0)()
        if not any(part in name for part in ("layers.", "blocks.")) and kind not in (
            "SiLUActivation",
            "GELU",
        ):
            continue
        eps = getattr(module, "variance_epsilon", getattr(module, "eps", 1e-6))
        if kind.endswith("RMSNorm"):
            model.set_submodule(name, peer.MSRMSNorm(size, eps))
        elif kind == "LayerNorm":
            model.set_submodule(name, peer.MSLayerNorm(size, eps))
        elif kind in ("SiLUActivation", "SiLU"):
            model.set_submodule(name, peer.ReSiLU2())
        elif kind in ("GELU", "GELUActivation"):
            model.set_submodule(name, peer.ReGELU2())
    return model


# A graph that breaks would be measured as something else than what was asked for.
VARIANTS = {
    **bench.VARIANTS,
    "lomem": with_lomem,
    "compile": compiled(bench.VARIANTS["unpatched"], fullgraph=True),
    "auto+compile": compiled(bench.VARIANTS["auto"], fullgraph=True),
    "compact+compile": compiled(bench.VARIANTS["compact"], fullgraph=True),
}


PRESETS = ("unpatched", "paper", "exact", "auto", "compact")


def count_bytes(case: Case, variants: list[str]) -> dict[str, Any]:
    """Saved activation bytes of one inner block and of all, two layers, unpatched and per preset; no data is
    touched."""
    rows = {}
    for preset in (name for name in PRESETS if name in ("unpatched", *variants)):
        with torch.device("meta"):
            model = case.shape.build(2)
        model = case.adapt(model)
        inputs = make_example_inputs(model, batch_size=2, sequence_length=case.shape.length)
        with torch.autocast("cpu", torch.bfloat16, enabled=case.shape.autocast):
            model = VARIANTS[preset](model, inputs)
            saved = trace_forward(make_shadow(model, inputs), structure=False).saved
        block = sum(
            size for name, size in saved.by_module.items() if block_name(name).endswith(case.block)
        )
        rows[preset] = {
            "block": block,
            "all": saved.activations,
            "weight_copies": saved.weight_copies,
        }
    return rows


def measure(case: Case, variants: list[str], rounds: int, steps: int) -> Comparison:
    """The variants in turn on the current CUDA device."""
    torch.manual_seed(0)
    shape = case.shape
    with torch.device("cuda"):
        model = shape.build(shape.layers or 0)
    model = case.adapt(model).to("cuda").train()
    inputs = make_example_inputs(model, batch_size=shape.batch, sequence_length=shape.length)
    chosen = {name: VARIANTS[name] for name in variants}
    try:
        return compare(model, inputs, chosen, rounds=rounds, steps=steps, autocast=shape.autocast)
    finally:
        torch.compiler.reset()  # the next case compiles the same code for other shapes


def show(case: Case, comparison: Comparison) -> dict[str, Any]:
    """Print the rows, and return those that belong into the results: a skipped variant is no result."""
    if comparison.parked:
        print(f"{case.name}: the models that waited lay in the host's memory")
    for row in comparison.rows:
        heading = f"{case.name:36} {row.name:14}"
        if not row.measured:
            print(heading, row.failed or f"skipped: {row.skipped}", flush=True)
            continue
        r = row.to_dict(comparison.work)
        print(
            f"{heading} act {r['act_mib']:7.0f}  peak+ {r['peak_mib']:7.0f}  reserved+ "
            f"{r['reserved_mib']:7.0f}  step {r['step_ms']:7.2f} +- {r['step_spread_ms']:.2f} ms  "
            f"{r['per_second']:,.0f} {comparison.unit}/s",
            flush=True,
        )
    return {row.name: row.to_dict(comparison.work) for row in comparison.rows if not row.skipped}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--case", default="", help="only cases whose name contains this")
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--rounds", type=int, default=3, help="turns of each variant")
    parser.add_argument("--steps", type=int, default=3, help="timed steps of a turn")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = environment(options.device)
    if options.device == "cpu":
        found["machine"] += ", fake tensors"
    results: dict[str, Any] = {"environment": found, "cases": {}, "parts": {}}
    if options.json and options.json.exists():  # more variants of the same run
        before = json.loads(options.json.read_text())
        results |= {"cases": before["cases"], "parts": before.get("parts", {})}
    for case in CASES:
        if options.case not in case.name:
            continue
        if options.device == "cpu":
            rows = count_bytes(case, options.variants)
            whole = rows["unpatched"]["block"]
            shares = "  ".join(
                f"{k} {v['block']:,} ({v['block'] / whole:.1%})" for k, v in rows.items()
            )
            print(f"{case.name}: {shares}", flush=True)
        else:
            rows = show(case, measure(case, options.variants, options.rounds, options.steps))
        results["cases"].setdefault(case.name, {}).update(rows)
        results["parts"][case.name] = case.shape.part(2 if options.device == "cpu" else None)
        if options.json:
            options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
