"""The predicted peak of a training step against the allocator's, over models, optimizers and budgets.

    python benchmarks/predicted.py --json benchmarks/results/predicted-h100.json     # one GPU
    python benchmarks/predicted.py --device cpu --tiny                               # a trial, counted bytes

Models have the widths of the real ones, random weights, and as many layers as the table says: few where all
of them would not fit the time. A row is one set-up without a budget and one within a budget halfway between
the weights and that peak, or the least one. *Predicted* is what ``patch_report(model).fit`` says, *measured*
the most that the allocator gave in the third step, above what lay there before the model was made. *Reserved*
is what it had taken from the GPU by then; both rows of a set-up begin with an empty cache. On a CPU, storages
are counted one by one, but for those that stand for host memory, and nothing is reserved.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import importlib
import importlib.util
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from lowmem_patch import patch_model, patch_report, unpatch_model
from lowmem_patch.bench import environment
from lowmem_patch.errors import BudgetError
from lowmem_patch.memory import run_step
from lowmem_patch.nn.checkpointing import is_checkpointed
from lowmem_patch.planning.fit_report import FitReport
from lowmem_patch.tracing.example_inputs import make_example_inputs
from lowmem_patch.tracing.inputs import ExampleInputs
from lowmem_patch.tracing.live_storages import LiveStorages

HUGE = "1024TiB"


@dataclasses.dataclass(frozen=True)
class Shape:
    """A model: its config's class, the model's class, its sizes, layers, rows and tokens."""

    config: str
    model: str
    sizes: dict[str, Any]
    layers: tuple[str, ...]  # keys of the numbers of layers
    depth: int
    rows: int
    length: int | None


SHAPES = {
    "Llama-3.1-8B": Shape("LlamaConfig", "LlamaForCausalLM", {
        "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256}, ("num_hidden_layers",), 8, 2, 2048),
    "Qwen2.5-0.5B": Shape("Qwen2Config", "Qwen2ForCausalLM", {
        "hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14,
        "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True},
        ("num_hidden_layers",), 12, 4, 2048),
    "Gemma-2-2B": Shape("Gemma2Config", "Gemma2ForCausalLM", {
        "hidden_size": 2304, "intermediate_size": 9216, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 256000},
        ("num_hidden_layers",), 6, 2, 2048),
    "Mixtral-8x7B": Shape("MixtralConfig", "MixtralForCausalLM", {
        "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
        "num_key_value_heads": 8, "num_local_experts": 8, "vocab_size": 32000},
        ("num_hidden_layers",), 2, 2, 1024),
    "Qwen3-30B-A3B": Shape("Qwen3MoeConfig", "Qwen3MoeForCausalLM", {
        "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128,
        "num_experts_per_tok": 8, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
        "vocab_size": 151936}, ("num_hidden_layers",), 4, 2, 2048),
    "RoBERTa-base": Shape("RobertaConfig", "RobertaForMaskedLM", {
        "vocab_size": 50265, "max_position_embeddings": 514}, ("num_hidden_layers",), 12, 32, 256),
    "Whisper-small": Shape("WhisperConfig", "WhisperForConditionalGeneration", {
        "d_model": 768, "encoder_attention_heads": 12, "decoder_attention_heads": 12,
        "encoder_ffn_dim": 3072, "decoder_ffn_dim": 3072, "decoder_start_token_id": 50257},
        ("encoder_layers", "decoder_layers"), 6, 4, 256),
    "ViT-L/16": Shape("", "vit_large_patch16_224", {}, ("depth",), 12, 64, None),
    "Swin-B": Shape("", "swin_base_patch4_window7_224", {"drop_path_rate": 0.0}, (), 24, 32, None),
}  # fmt: skip
# every set-up makes a row without a budget and one within one
SETUPS = (
    ("Llama-3.1-8B", "lora", "adamw"), ("Llama-3.1-8B", "lora", "sgd"), ("Llama-3.1-8B", "full", "adamw"),
    ("Llama-3.1-8B", "full", "adamw8bit"), ("Llama-3.1-8B", "qlora", "adamw"),
    ("Qwen2.5-0.5B", "full", "adamw"), ("Qwen2.5-0.5B", "full", "sgd"), ("Qwen2.5-0.5B", "lora", "adamw8bit"),
    ("Gemma-2-2B", "full", "adamw"), ("Gemma-2-2B", "lora", "adamw"), ("Gemma-2-2B", "qlora", "sgd"),
    ("Mixtral-8x7B", "lora", "adamw"), ("Mixtral-8x7B", "full", "sgd"),
    ("Mixtral-8x7B", "lora+experts", "adamw"), ("Qwen3-30B-A3B", "lora+experts", "adamw"),
    ("ViT-L/16", "full", "adamw"), ("ViT-L/16", "lora", "adamw"), ("RoBERTa-base", "full", "adamw"),
    ("RoBERTa-base", "full", "sgd"), ("Swin-B", "full", "adamw"), ("Swin-B", "full", "sgd"),
    ("Whisper-small", "full", "adamw"), ("Whisper-small", "full", "adamw8bit"),
)  # fmt: skip
_TINY = {
    "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "vocab_size": 512, "num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 96, "d_model": 64, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "embed_dim": 64,
    "img_size": 64, "num_heads": 4, "decoder_start_token_id": 1,
}  # fmt: skip


def build(shape: Shape, device: str, tiny: bool) -> Any:
    """The model in bfloat16 on a device."""
    sizes = {**shape.sizes, **dict.fromkeys(shape.layers, 3 if tiny else shape.depth)}
    timm_model = not shape.config
    if tiny and timm_model:
        sizes |= {"img_size": 64}
        sizes |= (
            {"embed_dim": 32, "num_heads": 4}
            if shape.layers
            else {"embed_dim": 32, "window_size": 4}
        )
        sizes |= {} if shape.layers else {"depths": (2, 2), "num_heads": (2, 2)}
    elif tiny:
        sizes |= {key: value for key, value in _TINY.items() if key in sizes}
    before = torch.get_default_dtype()
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            if timm_model:
                return importlib.import_module("timm").create_model(shape.model, **sizes)
            library: Any = importlib.import_module("transformers")
            return getattr(library, shape.model)(getattr(library, shape.config)(**sizes))
    finally:
        torch.set_default_dtype(before)


def adapt(model: Any, train: str) -> Any:
    """With adapters, unless all weights train."""
    if train == "full":
        return model.train()
    names = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and "head" not in n]
    experts = ["experts.gate_up_proj", "experts.down_proj"] if train == "lora+experts" else None
    config = LoraConfig(r=16, target_modules=names, target_parameters=experts, lora_dropout=0.0)
    return get_peft_model(model, config, autocast_adapter_dtype=False).train()


def pack(model: nn.Module) -> None:
    """Linears but the head's in 4 bits."""
    bitsandbytes: Any = importlib.import_module("bitsandbytes")
    for name, module in list(model.named_modules()):
        if not isinstance(module, nn.Linear) or "head" in name:
            continue
        packed = bitsandbytes.nn.Linear4bit(
            module.in_features, module.out_features, bias=module.bias is not None,
            compute_dtype=torch.bfloat16, quant_type="nf4", compress_statistics=True, device="meta",
        )  # fmt: skip
        weight = module.weight.data.cpu()
        packed.weight = bitsandbytes.nn.Params4bit(
            weight, requires_grad=False, quant_type="nf4", module=packed
        )
        packed.bias = module.bias
        model.set_submodule(name, packed.to("cuda"))


