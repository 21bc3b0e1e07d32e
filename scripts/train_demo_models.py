"""Train the two small models under lowmem_patch/assets from nothing: ``llama``, ``vit`` or both.

    python scripts/train_demo_models.py [--only llama|vit] [--threads 2]

The models are small enough to ship and to patch within a second on a CPU, yet trained: their norms
have left 1 and 0, so a fold or a share that forgot gamma or beta gives visibly wrong outputs.
Needs the ``test`` extra (scikit-learn holds the digits). About ten minutes on two cores.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import platform
import time
from collections.abc import Callable
from pathlib import Path

import numpy
import safetensors.torch
import sklearn
import sklearn.datasets
import timm
import tokenizers
import torch
import transformers
from torch import Tensor, nn

from lowmem_patch import demo

SEED = 0
LLAMA_STEPS, LLAMA_BATCH, LLAMA_LENGTH = 2200, 8, 256
VIT_STEPS, VIT_BATCH = 2500, 64
COMMAND = "python scripts/train_demo_models.py"

LLAMA_CARD = """\
# tiny-llama: a byte-level LLaMA on Python's standard library

{parameters:,} parameters in bfloat16, {layers} layers, width {width}: `LlamaForCausalLM`, made to show and
test lowmem-patch, not to write code.

| what | value |
|---|---|
| held-out bits per byte | {score:.3f} (8 is a blind guess, {order0:.2f} the order-0 entropy) |
| held-out split | the {files} sources directly in the standard library with crc32(file name) % 10 == 0 |
| trained on | the other sources directly in the standard library, {megabytes:.1f} MB, Python {python} |
| norms | gamma from {gamma_low:.3f} to {gamma_high:.3f}, smallest absolute value {gamma_small:.3f} |
| training | {steps} steps of {batch} x {length} bytes, seed {seed}, {seconds:.0f} s, {threads} CPU threads |
| command | `{command} --only llama` |
| date | {date} |
| versions | torch {torch}, transformers {transformers} |

The training text is under the Python Software Foundation License; the weights are under Apache-2.0.
Token ids 0 to 255 are the bytes themselves.
"""

VIT_CARD = """\
# tiny-vit: a ViT on 8 x 8 handwritten digits

{parameters:,} parameters in bfloat16, {layers} blocks, width {width}: timm's `vit_small_patch16_224` with
smaller arguments, made to show and test lowmem-patch.

| what | value |
|---|---|
| held-out accuracy | {score:.1%} ({right} of {images}) |
| held-out split | every fifth image of scikit-learn's digits, index % 5 == 0; stored beside the weights |
| trained on | the other {train_images} images, each turned, scaled and shifted a little |
| norms | gamma from {gamma_low:.3f} to {gamma_high:.3f}, smallest absolute value {gamma_small:.3f}, \
beta from {beta_low:.3f} to {beta_high:.3f} |
| training | {steps} steps of {batch} images, seed {seed}, {seconds:.0f} s on {threads} CPU threads |
| command | `{command} --only vit` |
| date | {date} |
| versions | torch {torch}, timm {timm}, scikit-learn {sklearn} |

