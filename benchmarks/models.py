"""What patching saves on whole models: saved bytes anywhere, peak memory and step time on a GPU.

    python benchmarks/models.py                        # byte counts at real widths, two layers, any machine
    python benchmarks/models.py --device cuda          # one GPU: act, peak and step time as well
    python benchmarks/models.py --json results.json

Byte counts come from fake tensors and are exact and deterministic. On a GPU, ``act`` is what is still
allocated between forward and backward, ``peak`` the peak above the resting level of a training step
(forward and backward, no optimizer), ``step`` the median time of one. Peers take part when importable.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import gc
import json
import platform
import statistics
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import timm
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaModel, RobertaConfig, RobertaModel

from lowmem_patch import patch_model
from lowmem_patch.patching.inputs import ExampleInputs
from lowmem_patch.patching.sites import block_name
from lowmem_patch.patching.trace import make_shadow, trace_forward

LLAMA_LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
VIT_LINEARS = r".*blocks.*\.(qkv|attn\.proj|fc1|fc2)"


@dataclasses.dataclass(frozen=True)
class Case:
    """One training set-up. ``build`` makes the model, ``adapt`` decides what trains."""

    name: str
    build: Callable[[int], nn.Module]
    adapt: Callable[[nn.Module], nn.Module]
    inputs: Callable[[int, torch.device], ExampleInputs]
    autocast: bool
    layers: int
    batch: int
    block: str  # the block whose bytes are shown, behind the first


def llama(layers: int) -> nn.Module:
    """LLaMA-7B shapes, bf16."""
    config = LlamaConfig(
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=layers,
        num_attention_heads=32,
        vocab_size=32000,
    )
    return LlamaModel(config).to(torch.bfloat16)


def vit(layers: int) -> nn.Module:
    """timm's ViT-B/16, fp32 weights."""
    return timm.create_model("vit_base_patch16_224", depth=layers)


def roberta(layers: int) -> nn.Module:
    """RoBERTa-base without dropout, fp32 weights."""
    config = RobertaConfig(
        num_hidden_layers=layers, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, vocab_size=50265,
        max_position_embeddings=514,
    )  # fmt: skip
    return RobertaModel(config, add_pooling_layer=False)


def swin(layers: int) -> nn.Module:
    """timm's Swin-T, fp32 weights; ``layers`` is ignored."""
    return timm.create_model("swin_tiny_patch4_window7_224", drop_path_rate=0.0)


def tokens(length: int) -> Callable[[int, torch.device], ExampleInputs]:
    def make(batch: int, device: torch.device) -> ExampleInputs:
        return ExampleInputs(
            (), {"input_ids": torch.randint(0, 30000, (batch, length), device=device)}
        )

    return make


def images(batch: int, device: torch.device) -> ExampleInputs:
    return ExampleInputs((torch.randn(batch, 3, 224, 224, device=device),))


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
ALL, BF16, LENGTH = LLAMA_LINEARS, False, tokens(2048)
CASES = [
    Case("LLaMA-7B LoRA all, PEFT defaults", llama, lora(ALL, 16), LENGTH, False, 4, 4, "layers.1"),
    Case("LLaMA-7B LoRA all, bf16 adapters", llama, lora(ALL, 16, BF16), LENGTH, False, 4, 4, "layers.1"),
    Case("LLaMA-7B LoRA q,v, PEFT defaults", llama, lora(QV, 16), LENGTH, False, 4, 4, "layers.1"),
    Case("LLaMA-7B LoRA q,v, bf16 adapters", llama, lora(QV, 16, BF16), LENGTH, False, 4, 4, "layers.1"),
    Case("LLaMA-7B full", llama, full, LENGTH, False, 4, 4, "layers.1"),
    Case("ViT-B/16 full", vit, full, images, True, 12, 128, "blocks.1"),
    Case("ViT-B/16 LoRA all", vit, lora(VIT_LINEARS, 4), images, True, 12, 128, "blocks.1"),
    Case("ViT-B/16 LoRA qkv", vit, lora(r".*blocks.*\.qkv", 4), images, True, 12, 128, "blocks.1"),
    Case("RoBERTa-base full", roberta, full, tokens(256), True, 12, 64, "encoder.layer.1"),
    Case("Swin-T full", swin, full, images, True, 12, 64, "layers.1.blocks.1"),
]  # fmt: skip


def with_lomem(model: nn.Module) -> nn.Module:
    """The paper's own kernels in the sites that the paper patches."""
    import lomem.nn as peer  # type: ignore[import-not-found]

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


def with_liger(model: nn.Module) -> nn.Module:
    from liger_kernel.transformers.rms_norm import LigerRMSNorm  # type: ignore[import-not-found]
    from liger_kernel.transformers.swiglu import LigerSwiGLUMLP  # type: ignore[import-not-found]

    for name, module in list(model.named_modules()):
        if type(module).__name__ == "LlamaRMSNorm":
            new = LigerRMSNorm(module.weight.numel(), module.variance_epsilon).to(module.weight)
            new.weight = module.weight
            model.set_submodule(name, new)
        elif type(module).__name__ == "LlamaMLP":
            module.forward = LigerSwiGLUMLP.forward.__get__(module)
    return model


