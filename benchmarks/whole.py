"""Whole training steps of causal LMs: head, loss, backward and fused AdamW, with every tool.

    python benchmarks/whole.py --json benchmarks/results/whole-h200.json     # one GPU
    python benchmarks/whole.py --case qwen --variants unpatched auto liger auto+checkpointing
    python benchmarks/whole.py --device cpu --layers 2 --width 64 --vocabulary 512 --length 16   # a trial

*Step peak* is the most memory of a step above what rests between steps (weights and the optimizer's states);
*predicted* is what ``lowmem-patch inspect`` says of it. Variants are words joined by ``+``: unpatched, exact,
auto, paper, liger, unsloth, compile, checkpointing. Each is measured in a process of its own, since some
tools change their libraries for all models of a process; peers take part where they are installed. The
losses of the first and the last step are kept, so that a variant that computes otherwise is seen.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model

from lowmem_patch.bench import SHAPES, environment, find_variant
from lowmem_patch.bench.measure import Step
from lowmem_patch.config import load_config, preset_names
from lowmem_patch.errors import LowmemPatchError, VariantError
from lowmem_patch.memory import Training, predict_memory
from lowmem_patch.tracing.inputs import ExampleInputs

ROOT = Path(__file__).resolve().parent.parent
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
VARIANTS = (
    "unpatched", "exact", "auto", "liger", "unsloth", "compile", "auto+compile", "unpatched+checkpointing",
    "exact+checkpointing", "auto+checkpointing", "liger+checkpointing", "unsloth+checkpointing",
)  # fmt: skip
WARM_UP = 3


@dataclasses.dataclass(frozen=True)
class Case:
    """One training set-up: a shape, and the rank of its adapters; None trains everything."""

    name: str
    shape: str
    rank: int | None


CASES = (
    Case("Llama-3.1-8B LoRA all", "llama-3.1-8b", 16),
    Case("Qwen2.5-0.5B full", "qwen2.5-0.5b", None),
)


@dataclasses.dataclass(frozen=True)
class Trial:
    """Other sizes than the case's own, for a trial; None leaves one as it is."""

    layers: int | None = None
    width: int | None = None
    vocabulary: int | None = None
    batch: int | None = None
    length: int | None = None


def build(case: Case, trial: Trial) -> Any:
    """The model with random weights, on the device of the context."""
    shape = SHAPES[case.shape]
    layers = trial.layers or shape.layers or 1
    if not trial.width and not trial.vocabulary:
        model: Any = shape.build(layers)
    else:
        with torch.device("meta"):
            small = shape.build(1)
        config: Any = small.config
        config.num_hidden_layers, config.vocab_size = layers, trial.vocabulary or config.vocab_size
        if trial.width:
            config.hidden_size, config.intermediate_size = trial.width, 3 * trial.width
            config.num_attention_heads, config.num_key_value_heads = 4, 2
            config.head_dim = trial.width // 4
        config.layer_types = (
            None if not hasattr(config, "layer_types") else ["full_attention"] * layers
        )
        model = type(small)(config).to(torch.bfloat16)
    model.config.use_cache = False
    return model


def adapted(case: Case, model: Any) -> Any:
    if case.rank is None:
        return model
    config = LoraConfig(r=case.rank, lora_alpha=2 * case.rank, target_modules=LINEARS)
    return get_peft_model(model, config)


def with_liger(model: Any) -> Any:
    """All that Liger has for a model; its rotary kernel goes to all models of the process."""
    try:
        liger = importlib.import_module("liger_kernel.transformers.monkey_patch")
    except ImportError as error:
        raise VariantError("liger-kernel is not installed") from error
    liger._apply_liger_kernel_to_instance(
        model, rope=True, cross_entropy=False, fused_linear_cross_entropy=True
    )
    return model


