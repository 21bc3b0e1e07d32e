"""head: logits that are computed where they are read, and losses that never read them whole."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    BartConfig,
    BertConfig,
    CohereConfig,
    Gemma2Config,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    T5Config,
)

from lowmem_patch import patch_model, patch_report, plan_patch, saved_bytes, unpatch_model
from lowmem_patch.functional import head as chunks
from tests.support.configs import KEEP
from tests.support.judge import assert_accurate, assert_rounded
from tests.support.models import randomise
from tests.support.step import MODES, Mode, StayInFloat64, Step, cast

CLASSES = 160
IDS = torch.randint(3, CLASSES, (2, 24), generator=torch.Generator().manual_seed(2))
SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2,
    "vocab_size": CLASSES, "use_cache": False,
}  # fmt: skip
HEAD = {**KEEP, "attention": "keep", "head": "chunked"}
Loss = Callable[[Any], Tensor]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "_ROWS", 16)


def llama(tied: bool = False) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, num_key_value_heads=2, tie_word_embeddings=tied)
    return randomise(LlamaForCausalLM(config)).train()


def run(model: Any, loss_of: Loss, mode: Mode = MODES["fp32"]) -> Step:
    model.zero_grad()
    torch.manual_seed(0)
    with torch.autocast("cpu", mode.autocast, enabled=mode.autocast is not None):
        loss = loss_of(model)
    loss.backward()
    named = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return Step([loss.detach()], named)


def truth(model: Any, loss_of: Loss) -> Step:
    with StayInFloat64():
        return run(cast(copy.deepcopy(model), torch.float64), loss_of)


def logits_of(model: Any) -> Tensor:
    logits: Tensor = model(input_ids=IDS).logits
    return logits


def whole_reads(model: Any) -> int:
    """How often logits were computed whole, as the report says it."""
    notes = [note for note in patch_report(model).notes if "computed whole" in note]
    return sum(int(note.split("computed whole ")[1].split()[0]) for note in notes)


def weights_of(labels: Tensor) -> Tensor:
    return torch.linspace(0.5, 1.5, labels.numel())


# each never needs logits whole
FUSED: dict[str, Loss] = {
    "the model's own": lambda m: m(input_ids=IDS, labels=IDS).loss,
    "num_items_in_batch": lambda m: (
        m(input_ids=IDS, labels=IDS, num_items_in_batch=torch.tensor(40)).loss
    ),
    "shift_labels": lambda m: m(input_ids=IDS, labels=IDS, shift_labels=IDS.roll(-1, 1)).loss,
    "a user's own": lambda m: F.cross_entropy(
        logits_of(m)[:, :-1].reshape(-1, CLASSES), IDS[:, 1:].reshape(-1)
    ),
    "transposed": lambda m: F.cross_entropy(logits_of(m).transpose(1, 2).float(), IDS),
    "permuted": lambda m: F.cross_entropy(logits_of(m).permute(0, 2, 1), IDS),
    "CrossEntropyLoss": lambda m: nn.CrossEntropyLoss(label_smoothing=0.1)(
        logits_of(m).flatten(0, 1), IDS.flatten()
    ),
    "class weights": lambda m: F.cross_entropy(
        logits_of(m).view(-1, CLASSES),
        IDS.view(-1),
        weight=torch.linspace(0, 1, CLASSES).to(m.lm_head.weight),
    ),
    "sum": lambda m: (
        F.cross_entropy(logits_of(m).view(-1, CLASSES), IDS.view(-1), reduction="sum") / 7
    ),
    "none": lambda m: (
        F.cross_entropy(logits_of(m).view(-1, CLASSES), IDS.view(-1), reduction="none")
        * weights_of(IDS)
    ).sum(),
    "ignored rows": lambda m: F.cross_entropy(
        logits_of(m).view(-1, CLASSES), torch.where(IDS > 60, IDS, -100).view(-1)
    ),
    "soft cap": lambda m: F.cross_entropy(
        (torch.tanh(logits_of(m) / 30) * 30).float().view(-1, CLASSES), IDS.view(-1)
    ),
    "scale": lambda m: F.cross_entropy((logits_of(m) * 0.5).view(-1, CLASSES), IDS.view(-1)),
    "a bias added": lambda m: F.cross_entropy(
        (logits_of(m) + torch.arange(CLASSES) / CLASSES).view(-1, CLASSES), IDS.view(-1)
    ),
    "z-loss": lambda m: (
        lambda y: (
            F.cross_entropy(y.view(-1, CLASSES), IDS.view(-1))
            + 1e-2 * y.logsumexp(-1).square().mean()
        )
    )(logits_of(m)),
    "nll_loss": lambda m: F.nll_loss(logits_of(m).log_softmax(-1).view(-1, CLASSES), IDS.view(-1)),
    "log_softmax, gather": lambda m: (
        -torch.gather(F.log_softmax(logits_of(m), -1), -1, IDS.unsqueeze(-1)).mean()
    ),
    "row by row": lambda m: (
        torch.stack(
            [
                F.log_softmax(row, -1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
                for row, labels in zip(logits_of(m), IDS, strict=True)
            ]
        )
        .square()
        .mean()
    ),
    "gather less logsumexp": lambda m: (
        lambda y: (
            (
                y.gather(-1, IDS.unsqueeze(-1)).squeeze(-1)
                - torch.stack([torch.logsumexp(row, -1) for row in y])
            )
            .square()
            .mean()
        )
    )(logits_of(m)),
    "Trainer's label smoother": lambda m: (
        lambda p: (
            p.gather(-1, IDS.unsqueeze(-1)).mean()
            + 0.1
            * p.sum(dim=-1, keepdim=True, dtype=torch.promote_types(p.dtype, torch.float32)).mean()
        )
    )(-F.log_softmax(logits_of(m), dim=-1)),
    "loss and accuracy": lambda m: (
        lambda y: (
            F.cross_entropy(y.view(-1, CLASSES), IDS.view(-1))
            + 0 * (y.argmax(-1) == IDS).float().mean()
        )
    )(logits_of(m)),
    "a vocabulary without its padding": lambda m: F.cross_entropy(
        logits_of(m)[..., :150].reshape(-1, 150), IDS.view(-1) % 150
    ),
    "two losses of halves": lambda m: (
        lambda y: sum(
            F.cross_entropy(half.reshape(-1, CLASSES), IDS.chunk(2)[n].reshape(-1))
            for n, half in enumerate(y.chunk(2))
        )
    )(logits_of(m)),
}
# each is read whole, and right
READ: dict[str, Loss] = {
    "squares": lambda m: logits_of(m).square().mean(),
    "soft targets": lambda m: F.cross_entropy(
        logits_of(m).view(-1, CLASSES), F.one_hot(IDS, CLASSES).float().view(-1, CLASSES)
    ),
    "a hook": lambda m: (
        lambda y: (
            y.register_hook(lambda g: g * 2),
            F.cross_entropy(y.view(-1, CLASSES), IDS.view(-1)),
        )[1]
    )(logits_of(m)),
    "a write in place": lambda m: (
        lambda y: (
            y.__setitem__((slice(None), slice(None), slice(0, 9)), -5.0),
            F.cross_entropy(y.view(-1, CLASSES), IDS.view(-1)),
        )[1]
    )(logits_of(m)),
    "every other class": lambda m: F.cross_entropy(
        logits_of(m)[..., ::2].reshape(-1, 80), IDS.view(-1) % 80
    ),
    "softmax": lambda m: logits_of(m).softmax(-1).square().sum(),
    "a learned temperature": lambda m: F.cross_entropy(
        (logits_of(m) * torch.tensor(0.5)).view(-1, CLASSES), IDS.view(-1)
    ),
    "cross entropy and a read": lambda m: (
        lambda y: F.cross_entropy(y.view(-1, CLASSES), IDS.view(-1)) + y.square().mean()
    )(logits_of(m)),
}


@pytest.mark.parametrize("name", FUSED)
def test_a_loss_is_torchs_and_never_reads_logits_whole(name: str) -> None:
    model = llama()
    patched = patch_model(copy.deepcopy(model), HEAD)
    loss = FUSED[name]
    assert_accurate(run(patched, loss), run(model, loss), truth(model, loss))
    assert whole_reads(patched) == 0
    with saved_bytes(model) as before:
        keep = loss(model)
    with saved_bytes(patched) as after:
        keep = loss(patched)
    del keep
    logits = IDS.numel() * CLASSES * 4
    assert after.activations <= before.activations - logits * 0.7


@pytest.mark.parametrize("name", READ)
def test_who_else_reads_logits_gets_them(name: str) -> None:
    model = llama()
    patched = patch_model(copy.deepcopy(model), HEAD)
    loss = READ[name]
    assert_accurate(run(patched, loss), run(model, loss), truth(model, loss))
    assert whole_reads(patched) == 1


@pytest.mark.parametrize("mode", ["bf16", "autocast"])
@pytest.mark.parametrize(
    "name", ["the model's own", "a user's own", "none", "log_softmax, gather", "soft cap"]
)
def test_in_low_precision(name: str, mode: str) -> None:
    model = cast(llama(), MODES[mode].weights)
    patched = patch_model(copy.deepcopy(model), HEAD)
    loss = FUSED[name]
    found, own = (run(m, loss, MODES[mode]) for m in (patched, model))
    assert found.output.dtype == own.output.dtype
    assert_accurate(found, own, truth(model, loss), MODES[mode])
    assert whole_reads(patched) == 0


TINY: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
TINY |= {"num_hidden_layers": 2, "vocab_size": CLASSES, "pad_token_id": 0, "bos_token_id": 1}
TINY |= {"eos_token_id": 2}
WIDTHS: dict[str, Any] = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "vocab_size": CLASSES,
}  # fmt: skip
ARCHITECTURES: dict[str, tuple[Any, Any]] = {
    "qwen2, tied": (AutoModelForCausalLM, Qwen2Config(**TINY, num_key_value_heads=2)),
    "gemma2, soft cap": (AutoModelForCausalLM, Gemma2Config(**TINY, num_key_value_heads=2, head_dim=8)),
    "granite, divided": (
        AutoModelForCausalLM, GraniteConfig(**TINY, num_key_value_heads=2, logits_scaling=3.0)
    ),
    "cohere, scaled": (AutoModelForCausalLM, CohereConfig(**TINY, num_key_value_heads=2)),
    "gpt2": (AutoModelForCausalLM, GPT2Config(n_embd=32, n_head=4, n_layer=2, vocab_size=CLASSES,
        bos_token_id=1, eos_token_id=2, loss_type="ForCausalLMLoss")),
    "bert, masked": (AutoModelForMaskedLM, BertConfig(**TINY)),
    "t5": (AutoModelForSeq2SeqLM, T5Config(d_model=32, d_ff=64, num_heads=4, d_kv=8, num_layers=2,
        vocab_size=CLASSES, decoder_start_token_id=0)),
    "bart, a bias added": (AutoModelForSeq2SeqLM, BartConfig(**WIDTHS)),
}  # fmt: skip


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_any_architectures_own_loss(name: str) -> None:
    make, config = ARCHITECTURES[name]
    torch.manual_seed(0)
    model = randomise(make.from_config(config)).eval()  # without dropouts
    patched = patch_model(copy.deepcopy(model), "exact")
    labels = IDS if "masked" not in name else torch.where(IDS < 40, IDS, -100)

    def loss(m: Any) -> Tensor:
        value: Tensor = m(input_ids=IDS, labels=labels).loss
        return value

    assert_accurate(run(patched, loss), run(model, loss), truth(model, loss))
    assert whole_reads(patched) == 0


@pytest.mark.parametrize("trains", ["all", "head", "body"])
@pytest.mark.parametrize("tied", [False, True])
def test_whatever_trains(trains: str, tied: bool) -> None:
    model = llama(tied)
    for name, parameter in model.named_parameters():
        in_head = name.startswith("lm_head") or (tied and "embed" in name)
        parameter.requires_grad_(trains == "all" or (trains == "head") is in_head)
    patched = patch_model(copy.deepcopy(model), "exact")
    loss = FUSED["the model's own"]
    assert_accurate(run(patched, loss), run(model, loss), truth(model, loss))


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("where", ["lora on the head", "the head saved", "neither"])
@pytest.mark.parametrize("order", ["adapters first", "patch first"])
@pytest.mark.parametrize("preset", ["exact", "auto"])
def test_adapters(where: str, order: str, preset: str) -> None:
    def adapted(model: Any) -> Any:
        targets = ["q_proj", "down_proj", *(["lm_head"] if where == "lora on the head" else [])]
        saved = ["lm_head"] if where == "the head saved" else None
        torch.manual_seed(1)
        config = LoraConfig(
            r=4, target_modules=targets, modules_to_save=saved, init_lora_weights=False
        )
        return get_peft_model(model, config).train()

    model = adapted(llama())
    if order == "adapters first":
        patched = patch_model(copy.deepcopy(model), preset)
    else:
        patched = adapted(patch_model(llama(), preset))
    with torch.no_grad():
        for ours, theirs in zip(patched.parameters(), model.parameters(), strict=True):
            ours.copy_(theirs)
    loss = FUSED["the model's own"]
    with pytest.warns(UserWarning) if order == "patch first" else _nothing():
        found = run(patched, loss)
    assert_accurate(found, run(model, loss), truth(model, loss))
    if order == "adapters first":
        assert whole_reads(patched) == 0


def _nothing() -> Any:
    import contextlib

    return contextlib.nullcontext()


def test_saved_is_the_heads_input_and_its_gradient() -> None:
    model = llama()
    patched = patch_model(copy.deepcopy(model), "exact")
    with saved_bytes(patched) as without:
        keep: Any = patched(input_ids=IDS)
    with saved_bytes(patched) as with_loss:
        keep = patched(input_ids=IDS, labels=IDS)
    del keep
    rows = IDS.numel()
    expected = rows * 8 + rows * 32 * 4  # the labels, and the gradient
    assert with_loss.activations - without.activations == expected
    assert with_loss.by_kind["head and loss"] == expected


def test_the_whole_model_is_at_its_floor() -> None:
    report = plan_patch(llama(), "exact", example_inputs={"input_ids": IDS, "labels": IDS})
    labels, tokens = IDS.numel() * 8, IDS.numel() * 8
    tables = 2 * 24 * 8 * 4  # cos and sin
    assert report.saved_after == report.floor + labels + tokens + tables


def test_logits_are_a_tensor_to_whoever_asks() -> None:
    model = llama()
    patched = patch_model(copy.deepcopy(model), HEAD)
    own, logits = logits_of(model), logits_of(patched)
    assert isinstance(logits, Tensor) and logits.requires_grad and logits.grad_fn is not None
    assert (logits.shape, logits.dtype, logits.device) == (own.shape, own.dtype, own.device)
    assert logits.dim() == 3 and logits.numel() == own.numel() and logits.is_contiguous()
    assert whole_reads(patched) == 0
    assert torch.equal(logits + 0, own)
    buffer = io.BytesIO()
    torch.save(logits, buffer)
    buffer.seek(0)
    assert torch.equal(torch.load(buffer), own)
    assert torch.equal(logits.detach().clone(), own)


def test_without_gradients_it_is_the_linear_itself() -> None:
    model = llama()
    patched = patch_model(copy.deepcopy(model), HEAD).eval()
    with torch.no_grad():
        assert type(logits_of(patched)) is Tensor
        assert torch.equal(logits_of(patched), logits_of(model.eval()))
    for parameter in patched.parameters():
        parameter.requires_grad_(False)
    assert type(logits_of(patched)) is Tensor
    generated = (
        m.generate(IDS[:, :4], max_new_tokens=6, do_sample=False) for m in (patched, model)
    )
    assert torch.equal(*generated)


def test_undone_and_copied_and_patched_again() -> None:
    model = llama()
    patched = patch_model(copy.deepcopy(model), HEAD)
    loss = FUSED["the model's own"]
    twin = copy.deepcopy(patched)
    assert twin.lm_head.forward.args[0] is twin.lm_head
    unpatch_model(patched)
    assert "forward" not in patched.lm_head.__dict__
    assert type(logits_of(patched)) is Tensor
    own = run(model, loss)
    for one in (patched, twin, patch_model(patched, HEAD)):
        assert_accurate(run(one, loss), own, truth(model, loss))


def test_accumulation_and_a_scaled_loss() -> None:
    def loss(m: Any) -> Tensor:
        parts = [m(input_ids=rows, labels=rows).loss for rows in IDS.split(1)]
        return torch.stack([part * 512 / 2 for part in parts]).sum()

    model = llama()
    patched = patch_model(copy.deepcopy(model), "exact")
    assert_accurate(run(patched, loss), run(model, loss), truth(model, loss))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_with_its_loss(reentrant: bool) -> None:
    def loss(m: Any) -> Tensor:
        hidden = m.model(input_ids=IDS)[0]

        def head(x: Tensor) -> Tensor:
            return F.cross_entropy(m.lm_head(x).float().view(-1, CLASSES), IDS.view(-1))

        value: Tensor = torch.utils.checkpoint.checkpoint(head, hidden, use_reentrant=reentrant)
        return value

    model = llama()
    patched = patch_model(copy.deepcopy(model), HEAD)
    assert_accurate(run(patched, loss), run(model, loss), truth(model, loss))


def test_a_hook_that_comes_too_late_is_an_error() -> None:
    patched = patch_model(llama(), HEAD)
    logits = logits_of(patched)
    F.cross_entropy(logits.view(-1, CLASSES), IDS.view(-1))
    with pytest.raises(RuntimeError, match="before the tensor is read"):
        logits.register_hook(lambda g: g)


@pytest.mark.parametrize(
    "target,error",
    [
        (torch.zeros(7, dtype=torch.int64), ValueError),
        (torch.full((48,), CLASSES), IndexError),
        (torch.zeros(48, dtype=torch.int32), RuntimeError),
    ],
    ids=["of another shape", "out of range", "of another dtype"],
)
def test_bad_labels_are_torchs_own_errors(target: Tensor, error: type[Exception]) -> None:
    model = llama()
    messages = []
    for one in (model, patch_model(copy.deepcopy(model), HEAD)):
        with pytest.raises(error) as raised:
            F.cross_entropy(logits_of(one).view(-1, CLASSES), target)
        messages.append(str(raised.value).splitlines()[0])
    assert messages[0] == messages[1]


def test_an_empty_batch() -> None:
    model = llama()
    patched = patch_model(copy.deepcopy(model), HEAD)
    for one in (model, patched):
        loss = F.cross_entropy(one.lm_head(torch.randn(0, 32)), torch.empty(0, dtype=torch.int64))
        assert loss.isnan()


def test_other_heads_are_left_alone() -> None:
    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(8, 32), nn.Linear(32, 10)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.head(F.gelu(self.body(x)))
            return y

    report = plan_patch(Classifier(), HEAD, example_inputs=torch.randn(4, 8))
    assert not any("logits" in note for note in report.notes)


def test_logits_that_the_model_reads_itself_are_left_alone() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(8, 16), nn.Linear(16, 64)

        def forward(self, x: Tensor) -> Tensor:
            logits: Tensor = self.head(self.body(x))
            logits[..., 3] = -9.0
            return logits

    report = plan_patch(Masked(), HEAD, example_inputs=torch.randn(4, 3, 8))
    assert report.notes == ("head: logits are computed whole, since __setitem__ reads them",)


def test_the_report_names_head_and_reader() -> None:
    patched = patch_model(llama(), HEAD)
    (planned,) = [note for note in patch_report(patched).notes if "logits" in note]
    assert planned.startswith("lm_head: its 160 logits a row are computed where they are read")
    logits_of(patched).softmax(-1).sum().backward()
    (read,) = [note for note in patch_report(patched).notes if "computed whole" in note]
    assert read.startswith("lm_head: logits were computed whole 1 times, for _softmax")
    assert not plan_patch(llama(), {**HEAD, "head": "keep"}).notes


def test_float64_follows_the_unpatched_path() -> None:
    model = llama().double()
    patched = patch_model(copy.deepcopy(model), HEAD)
    loss = FUSED["a user's own"]
    assert_rounded(run(patched, loss), run(model, loss))