def with_checkpointing(model: nn.Module) -> nn.Module:
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if hasattr(base, "set_grad_checkpointing"):
        base.set_grad_checkpointing(True)
    else:
        base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def compiled(model: nn.Module) -> Any:
    return torch.compile(model, fullgraph=True)


VARIANTS: dict[str, Callable[[nn.Module, ExampleInputs], nn.Module]] = {
    "unpatched": lambda model, _: model,
    "paper": lambda model, inputs: patch_model(model, "paper", example_inputs=inputs),
    "exact": lambda model, inputs: patch_model(model, "exact", example_inputs=inputs),
    "auto": lambda model, inputs: patch_model(model, "auto", example_inputs=inputs),
    "lomem": lambda model, _: with_lomem(model),
    "liger": lambda model, _: with_liger(model),
    "checkpointing": lambda model, _: with_checkpointing(model),
    "compile": lambda model, _: compiled(model),
    "auto+compile": lambda model, inputs: compiled(
        patch_model(model, "auto", example_inputs=inputs)
    ),
}


def available(variant: str, case: Case) -> bool:
    if variant == "lomem":
        return _importable("lomem") and case.build in (llama, vit)
    if variant == "liger":
        return _importable("liger_kernel") and case.build is llama
    return True


def _importable(name: str) -> bool:
    try:
        __import__(name)
    except ImportError:
        return False
    return True


def count_bytes(case: Case) -> dict[str, Any]:
    """Saved activation bytes of one inner block and of all, two layers, per preset; no data is touched."""
    device, rows = torch.device("cpu"), {}
    for preset in ("unpatched", "paper", "exact", "auto"):
        with torch.device("meta"):
            model = case.build(2)
        model = case.adapt(model)
        inputs = case.inputs(2, device)
        with torch.autocast("cpu", torch.bfloat16, enabled=case.autocast):
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


def measure(case: Case, variant: str, steps: int) -> dict[str, float]:
    """act and peak in MiB, step in ms, on the current CUDA device."""
    torch.manual_seed(0)
    device = torch.device("cuda")
    with device:
        model = case.build(case.layers)
    model = case.adapt(model).to(device).train()
    inputs = case.inputs(case.batch, device)
    with torch.autocast("cuda", torch.bfloat16, enabled=case.autocast):
        model = VARIANTS[variant](model, inputs)

    def forward(model: nn.Module = model) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=case.autocast):
            output = model(*inputs.args, **inputs.kwargs)
        output = output if isinstance(output, Tensor) else output[0]
        return output.float().square().mean()

    for _ in range(3):
        forward().backward()
    model.zero_grad(set_to_none=False)
    times = []
    rest = act = peak = 0
    for _ in range(steps):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        rest = torch.cuda.memory_allocated()
        start.record()
        loss = forward()
        act = torch.cuda.memory_allocated() - rest
        loss.backward()
        end.record()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - rest
        times.append(start.elapsed_time(end))
        del loss
    del model
    gc.collect()
    torch.cuda.empty_cache()
    torch._dynamo.reset()
    quartiles = statistics.quantiles(times, n=4)
    return {
        "act_mib": act / 2**20, "peak_mib": peak / 2**20, "step_ms": statistics.median(times),
        "step_spread_ms": quartiles[2] - quartiles[0],
    }  # fmt: skip


def environment(device: str) -> dict[str, str]:
    names = ("torch", "triton", "transformers", "timm", "peft", "liger-kernel", "lowmem-patch")
    versions = {}
    for name in names:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    machine = (
        torch.cuda.get_device_name() if device == "cuda" else f"{platform.machine()}, fake tensors"
    )
    return {"machine": machine, "date": datetime.date.today().isoformat(), **versions}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--case", default="", help="only cases whose name contains this")
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results: dict[str, Any] = {"environment": environment(options.device), "cases": {}}
    if options.json and options.json.exists():  # more variants of the same run
        results["cases"] = json.loads(options.json.read_text())["cases"]
    for case in CASES:
        if options.case not in case.name:
            continue
        rows: dict[str, Any] = {}
        if options.device == "cpu":
            rows = count_bytes(case)
            whole = rows["unpatched"]["block"]
            shares = "  ".join(
                f"{k} {v['block']:,} ({v['block'] / whole:.1%})" for k, v in rows.items()
            )
            print(f"{case.name}: {shares}", flush=True)
        else:
            for variant in options.variants:
                if not available(variant, case):
                    continue
                try:
                    rows[variant] = measure(case, variant, options.steps)
                except Exception as error:  # one variant that fails must not hide the others
                    rows[variant] = {"error": f"{type(error).__name__}: {error}"[:300]}
                    print(f"{case.name:36} {variant:14} {rows[variant]['error']}", flush=True)
                    continue
                r = rows[variant]
                print(
                    f"{case.name:36} {variant:14} act {r['act_mib']:7.0f}  peak+ {r['peak_mib']:7.0f}  "
                    f"step {r['step_ms']:7.2f} +- {r['step_spread_ms']:.2f} ms",
                    flush=True,
                )
        results["cases"].setdefault(case.name, {}).update(rows)
        if options.json:
            options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
