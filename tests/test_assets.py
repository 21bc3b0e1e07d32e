"""The bundled models are what their cards say: trained, stock, small, and with norms that moved."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
import timm
import torch
import transformers
from torch import nn

from lowmem_patch import demo

FOLDERS = (demo.LLAMA_FOLDER, demo.VIT_FOLDER)


def card_number(folder: Path, pattern: str) -> float:
    """A number that the model card states."""
    match = re.search(pattern, (folder / "README.md").read_text(encoding="utf-8"))
    assert match is not None
    return float(match.group(1))


def norm_parameters(model: nn.Module, kind: str) -> torch.Tensor:
    named = model.named_parameters()
    return torch.cat([p.detach().flatten() for n, p in named if "norm" in n and n.endswith(kind)])


@pytest.fixture(scope="module")
def llama() -> transformers.LlamaForCausalLM:
    return demo.load_demo_llama()


@pytest.fixture(scope="module")
def vit() -> nn.Module:
    return demo.load_demo_vit()


@pytest.mark.slow
def test_llama_scores_what_its_card_says(llama: transformers.LlamaForCausalLM) -> None:
    stated = card_number(demo.LLAMA_FOLDER, r"bits per byte \| ([\d.]+)")
    assert stated < 2.5
    # Every sixteenth of the held-out batches, on whatever Python runs: a few per cent from the card.
    batches = demo.text_batches(demo.standard_library_text(held_out=True))[::16]
    assert demo.bits_per_byte(llama, batches) == pytest.approx(stated, rel=0.1)


def test_vit_scores_what_its_card_says(vit: nn.Module) -> None:
    stated = card_number(demo.VIT_FOLDER, r"accuracy \| ([\d.]+)%") / 100
    assert stated > 0.95
    pixels, labels = demo.held_out_digits()
    # The data are the same everywhere; one image may tip with another machine's rounding.
    assert demo.accuracy(vit, pixels, labels) == pytest.approx(stated, abs=1.5 / len(pixels))


def test_held_out_digits_are_every_fifth() -> None:
    datasets = pytest.importorskip("sklearn.datasets")
    digits = datasets.load_digits()
    pixels, labels = demo.held_out_digits()
    assert torch.equal(pixels, demo.digit_pixels(torch.from_numpy(digits.images[::5])))
    assert torch.equal(labels, torch.from_numpy(digits.target[::5]).long())


def test_held_out_sources_are_not_trained_on() -> None:
    held_out = set(demo.standard_library_files(held_out=True))
    trained_on = set(demo.standard_library_files(held_out=False))
    assert held_out and trained_on and not held_out & trained_on


@pytest.mark.parametrize("name", ["llama", "vit"])
def test_norms_have_left_their_initial_values(name: str, request: pytest.FixtureRequest) -> None:
    model = request.getfixturevalue(name)
    gamma = norm_parameters(model, "weight")
    assert (gamma - 1).abs().mean() > 0.1
    assert gamma.max() - gamma.min() > 0.5
    if name == "vit":
        beta = norm_parameters(model, "bias")
        assert beta.abs().mean() > 0.02
        assert beta.abs().max() > 0.2


@pytest.mark.parametrize("name", ["llama", "vit"])
def test_forgetting_gamma_would_be_seen(name: str, request: pytest.FixtureRequest) -> None:
    """What the models are for: norms without their affine give another, worse function."""
    source = request.getfixturevalue(name)
    model = demo.load_demo_llama() if name == "llama" else demo.load_demo_vit()
    model.load_state_dict(source.state_dict())
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "norm" in key:
                parameter.fill_(1.0 if key.endswith("weight") else 0.0)
    if name == "llama":
        batches = demo.text_batches(demo.standard_library_text(held_out=True))[:2]
        assert demo.bits_per_byte(model, batches) > demo.bits_per_byte(source, batches) + 0.1
    else:
        pixels, labels = demo.held_out_digits()
        assert demo.accuracy(model, pixels, labels) < demo.accuracy(source, pixels, labels) - 0.02


def test_llama_loads_as_any_checkpoint_does() -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(demo.LLAMA_FOLDER)
    model = transformers.AutoModelForCausalLM.from_pretrained(demo.LLAMA_FOLDER)
    assert model.dtype == torch.bfloat16
    text = "def naïve(x):\n\treturn '€'  # 日本"
    token_ids = tokenizer(text)["input_ids"]
    assert bytes(token_ids) == text.encode()
    assert tokenizer.decode(token_ids) == text
    prompt = tokenizer("import ", return_tensors="pt")
    generated = model.generate(**prompt, max_new_tokens=4, do_sample=False)
    assert generated.shape == (1, len("import ") + 4)


def test_vit_loads_as_any_timm_model_does() -> None:
    model = timm.create_model(f"local-dir:{demo.VIT_FOLDER}", pretrained=True)
    assert model(torch.zeros(2, 1, 8, 8)).shape == (2, 10)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_card_says_where_the_model_is_from(folder: Path) -> None:
    card = (folder / "README.md").read_text(encoding="utf-8")
    for fact in ("held-out split", "seed 0", "train_demo_models.py", "| date |", "| versions |"):
        assert fact in card


@pytest.mark.slow
@pytest.mark.parametrize("task", demo.demo_tasks(), ids=lambda task: task.name)
def test_a_patched_model_saves_less_and_learns_as_much(task: demo.DemoTask) -> None:
    few_steps = dataclasses.replace(task, train_batches=task.train_batches[:8])
    result = demo.compare(few_steps, "exact")
    assert result.patched.saved.activations < 0.7 * result.stock.saved.activations
    for run in (result.stock, result.patched):
        gain = run.score_after - run.score_before
        assert gain > 0.05 if task.score_name == "accuracy" else gain < -0.2
    assert result.patched.losses[:5] == pytest.approx(result.stock.losses[:5], rel=1e-3)