def with_unsloth(
    make: Callable[[], Any],
    rank: int | None,
    length: int,
    *,
    checkpointing: bool,
    four_bit: bool = False,
) -> Any:
    """Unsloth loads a checkpoint by itself, so it gets one of what ``make`` makes on the GPU; then it puts
    LoRA on all Linears, where there is a rank."""
    try:
        unsloth: Any = importlib.import_module("unsloth")
    except ImportError as error:
        raise VariantError("unsloth is not installed") from error
    with tempfile.TemporaryDirectory() as folder:
        with torch.device("cuda"):
            model = make()
        model.save_pretrained(folder)
        _write_tokenizer(Path(folder), model.config.vocab_size)
        del model
        gc.collect()
        torch.cuda.empty_cache()
        model, _ = unsloth.FastLanguageModel.from_pretrained(
            folder, max_seq_length=length, dtype=torch.bfloat16, load_in_4bit=four_bit,
            full_finetuning=rank is None,
        )  # fmt: skip
    if rank is None:
        return model
    return unsloth.FastLanguageModel.get_peft_model(
        model, r=rank, lora_alpha=2 * rank, target_modules=LINEARS,
        use_gradient_checkpointing="unsloth" if checkpointing else False,
    )  # fmt: skip


def _write_tokenizer(folder: Path, vocabulary: int) -> None:
    tokenizers: Any = importlib.import_module("tokenizers")
    transformers: Any = importlib.import_module("transformers")
    words = {f"w{number}": number for number in range(min(vocabulary, 1000))} | {"<unk>": 1000}
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, unk_token="<unk>", pad_token="<unk>", eos_token="<unk>"
    )
    tokenizer.save_pretrained(folder)


def made(case: Case, variant: str, trial: Trial, inputs: ExampleInputs, device: str) -> Any:
    """The model that trains, as the words of ``variant`` say."""
    words = variant.split("+")
    length = inputs.kwargs["input_ids"].shape[1]
    if "unsloth" in words:
        again = "checkpointing" in words
        return with_unsloth(
            lambda: build(case, trial), case.rank, length, checkpointing=again
        ).train()
    with torch.device(device):
        model = build(case, trial)
    if "liger" in words:
        model = with_liger(model)
    model = adapted(case, model).to(device).train()
    others = [word for word in words if word != "liger"]
    return find_variant("+".join(others))(model, inputs) if others else model


def measure(case: Case, variant: str, trial: Trial, device: str, steps: int) -> dict[str, Any]:
    """One row: bytes and times of whole steps; ``skipped`` or ``error`` where there is none."""
    try:
        return _measured(case, variant, trial, device, steps)
    except VariantError as error:
        return {"skipped": str(error)}
    except torch.cuda.OutOfMemoryError:
        return {"error": "out of memory"}
    except Exception as error:  # foreign code may raise anything
        return {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}


def _measured(case: Case, variant: str, trial: Trial, device: str, steps: int) -> dict[str, Any]:
    shape = SHAPES[case.shape]
    batch, length = trial.batch or shape.batch, trial.length or shape.length or 1
    torch.manual_seed(0)
    with torch.device("meta"):
        vocabulary = build(case, trial).config.vocab_size
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, vocabulary, (batch, length), generator=generator).to(device)
    inputs = ExampleInputs((), {"input_ids": ids})
    step = Step(made(case, variant, trial, inputs, device), inputs, autocast=False)
    first = step.run()
    for _ in range(WARM_UP - 1):
        step.run()
    memory = step.memory()
    step.run()
    times = [step.milliseconds() for _ in range(steps)]
    low, median, high = statistics.quantiles(times, n=4, method="inclusive")
    return {
        "step_peak_mib": None if memory.peak is None else memory.peak / 2**20,
        "reserved_mib": None if memory.reserved is None else memory.reserved / 2**20,
        "act_mib": memory.act / 2**20,
        "predicted_mib": predicted(case, variant, trial, batch, length),
        "step_ms": median,
        "step_spread_ms": high - low,
        "tokens_per_second": 1000 * batch * length / median,
        "first_loss": float(first),
        "last_loss": float(step.run()),
    }