def optimizer_of(name: str, model: nn.Module) -> torch.optim.Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if name == "adamw8bit":
        optimizer: torch.optim.Optimizer = importlib.import_module("bitsandbytes").optim.AdamW8bit(
            trained, lr=1e-8
        )
        return optimizer
    if name == "sgd":
        return torch.optim.SGD(trained, lr=1e-8, foreach=True)
    return torch.optim.AdamW(trained, lr=1e-8, fused=True)


class CountedPeak(LiveStorages):
    """The most bytes of storages alive at one time."""

    most = 0

    def grown(self, now: int) -> None:
        self.most = max(self.most, now)


def measure(model: Any, inputs: ExampleInputs, optimizer: str, before: int, fit: FitReport) -> int:
    """Bytes at the peak of a step, model states included, above what lay there before the model."""
    stepper = optimizer_of(optimizer, model)
    cuda = next(model.parameters()).is_cuda

    def step() -> None:
        run_step(model, inputs)
        stepper.step()
        stepper.zero_grad(set_to_none=True)

    for _ in range(2):
        step()
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    states = [v for s in stepper.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
    with CountedPeak((*model.parameters(), *model.buffers(), *states, *_on_host(model))) as live:
        for tensor in (*inputs.args, *inputs.kwargs.values()):
            live.add(tensor)
        step()
    return live.most + fit.parameters + fit.optimizer_state


def _on_host(model: nn.Module) -> list[torch.Tensor]:
    """Buffers of host memory, which a step uses again."""
    blocks: list[Any] = [module for module in model.modules() if is_checkpointed(module)]
    hosts = [block.forward.args[1].host for block in blocks]
    free = [waiting for host in hosts if host is not None for waiting in host.free.values()]
    return [buffer for buffers in free for buffer in buffers]


def rows_of(
    name: str, train: str, optimizer: str, device: str, tiny: bool
) -> Iterator[dict[str, Any]]:
    """Without a budget, and within one."""
    shape = SHAPES[name]
    empty_cache(device)
    before = torch.cuda.memory_allocated() if device == "cuda" else 0
    model = adapt_and_pack(build(shape, device, tiny), train)
    size = {"batch_size": 2 if tiny else shape.rows}
    length = None if shape.length is None else 32 if tiny else shape.length
    inputs = make_example_inputs(model, sequence_length=length, **size)
    inputs = inputs.map(
        lambda t: t.to(device, torch.bfloat16) if t.is_floating_point() else t.to(device)
    )
    fixed = {"train": train, "optimizer": optimizer, "layers": 3 if tiny else shape.depth}
    known = {"model": name, **fixed, "inputs": str(inputs)}
    start = time.perf_counter()
    fit = _fitted(model, inputs, optimizer, HUGE)
    yield {**known, **_row(model, inputs, optimizer, before, fit, time.perf_counter() - start)}
    held = fit.parameters + fit.optimizer_state
    budget = held + (fit.predicted - held) // 2
    unpatch_model(model)
    empty_cache(device)
    start = time.perf_counter()
    try:
        fit = _fitted(model, inputs, optimizer, budget)
    except BudgetError as error:
        if error.least is None:
            raise
        budget = error.least
        fit = _fitted(model, inputs, optimizer, budget)
    seconds = time.perf_counter() - start
    yield {**known, "budget": budget, **_row(model, inputs, optimizer, before, fit, seconds)}


def empty_cache(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch._C._cuda_clearCublasWorkspaces()  # of earlier rows: a prediction counts its own
        torch.cuda.empty_cache()
        torch.cuda.synchronize()


def adapt_and_pack(model: Any, train: str) -> Any:
    if train == "qlora":
        pack(model)
    return adapt(model, train)


def _fitted(model: Any, inputs: ExampleInputs, optimizer: str, budget: str | int) -> FitReport:
    given = inputs.kwargs or inputs.args
    patch_model(model, "auto", example_inputs=given, fit=budget, optimizer=optimizer)
    fit = patch_report(model).fit
    assert fit is not None
    return fit


def _row(
    model: Any, inputs: ExampleInputs, optimizer: str, before: int, fit: FitReport, seconds: float
) -> dict[str, Any]:
    measured = measure(model, inputs, optimizer, before, fit)
    reserved = torch.cuda.memory_reserved() if next(model.parameters()).is_cuda else 0
    return {
        "predicted": fit.predicted, "measured": measured, "error": fit.predicted / measured - 1,
        "rounding": fit.rounding, "margin": fit.margin,
        "reserved": {"predicted": fit.reserved, "measured": reserved},
        "moment": fit.moment, "levels": fit.levels, "plan_s": seconds,
        "states": fit.parameters + fit.optimizer_state,
    }  # fmt: skip


def absent(train: str, optimizer: str, device: str) -> str:
    """Why a set-up cannot run here, or an empty text."""
    if train != "qlora" and optimizer != "adamw8bit":
        return ""
    if importlib.util.find_spec("bitsandbytes") is None:
        return "bitsandbytes is not installed"
    return "" if device == "cuda" else "bitsandbytes is measured on a GPU"


def run(
    setups: tuple[tuple[str, str, str], ...], device: str, tiny: bool, limit: float,
    show: Callable[[str], None] = print,
) -> dict[str, Any]:  # fmt: skip
    """All rows, and the worst error."""
    start, rows, skipped = time.perf_counter(), [], []
    for setup in setups:
        label = " ".join(setup)
        why = absent(setup[1], setup[2], device)
        why = "no time was left" if time.perf_counter() - start > limit else why
        if why:
            skipped.append({"setup": label, "why": why})
            show(f"{label:38} skipped: {why}")
            continue
        try:
            for row in rows_of(*setup, device, tiny):
                rows.append(row)
                within = "within a budget" if "budget" in row else ""
                sizes = (row["predicted"] / 2**30, row["measured"] / 2**30)
                show(
                    f"{label:38} {within:16} {row['layers']:3} layers  predicted {sizes[0]:8.3f}  measured "
                    f"{sizes[1]:8.3f} GiB  {100 * row['error']:+6.2f} %"
                )
        except Exception as error:  # the other set-ups go on, and the table says it
            skipped.append({"setup": label, "why": f"{type(error).__name__}: {error}"})
            show(f"{label:38} failed: {type(error).__name__}: {str(error)[:300]}")
    worst = max((abs(row["error"]) for row in rows), default=0.0)
    below = [row for row in rows if row["error"] < 0]
    passed = [row for row in rows if row["measured"] > row.get("budget", row["measured"])]
    seconds = time.perf_counter() - start
    show(
        f"{len(rows)} rows, worst error {100 * worst:.2f} %, {len(below)} below what was measured, "
        f"{len(passed)} budgets passed, {seconds:.0f} s"
    )
    return {
        "environment": environment(device),
        "rows": rows,
        "skipped": skipped,
        "worst_error": worst,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", default="", help="set-ups whose name contains this")
    parser.add_argument("--tiny", action="store_true", help="a trial at tiny widths")
    parser.add_argument("--time-limit", type=float, default=230.0, metavar="SECONDS")
    parser.add_argument("--json", type=Path, help="write the rows there")
    arguments = parser.parse_args()
    chosen = tuple(setup for setup in SETUPS if arguments.only in " ".join(setup))
    result = run(chosen, arguments.device, arguments.tiny, arguments.time_limit)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