The images are from "Optical Recognition of Handwritten Digits" (E. Alpaydin, C. Kaynak, 1998, UCI
Machine Learning Repository, CC BY 4.0). The weights are under Apache-2.0.
"""


def optimizer_for(model: nn.Module, *, rate: float, norm_rate: float) -> torch.optim.AdamW:
    """AdamW with decay on matrices alone, and a higher rate for the norms so that they move."""
    groups: dict[str, list[nn.Parameter]] = {"matrix": [], "norm": [], "rest": []}
    for name, parameter in model.named_parameters():
        kind = "norm" if "norm" in name else "matrix" if parameter.dim() > 1 else "rest"
        groups[kind].append(parameter)
    return torch.optim.AdamW(
        [
            {"params": groups["matrix"], "lr": rate, "weight_decay": 0.1},
            {"params": groups["norm"], "lr": norm_rate, "weight_decay": 0.0},
            {"params": groups["rest"], "lr": rate, "weight_decay": 0.0},
        ],
        betas=(0.9, 0.98),
    )


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    next_loss: Callable[[], Tensor],
    *,
    steps: int,
    warmup: int = 100,
) -> float:
    """Run ``steps`` steps with linear warm-up and cosine decay; returns the seconds they took."""

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup)))

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    model.train()
    start = time.perf_counter()
    for step in range(steps):
        loss = next_loss()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        if step % 100 == 99:
            elapsed = time.perf_counter() - start
            print(f"  step {step + 1:5d}  loss {loss.item():.3f}  {elapsed:.0f} s", flush=True)
    return time.perf_counter() - start


def norm_ranges(model: nn.Module) -> dict[str, float]:
    """How far the norms have moved: the lowest and highest gamma and beta."""
    named = dict(model.named_parameters())
    gamma = torch.cat([p.float() for n, p in named.items() if "norm" in n and n.endswith("weight")])
    ranges = {
        "gamma_low": gamma.min().item(),
        "gamma_high": gamma.max().item(),
        "gamma_small": gamma.abs().min().item(),
    }
    betas = [p.float() for n, p in named.items() if "norm" in n and n.endswith("bias")]
    if betas:
        beta = torch.cat(betas)
        ranges |= {"beta_low": beta.min().item(), "beta_high": beta.max().item()}
    return ranges


def byte_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """A byte-level tokenizer without merges, whose ids 0 to 255 are the bytes themselves."""
    # GPT-2's table: printable bytes stand for themselves, the others for letters from 256 upwards.
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    vocabulary = {chr(byte): byte for byte in printable}
    vocabulary |= {chr(256 + rank): byte for rank, byte in enumerate(others)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
    )


def common_facts(model: nn.Module, seconds: float, threads: int) -> dict[str, object]:
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "seed": SEED,
        "seconds": seconds,
        "threads": threads,
        "command": COMMAND,
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
        "torch": torch.__version__.split("+")[0],
        **norm_ranges(model),
    }


def train_llama(folder: Path, threads: int) -> None:
    sources = demo.standard_library_text(held_out=False)
    stream = torch.frombuffer(bytearray(sources), dtype=torch.uint8).long()
    tokenizer = byte_tokenizer()
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=344,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(SEED)
    model = transformers.LlamaForCausalLM(config)
    offsets = torch.arange(LLAMA_LENGTH)

    def next_loss() -> Tensor:
        starts = torch.randint(len(stream) - LLAMA_LENGTH, (LLAMA_BATCH, 1))
        batch = stream[starts + offsets]
        return model(input_ids=batch, labels=batch, use_cache=False).loss

    optimizer = optimizer_for(model, rate=4e-3, norm_rate=4e-3)
    seconds = train(model, optimizer, next_loss, steps=LLAMA_STEPS)
    model = model.to(torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)

    model = demo.load_demo_llama()
    counts = numpy.bincount(numpy.frombuffer(sources, dtype=numpy.uint8), minlength=256)
    shares = counts[counts > 0] / counts.sum()
    facts = common_facts(model, seconds, threads) | {
        "layers": config.num_hidden_layers,
        "width": config.hidden_size,
        "score": demo.bits_per_byte(
            model, demo.text_batches(demo.standard_library_text(held_out=True))
        ),
        "order0": float(-(shares * numpy.log2(shares)).sum()),
        "files": len(demo.standard_library_files(held_out=True)),
        "megabytes": len(sources) / 1e6,
        "steps": LLAMA_STEPS,
        "batch": LLAMA_BATCH,
        "length": LLAMA_LENGTH,
        "transformers": transformers.__version__,
    }
    (folder / "README.md").write_text(LLAMA_CARD.format(**facts), encoding="utf-8")
    print(LLAMA_CARD.format(**facts))


def moved_a_little(pixels: Tensor) -> Tensor:
    """Each image turned by up to 9 degrees, scaled by up to 8 % and shifted by under a pixel."""
    count = len(pixels)

    def spread(limit: float) -> Tensor:
        return (torch.rand(count) * 2 - 1) * limit

    angle, scale = spread(math.pi / 20), 1 + spread(0.08)
    cosine, sine = angle.cos() * scale, angle.sin() * scale
    # affine_grid's coordinates run from -1 to 1 over 8 pixels, so a pixel is a quarter.
    rows = [cosine, -sine, spread(0.2), sine, cosine, spread(0.2)]
    grid = nn.functional.affine_grid(
        torch.stack(rows, dim=1).view(count, 2, 3), list(pixels.shape), align_corners=False
    )
    # Empty is -1, and grid_sample fills with 0, so shift the grey levels to start at 0 and back.
    return nn.functional.grid_sample(pixels + 1, grid, align_corners=False) - 1


def train_vit(folder: Path, threads: int) -> None:
    digits = sklearn.datasets.load_digits()
    images = torch.from_numpy(digits.images).to(torch.uint8)
    labels = torch.from_numpy(digits.target).to(torch.uint8)
    held_out = torch.arange(len(images)) % 5 == 0
    safetensors.torch.save_file(
        {"images": images[held_out].contiguous(), "labels": labels[held_out].contiguous()},
        folder / "held_out.safetensors",
    )
    train_pixels = demo.digit_pixels(images[~held_out])
    train_labels = labels[~held_out].long()

    architecture = "vit_small_patch16_224"
    arguments = {
        "img_size": 8,
        "patch_size": 2,
        "in_chans": 1,
        "embed_dim": 64,
        "depth": 4,
        "num_heads": 4,
    }
    torch.manual_seed(SEED)
    model = timm.create_model(architecture, num_classes=10, **arguments)

    def next_loss() -> Tensor:
        rows = torch.randint(len(train_pixels), (VIT_BATCH,))
        logits = model(moved_a_little(train_pixels[rows]))
        return nn.functional.cross_entropy(logits, train_labels[rows], label_smoothing=0.05)

    optimizer = optimizer_for(model, rate=1e-3, norm_rate=4e-3)
    seconds = train(model, optimizer, next_loss, steps=VIT_STEPS)

    weights = {name: value.to(torch.bfloat16) for name, value in model.state_dict().items()}
    safetensors.torch.save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architecture": architecture,
        "num_classes": 10,
        "num_features": model.num_features,
        "model_args": arguments,
        "pretrained_cfg": {
            "input_size": [1, 8, 8],
            "fixed_input_size": True,
            "interpolation": "bicubic",
            "crop_pct": 1.0,
            "mean": [0.5],
            "std": [0.5],
            "num_classes": 10,
            "first_conv": "patch_embed.proj",
            "classifier": "head",
            "license": "apache-2.0",
        },
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

    model = demo.load_demo_vit()
    pixels, held_labels = demo.held_out_digits()
    score = demo.accuracy(model, pixels, held_labels)
    facts = common_facts(model, seconds, threads) | {
        "layers": arguments["depth"],
        "width": arguments["embed_dim"],
        "score": score,
        "right": round(score * len(pixels)),
        "images": len(pixels),
        "train_images": len(train_pixels),
        "steps": VIT_STEPS,
        "batch": VIT_BATCH,
        "timm": timm.__version__,
        "sklearn": sklearn.__version__,
    }
    (folder / "README.md").write_text(VIT_CARD.format(**facts), encoding="utf-8")
    print(VIT_CARD.format(**facts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=["llama", "vit"])
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for name, folder, job in (
        ("vit", demo.VIT_FOLDER, train_vit),
        ("llama", demo.LLAMA_FOLDER, train_llama),
    ):
        if options.only in (None, name):
            print(f"training tiny-{name}", flush=True)
            folder.mkdir(parents=True, exist_ok=True)
            job(folder, options.threads)


if __name__ == "__main__":
    main()
