"""What `auto` does to many architectures: peak memory, GPU time and step time of full training on one GPU.

    python benchmarks/architectures.py --json benchmarks/results/architectures-h200.json
    python benchmarks/architectures.py --autocast --json benchmarks/results/architectures-autocast-h200.json
    python benchmarks/architectures.py --autocast --compile --only BERT ResNet-50
    python benchmarks/architectures.py --autocast --capture --only BERT ResNet-50
    python benchmarks/architectures.py --device cpu --only gpt-2 --layers 1 --batch 1 --length 16   # a trial

Each model has four layers, or all where a vision model counts them by stages, at the widths of its config's
defaults or of a published checkpoint; random weights in bfloat16, or in float32 under autocast, as trainers'
mixed precision has them. Language models have their head and loss.
*Peak* is what a forward and a backward need above weights and gradients. *GPU* is the sum of all kernels'
times, which no host disturbs; *step* is the clock's, in which a GPU may wait for Python. With ``--capture``
each step is also captured in a CUDA graph, and the graph's replays are timed. The unpatched model and its
patched copy take turns.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import timm
import torch
import transformers as hf
from torch import nn
from torch.profiler import ProfilerActivity, profile

from lowmem_patch import patch_model
from lowmem_patch.bench import environment
from lowmem_patch.memory.step import run_step
from lowmem_patch.tracing.inputs import ExampleInputs

VOCABULARY = 32000
TURNS, STEPS, WARM = 3, 3, 3


class Case(NamedTuple):
    """A model and its batch.

    Attributes:
        model: the class of transformers, or a name of timm.
        batch: sequences or images.
        length: tokens of a sequence, or pixels of a side.
        config: the class of its config; empty for timm.
        layers: the config's name for the number of layers; empty: it has none.
        sizes: what differs from the config's defaults.
    """

    model: str
    batch: int
    length: int
    config: str = ""
    layers: str = "num_hidden_layers"
    sizes: dict[str, Any] = {}  # noqa: RUF012  # never written


def causal(
    name: str, batch: int = 4, length: int = 2048, layers: str = "num_hidden_layers", **sizes: Any
) -> Case:
    stem = name.removesuffix("Text")
    sizes = {"vocab_size": VOCABULARY, "use_cache": False, **sizes}
    return Case(f"{stem}ForCausalLM", batch, length, f"{name}Config", layers, sizes)


CASES = {
    "Mistral": causal("Mistral"),
    "Qwen2": causal(
        "Qwen2", hidden_size=1536, intermediate_size=8960, num_attention_heads=12, num_key_value_heads=2
    ),
    "Qwen3": causal(
        "Qwen3", hidden_size=2048, intermediate_size=6144, num_attention_heads=16, num_key_value_heads=8
    ),
    "Gemma 2": causal("Gemma2"),
    "Gemma 3": causal("Gemma3Text"),
    "Phi-3": causal("Phi3", pad_token_id=0, eos_token_id=1, bos_token_id=1),
    "Phi-2": causal("Phi"),
    "OLMo 2": causal("Olmo2"),
    "Cohere 2": causal("Cohere2", hidden_size=4096, intermediate_size=14336, num_attention_heads=32),
    "GLM-4": causal("Glm4", pad_token_id=0),
    "Granite": causal("Granite"),
    "BitNet": causal("BitNet"),
    "SmolLM3": causal("SmolLM3", pad_token_id=0),
    "StarCoder 2": causal("Starcoder2", num_attention_heads=24, num_key_value_heads=2),
    "GPT-NeoX": causal("GPTNeoX", hidden_size=2048, intermediate_size=8192, num_attention_heads=16),
    "OPT": causal("OPT", hidden_size=2048, ffn_dim=8192, num_attention_heads=32, word_embed_proj_dim=2048),
    "GPT-2": Case(
        "GPT2LMHeadModel", 8, 1024, "GPT2Config", "n_layer", {"vocab_size": VOCABULARY, "use_cache": False}
    ),
    "GPT-J": causal("GPTJ", 4, 1024, "n_layer", n_embd=2048, n_head=16, rotary_dim=64),
    "BLOOM": causal("Bloom", 4, 1024, "n_layer", hidden_size=1024, n_head=16),
    "Mixtral": causal(
        "Mixtral", 2, hidden_size=2048, intermediate_size=4096, num_attention_heads=16, num_key_value_heads=8
    ),
    "Qwen3-MoE, 32 experts": causal("Qwen3Moe", 2, num_experts=32),
    "GPT-OSS, 8 experts": causal("GptOss", 1, num_local_experts=8),
    "DeepSeek-V3, 16 experts": causal(
        "DeepseekV3", 2, hidden_size=2048, intermediate_size=4096, moe_intermediate_size=1024,
        n_routed_experts=16, num_attention_heads=16, num_key_value_heads=16, first_k_dense_replace=1,
        n_group=1, topk_group=1, num_experts_per_tok=4,
    ),
    "Llama 4, 8 experts": causal(
        "Llama4Text", 2, hidden_size=2048, intermediate_size=4096, intermediate_size_mlp=8192,
        num_local_experts=8, num_attention_heads=16, num_key_value_heads=8,
    ),
    "Qwen3.5": causal("Qwen3_5Text", 2),
    "Qwen3-Next, 16 experts": causal("Qwen3Next", 2, num_experts=16),
    "Mamba 2": causal("Mamba2", 1, 1024, hidden_size=1024, num_heads=32),
    "BERT": Case("BertModel", 32, 512, "BertConfig"),
    "ModernBERT": Case("ModernBertModel", 32, 512, "ModernBertConfig"),
    "DeBERTa-v3": Case(
        "DebertaV2Model", 16, 512, "DebertaV2Config",
        sizes={"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072,
               "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 256,
               "max_relative_positions": -1},
    ),
    "DINOv2": Case("Dinov2Model", 64, 224, "Dinov2Config"),
    "SigLIP": Case("SiglipVisionModel", 64, 224, "SiglipVisionConfig"),
    "CLIP": Case("CLIPVisionModel", 64, 224, "CLIPVisionConfig"),
    "SegFormer-B0": Case("SegformerModel", 32, 224, "SegformerConfig", ""),
    "Swin v2-T": Case("Swinv2Model", 32, 224, "Swinv2Config", ""),
    "EVA-02-B": Case("eva02_base_patch14_224", 32, 224),
    "ConvNeXt-T": Case("convnext_tiny", 64, 224),
    "MaxViT-T": Case("maxvit_tiny_tf_224", 32, 224),
    "ResNet-50": Case("resnet50", 128, 224),
    "DenseNet-121": Case("densenet121", 128, 224),
    "EfficientNet-B0": Case("efficientnet_b0", 128, 224),
    "MobileNetV2": Case("mobilenetv2_100", 128, 224),
}  # fmt: skip


def build(
    case: Case, device: str, layers: int, dtype: torch.dtype = torch.bfloat16
) -> tuple[nn.Module, ExampleInputs]:
    """The model, which trains, and its inputs."""
    with torch.device(device):
        if case.config:
            counted = {case.layers: layers} if case.layers else {}
            config = getattr(hf, case.config)(**counted, **case.sizes)
            model = getattr(hf, case.model)(config)
        else:
            model = timm.create_model(case.model, num_classes=0)
        if not case.config or model.main_input_name == "pixel_values":
            size = (case.batch, 3, case.length, case.length)
            pixels = torch.randn(size, dtype=dtype)
            given = ((), {"pixel_values": pixels}) if case.config else ((pixels,), {})
        else:
            ids = torch.randint(5, 20000, (case.batch, case.length))
            labels = {"labels": ids} if "LM" in case.model else {}
            given = ((), {"input_ids": ids, **labels})
    return model.to(dtype).train(), ExampleInputs(*given)


def peak_mib(model: nn.Module, inputs: ExampleInputs) -> float:
    """What a step needs above weights and gradients, which are there before."""
    torch.cuda.synchronize()
    resting = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run_step(model, inputs)
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - resting) / 2**20


def gpu_ms(model: nn.Module, inputs: ExampleInputs) -> float:
    """The sum of the times of all kernels that a step launches."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        run_step(model, inputs)
        torch.cuda.synchronize()
    return float(sum(event.self_device_time_total for event in profiled.key_averages()) / 1000)


