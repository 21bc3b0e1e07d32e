"""What a step costs the host: Python's time of a forward and a backward, unpatched and patched.

    python benchmarks/host.py --json host.json                  # on one GPU
    python benchmarks/host.py --device cpu --only RoBERTa       # on a CPU its own work is counted, too

Batches are so small that a GPU always waits for Python. The clock stops when the last kernel is launched, not
when it is done. Both models take turns in one process, since other programs slow the host down; the lower
quartile of the turns is shown. Backward runs in the thread of the caller.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import timm
import torch
import transformers as hf
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from lowmem_patch import patch_model
from lowmem_patch.bench import environment

WORDS, BATCH, LENGTH = 1000, 2, 64
TURNS, STEPS, WARM = 12, 6, 2  # the first steps of a turn are not timed
Inputs = Mapping[str, Tensor] | tuple[Tensor, ...]
Built = tuple[nn.Module, Inputs, bool]  # whether it trains under autocast


def _text(name: str, config: Any, autocast: bool = False) -> Built:
    model = getattr(hf, name)(config)
    model.config.use_cache = False
    ids = torch.randint(3, WORDS, (BATCH, LENGTH))
    return model if autocast else model.to(torch.bfloat16), {"input_ids": ids}, autocast


def roberta() -> Built:
    return _text("RobertaModel", hf.RobertaConfig(vocab_size=WORDS), autocast=True)


def vit() -> Built:
    model = VisionTransformer(img_size=32, embed_dim=768, depth=12, num_heads=12, num_classes=0)
    return model, (torch.randn(BATCH, 3, 32, 32),), True


def swin() -> Built:
    model = timm.create_model("swin_tiny_patch4_window7_224", num_classes=0)
    return model, (torch.randn(1, 3, 224, 224),), True


def _images(name: str, batch: int = BATCH) -> Built:
    """A convolutional net of timm, on small images."""
    return timm.create_model(name, num_classes=0), (torch.randn(batch, 3, 64, 64),), True


def qwen() -> Built:
    heads = {"num_attention_heads": 14, "num_key_value_heads": 2, "num_hidden_layers": 12}
    sizes = {"hidden_size": 896, "intermediate_size": 4864, "vocab_size": WORDS}
    return _text("Qwen2Model", hf.Qwen2Config(**sizes, **heads))


def gemma() -> Built:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256}
    sizes = {"hidden_size": 1152, "intermediate_size": 6912, "num_hidden_layers": 12}
    return _text("Gemma3TextModel", hf.Gemma3TextConfig(**sizes, **heads, vocab_size=WORDS))


def glm() -> Built:
    heads = {"num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128}
    sizes = {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 12}
    return _text("GlmModel", hf.GlmConfig(**sizes, **heads, vocab_size=WORDS, pad_token_id=0))


def lfm() -> Built:
    heads = {"num_attention_heads": 16, "num_key_value_heads": 4}
    layers = {"layer_types": ["conv", "conv", "full_attention"] * 4, "num_hidden_layers": 12}
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "vocab_size": WORDS}
    return _text("Lfm2Model", hf.Lfm2Config(**sizes, **heads, **layers))


MODELS: dict[str, Callable[[], Built]] = {
    "RoBERTa-base, 12 layers, autocast": roberta,
    "ViT-B/16, 12 blocks, autocast": vit,
    "Swin-T, 12 blocks, autocast": swin,
    "ConvNeXt-T, 18 blocks, autocast": partial(_images, "convnext_tiny", 1),
    "EfficientNet-B0, 16 blocks, autocast": partial(_images, "efficientnet_b0"),
    "DenseNet-121, 58 layers, autocast": partial(_images, "densenet121"),
    "Qwen2-0.5B, 12 layers": qwen,
    "Gemma-3-1B, 12 layers": gemma,
    "GLM, 12 layers (attention layout)": glm,
    "LFM2, 12 layers (activations as functions)": lfm,
}


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _timed_step(model: nn.Module, inputs: Any, autocast: bool, device: str) -> tuple[float, float]:
    """Seconds of forward and backward."""
    _wait(device)
    start = time.perf_counter()
    with torch.autocast(device, torch.bfloat16, enabled=autocast):
        output = model(**inputs) if isinstance(inputs, Mapping) else model(*inputs)
        loss = (output if isinstance(output, Tensor) else output[0]).float().square().mean()
    middle = time.perf_counter()
    _wait(device)
    again = time.perf_counter()
    loss.backward()
    return middle - start, time.perf_counter() - again


def measure(built: Built, device: str, turns: int = TURNS) -> dict[str, dict[str, float]]:
    """Milliseconds by variant: ``forward_ms`` and ``backward_ms``."""
    model, inputs, autocast = built
    model = model.to(device).train()
    given: Any
    if isinstance(inputs, Mapping):
        given = {name: tensor.to(device) for name, tensor in inputs.items()}
    else:
        given = tuple(tensor.to(device) for tensor in inputs)
    patched = patch_model(copy.deepcopy(model), "exact", example_inputs=given)
    variants = {"unpatched": model, "exact": patched}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in variants}
    with torch.autograd.set_multithreading_enabled(False):
        for turn in range(turns + 1):
            for name, one in variants.items():
                parameters = list(one.parameters())
                for step in range(STEPS):
                    found = _timed_step(one, given, autocast, device)
                    with torch.no_grad():
                        torch._foreach_add_(parameters, 0.0)  # an optimizer's step
                    one.zero_grad()
                    if turn and step >= WARM:
                        times[name].append(found)
    return {name: _quartiles(pairs) for name, pairs in times.items()}


def _quartiles(pairs: list[tuple[float, float]]) -> dict[str, float]:
    names = ("forward_ms", "backward_ms")
    return {
        name: round(statistics.quantiles(seconds, n=4)[0] * 1e3, 2)
        for name, seconds in zip(names, zip(*pairs, strict=True), strict=True)
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--only", default="", help="only models whose name contains this")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results: dict[str, Any] = {"environment": environment(options.device), "models": {}}
    for name, build in MODELS.items():
        if options.only not in name:
            continue
        torch.manual_seed(0)
        row = results["models"][name] = measure(build(), options.device)
        stock, exact = (sum(row[variant].values()) for variant in ("unpatched", "exact"))
        print(f"{name:45} unpatched {stock:6.2f} ms  exact {exact:6.2f} ms  {row}", flush=True)
        if options.json:
            options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
