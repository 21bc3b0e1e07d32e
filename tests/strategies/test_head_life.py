"""head: what trains, adapters, copies, undone, hooks, bad labels."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from lowmem_patch import patch_model, patch_report, plan_patch, saved_bytes, unpatch_model
from lowmem_patch.functional import head as chunks
from tests.support.heads import (
    CLASSES,
    FUSED,
    HEAD,
    IDS,
    llama,
    logits_of,
    run,
    truth,
    whole_reads,
)
from tests.support.judge import assert_accurate, assert_near, assert_rounded


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "_ROWS", 16)


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
    with torch.no_grad():
        ours, theirs, exact = (
            one(input_ids=IDS).logits for one in (patched, model, copy.deepcopy(model).double())
        )
    assert_near(ours, theirs, exact)


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


def test_hooks_that_begin_a_backward_may_come_late() -> None:
    """DeepSpeed sets one on all that a model returns: the loss, and the logits that it has read."""
    begun: list[str] = []

    def begins(gradient: Tensor) -> Tensor:
        begun.append("backward")
        return gradient

    begins.__module__ = "deepspeed.runtime.utils"
    model = llama()
    patched = patch_model(copy.deepcopy(model), HEAD)

    def loss(model: Any) -> Tensor:
        output = model(input_ids=IDS, labels=IDS)
        assert [output[name].register_hook(begins) for name in ("loss", "logits")]
        found: Tensor = output.loss
        return found

    assert_accurate(run(patched, loss), run(model, loss), truth(model, loss))
    assert begun


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
    assert planned.startswith("lm_head: its 160 logits per row are computed only when read")
    logits_of(patched).softmax(-1).sum().backward()
    (read,) = [note for note in patch_report(patched).notes if "computed whole" in note]
    assert read.startswith("lm_head: logits were computed whole once, for _softmax")
    assert not plan_patch(llama(), {**HEAD, "head": "keep"}).notes


def test_float64_follows_the_unpatched_path() -> None:
    model = llama().double()
    patched = patch_model(copy.deepcopy(model), HEAD)
    loss = FUSED["a user's own"]
    assert_rounded(run(patched, loss), run(model, loss))


def test_classes_are_indexed_as_classes() -> None:
    model = llama()
    patched = patch_model(copy.deepcopy(model), HEAD)

    def loss(m: Any) -> Tensor:
        y = logits_of(m)
        chosen = (
            y[:, -1, 140],
            y[:, -1, [3, 150]],
            y.select(-1, 99),
            y.narrow(-1, 40, 100),
            y[y > 0.5],
        )
        some = y.log_softmax(-1)[..., :40].square().sum() + y[:, :0].argmax(-1).sum()
        return torch.cat([part.square().flatten() for part in chosen]).sum() + some

    assert_accurate(run(patched, loss), run(model, loss), truth(model, loss))


def test_detached_logits_are_a_leaf_of_their_own() -> None:
    model = llama()
    patched = patch_model(copy.deepcopy(model), HEAD)

    def loss(m: Any) -> Tensor:
        y = logits_of(m)
        leaf = y.detach().requires_grad_()
        inner = F.cross_entropy(leaf.view(-1, CLASSES), IDS.view(-1)) + leaf.square().mean()
        (gradient,) = torch.autograd.grad(inner, leaf)
        return (y * gradient).sum()

    assert_accurate(run(patched, loss), run(model, loss), truth(model, loss))


def test_a_reentrant_checkpoint_around_the_loss() -> None:
    def loss(m: Any) -> Tensor:
        scale = torch.ones((), requires_grad=True, dtype=m.lm_head.weight.dtype)

        def scaled(y: Tensor, scale: Tensor) -> Tensor:
            return F.cross_entropy(y.view(-1, CLASSES), IDS.view(-1)) * scale

        value: Tensor = torch.utils.checkpoint.checkpoint(
            scaled, logits_of(m), scale, use_reentrant=True
        )
        return value

    model = llama()
    patched = patch_model(copy.deepcopy(model), HEAD)
    assert_accurate(run(patched, loss), run(model, loss), truth(model, loss))


def test_writes_that_a_view_would_not_see_are_refused() -> None:
    patched = patch_model(llama(), HEAD)
    for write in (
        lambda y: y.view(-1, CLASSES)[:, 40:].fill_(-1.0),
        lambda y: (y[:, :-1], y.mul_(2)),
        lambda y: y.transpose(1, 2).mul_(2),
        lambda y: y.detach().mul_(2),
    ):
        y = logits_of(patched)
        with pytest.raises(RuntimeError, match="share their memory"):
            write(y)
        with torch.no_grad():  # where views are those of torch
            y.view(-1, CLASSES)[:, 40:].fill_(-1.0)
        assert bool((y[..., 40:] == -1).all())


def test_logits_that_are_read_after_a_step_are_named() -> None:
    patched = patch_model(llama(), HEAD)
    output = patched(input_ids=IDS, labels=IDS)
    output.loss.backward()
    torch.optim.SGD(patched.parameters(), lr=0.1).step()
    with pytest.raises(RuntimeError, match="before the weight of their head"):
        output.logits.argmax(-1)


def test_a_gradient_that_went_past_the_logits_is_refused() -> None:
    patched = patch_model(llama(), HEAD)
    output = patched(input_ids=IDS, labels=IDS)
    with pytest.raises(RuntimeError, match="go past it"):
        torch.autograd.grad(output.loss, output.logits)


def test_detached_logits_can_be_copied() -> None:
    patched = patch_model(llama(), HEAD)
    logits = logits_of(patched).detach()
    assert torch.equal(copy.deepcopy(logits), logits + 0)


def test_a_soft_cap_that_underflows_is_no_missing_one() -> None:
    model = llama()
    for one in (model, patch_model(copy.deepcopy(model), HEAD)):
        capped = torch.tanh(logits_of(one)) * 1e-200 * 1e-200
        assert bool((capped + 0 == 0).all())