def predicted(case: Case, variant: str, trial: Trial, batch: int, length: int) -> float | None:
    """The step peak as ``inspect`` predicts it; None of what it knows nothing of."""
    words = set(variant.split("+"))
    presets = words & set(preset_names())
    if words - {"unpatched", "checkpointing", *presets}:
        return None
    with torch.device("meta"):
        model = build(case, trial)
        # without a cache transformers looks whether sequences are packed; fake positions do not tell, so
        # that it makes masks, which real ones do not
        model.config.use_cache = True
        model = adapted(case, model).train()

    def make(rows: int, tokens: int | None) -> ExampleInputs:
        ids = torch.zeros(rows, tokens or length, dtype=torch.long, device="meta")
        return ExampleInputs((), {"input_ids": ids})

    config = load_config(next(iter(presets), "auto"))
    training = Training(checkpointing="checkpointing" in words)
    try:
        report = predict_memory(
            model, config, make, batch_size=batch, length=length, training=training
        )
    except LowmemPatchError:
        return None
    side = report.after if presets else report.before
    # what rests between steps
    held = side.parameters + side.optimizer + side.workspace
    return (side.total - held) / 2**20


def title(case: Case, trial: Trial) -> str:
    """The case, its size, and what part of the model it is."""
    shape = SHAPES[case.shape]
    batch, length = trial.batch or shape.batch, trial.length or shape.length
    part = (
        "other widths, for a trial" if trial.width or trial.vocabulary else shape.part(trial.layers)
    )
    return f"{case.name}, {batch} x {length} tokens ({part})"


def run_apart(case: Case, variant: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """The row of one variant, measured in a process of its own."""
    command = [sys.executable, __file__, "--one", variant, "--case", case.name]
    for name in ("layers", "width", "vocabulary", "batch", "length", "device", "steps"):
        value = getattr(arguments, name)
        command += [f"--{name}", str(value)] if value is not None else []
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "row.json"
        done = subprocess.run(
            [*command, "--json", str(out)], capture_output=True, text=True, check=False,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
        )  # fmt: skip
        if out.exists():
            row: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
            return row
    last = (done.stderr.strip().splitlines() or ["no message"])[-1]
    return {"error": f"the process ended with {done.returncode}: {last[:300]}"}


def show(variant: str, row: dict[str, Any]) -> None:
    if "step_ms" not in row:
        print(f"  {variant:24} {row.get('error') or 'skipped: ' + row['skipped']}", flush=True)
        return
    peak, said = (
        "-" if row[name] is None else f"{row[name]:,.0f}"
        for name in ("step_peak_mib", "predicted_mib")
    )
    print(
        f"  {variant:24} step peak {peak:>7} MiB (predicted {said:>7})  {row['step_ms']:8.1f} ms  "
        f"{row['tokens_per_second']:9,.0f} tokens/s  loss {row['first_loss']:.4f}",
        flush=True,
    )


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", default="", help="only cases whose name contains this")
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--steps", type=int, default=10, help="timed steps, at least 2")
    parser.add_argument("--json", type=Path)
    for name in ("layers", "width", "vocabulary", "batch", "length"):
        parser.add_argument(f"--{name}", type=int, help="instead of the case's own")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    for variant in options.variants:
        own = "+".join(word for word in variant.split("+") if word != "unsloth")
        try:
            find_variant(own or "unpatched")
        except LowmemPatchError as error:
            parser.error(str(error))
    if not any(options.case.lower() in case.name.lower() for case in CASES):
        parser.error(f"--case {options.case!r}: there are {', '.join(case.name for case in CASES)}")
    return options


def main() -> None:
    options = parsed()
    trial = Trial(options.layers, options.width, options.vocabulary, options.batch, options.length)
    cases = [case for case in CASES if options.case.lower() in case.name.lower()]
    if options.one is not None:
        row = measure(cases[0], options.one, trial, options.device, options.steps)
        options.json.write_text(json.dumps(row), encoding="utf-8")
        return
    found = environment(options.device) | {"step": "forward, loss, backward, fused AdamW"}
    results: dict[str, Any] = {"environment": found, "cases": {}}
    if options.json and options.json.exists():  # more variants of the same run
        results["cases"] = json.loads(options.json.read_text(encoding="utf-8"))["cases"]
    for case in cases:
        heading = title(case, trial)
        print(heading, flush=True)
        rows = results["cases"].setdefault(heading, {})
        for variant in options.variants:
            row = run_apart(case, variant, options)
            show(variant, row)
            if "skipped" not in row:
                rows[variant] = row
            if options.json:
                options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