def step_ms(model: nn.Module, inputs: ExampleInputs, on_gpu: bool) -> float:
    start = time.perf_counter()
    run_step(model, inputs)
    if on_gpu:
        torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1000


def captured(model: nn.Module, inputs: ExampleInputs) -> tuple[torch.cuda.CUDAGraph, float]:
    """A forward and a backward as a CUDA graph, and their peak, as `peak_mib`."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # torch's documentation asks for a warm-up beside the main stream
        for _ in range(WARM):
            run_step(model, inputs)
    torch.cuda.current_stream().wait_stream(side)
    gc.collect()
    torch.cuda.empty_cache()
    resting = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run_step(model, inputs)
    return graph, (torch.cuda.max_memory_allocated() - resting) / 2**20


def replay_ms(graph: torch.cuda.CUDAGraph) -> float:
    start = time.perf_counter()
    graph.replay()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1000


def measure(
    case: Case,
    device: str,
    layers: int,
    *,
    autocast: bool = False,
    compiled: bool = False,
    capture: bool = False,
) -> dict[str, dict[str, float]]:
    torch.manual_seed(0)
    model, inputs = build(case, device, layers, torch.float32 if autocast else torch.bfloat16)
    context = torch.autocast(device, torch.bfloat16, enabled=autocast)
    with context:
        given = inputs.kwargs or inputs.args
        patched = patch_model(copy.deepcopy(model), "auto", example_inputs=given)
    for one in (model, patched):
        if compiled:
            one.forward = torch.compile(one.forward)
        if autocast:  # around each forward, as trainers do: it holds casts of weights until it ends
            one.forward = context(one.forward)
    return measured({"unpatched": model, "auto": patched}, inputs, device == "cuda", capture)


def measured(
    models: Mapping[str, nn.Module], inputs: ExampleInputs, on_gpu: bool, capture: bool = False
) -> dict[str, dict[str, float]]:
    """Peak, GPU time and step time of each model, and of its captured step; on a CPU the step time alone."""
    found: dict[str, dict[str, float]] = {}
    for name, one in models.items():
        for _ in range(WARM if on_gpu else 1):
            run_step(one, inputs)
        found[name] = {}
        if on_gpu:
            found[name] = {"peak_mib": peak_mib(one, inputs), "gpu_ms": gpu_ms(one, inputs)}
    graphs: dict[str, torch.cuda.CUDAGraph] = {}
    for name, one in models.items() if capture else ():
        graphs[name], found[name]["captured_mib"] = captured(one, inputs)
    times: dict[str, list[float]] = {name: [] for name in models}
    replays: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(TURNS if on_gpu else 1):
        for name, one in models.items():
            times[name] += [step_ms(one, inputs, on_gpu) for _ in range(STEPS)]
        for name, graph in graphs.items():
            replays[name] += [replay_ms(graph) for _ in range(STEPS)]
    for name, values in times.items():
        found[name]["step_ms"] = statistics.median(values)
    for name, values in replays.items():
        found[name]["captured_ms"] = statistics.median(values)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="NAME",
        help="only these architectures, or whose names contain it",
    )
    parser.add_argument("--layers", type=int, default=4, help="of those that count them")
    parser.add_argument("--batch", type=int, help="instead of each one's own")
    parser.add_argument("--length", type=int, help="of sequences, instead of each one's own")
    parser.add_argument(
        "--autocast", action="store_true", help="float32 weights, bfloat16 autocast"
    )
    parser.add_argument("--compile", action="store_true", help="torch.compile both")
    parser.add_argument("--capture", action="store_true", help="each step as a CUDA graph as well")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.capture and options.device != "cuda":
        parser.error("--capture needs a GPU: a CPU has no CUDA graphs")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no GPU: give --device cpu for a trial")
    verbosity: Any = hf.logging  # has no types
    verbosity.set_verbosity_error()
    chosen = dict.fromkeys(name for asked in options.only or CASES for name in _named(asked))
    if not chosen:
        parser.error(f"--only {' '.join(options.only)}: known are {', '.join(CASES)}")
    results: dict[str, Any] = {"environment": environment(options.device), "cases": {}}
    for name in chosen:
        case = CASES[name]
        given = case._replace(batch=options.batch or case.batch)
        if options.length and "input_ids" in _inputs_of(case):
            given = given._replace(length=options.length)
        settings = {
            "autocast": options.autocast,
            "compiled": options.compile,
            "capture": options.capture,
        }
        found = measure(given, options.device, options.layers, **settings)
        unit = "tokens" if "input_ids" in _inputs_of(case) else "pixels"
        batch = {"model": given.model, "batch": given.batch, "length": given.length, "unit": unit}
        results["cases"][name] = {**batch, **found}
        was, now = found["unpatched"], found["auto"]
        print(
            f"{name:26}",
            *(f"{k} {was[k]:8.1f} -> {now[k]:8.1f} ({now[k] / was[k]:.2f})" for k in was),
            flush=True,
        )
        if options.json:
            options.json.write_text(json.dumps(results, indent=1) + "\n")
        gc.collect()
        torch.compiler.reset()
        if options.device == "cuda":
            torch.cuda.empty_cache()


def _named(asked: str) -> list[str]:
    """The architecture of this name, or all whose names contain it."""
    lower = {name.lower(): name for name in CASES}
    known = lower.get(asked.lower())
    return [known] if known else [name for low, name in lower.items() if asked.lower() in low]


def _inputs_of(case: Case) -> str:
    return getattr(hf, case.model).main_input_name if case.config else "pixel_values"


if __name__ == "__main__":
    main()
