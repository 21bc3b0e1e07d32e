"""head under torch.compile: one graph, no logits in it, and deferred logits outside."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments

from lowmem_patch import patch_model
from lowmem_patch.functional import head as chunks
from lowmem_patch.nn.deferred import Unstored
from tests.support.compiler import Graphs
from tests.support.heads import (
    CLASSES,
    FUSED,
    IDS,
    READ,
    Loss,
    bare,
    llama,
    logits_of,
    run,
    truth,
    whole_reads,
)
from tests.support.judge import assert_accurate
from tests.support.step import MODES, cast
from tests.support.tiers import slow_but

# what torch's own compiler does to torch
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
# whether torch's compiler asks a tensor class about y[...] = value and about a loop over rows (limits.md)
ASKS = torch.__version__ < (2, 13)
ASSIGNED = "assigns to a part of logits"
# of the tensors that a step needs, the head's weight is the largest; logits are larger
WEIGHT = CLASSES * 32
CRITERION = nn.CrossEntropyLoss(label_smoothing=0.1)
CHUNKED: dict[str, Loss] = {
    name: FUSED[name]
    for name in (
        "a user's own", "transposed", "class weights", "none", "soft cap", "row by row",
    )
} | {"a criterion": lambda m: CRITERION(logits_of(m).flatten(0, 1), IDS.flatten())}  # fmt: skip


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "_ROWS", 16)


def compiled(loss: Loss, graphs: Graphs) -> Loss:
    """The whole step in one graph."""
    made: Any = torch.compile(loss, fullgraph=True, backend=graphs.backend)
    return made  # type: ignore[no-any-return]  # torch types it for functions of known arguments


@pytest.mark.parametrize("name", CHUNKED)
def test_a_compiled_loss_is_torchs_and_has_no_logits(name: str) -> None:
    if name == "row by row" and not ASKS:
        with pytest.raises(torch._dynamo.exc.Unsupported, match=r"logits\.unbind"):
            run(bare()[1], compiled(CHUNKED[name], Graphs()))
        name = "unbound rows"
    (model, patched), loss, graphs = bare(), (CHUNKED | FUSED)[name], Graphs()
    found = run(patched, compiled(loss, graphs))
    assert_accurate(found, run(model, loss), truth(model, loss))
    assert len(graphs.made) == 2
    assert graphs.largest() == WEIGHT


# a criterion that is made in the graph is a function of the compiler's own
@pytest.mark.parametrize("name", ["CrossEntropyLoss", "a write in place", "squares"])
def test_who_else_reads_them_in_a_graph_gets_them(name: str) -> None:
    (model, patched), loss, graphs = bare(), (FUSED | READ)[name], Graphs()
    found = run(patched, compiled(loss, graphs))
    assert_accurate(found, run(model, loss), truth(model, loss))
    assert graphs.largest() == IDS.numel() * CLASSES


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("trains", slow_but(["all", "tied", "body", "adapters"], "all", "tied"))
def test_a_compiled_model_returns_deferred_logits(trains: str) -> None:
    model = cast(llama(trains == "tied", layers=1), MODES["bf16"].weights)
    if trains == "body":
        model.lm_head.requires_grad_(False)
    if trains == "adapters":
        config = LoraConfig(r=4, target_modules=["q_proj", "lm_head"], init_lora_weights=False)
        model = get_peft_model(model, config).train()
    patched, graphs = patch_model(copy.deepcopy(model), "auto"), Graphs()
    patched.compile(fullgraph=True, backend=graphs.backend)
    loss = FUSED["num_items_in_batch" if trains == "body" else "the model's own"]
    assert_accurate(run(patched, loss), run(model, loss), truth(model, loss))
    assert graphs.largest() <= WEIGHT
    outputs = patched(input_ids=IDS, labels=IDS)
    assert type(outputs.logits) is Unstored
    assert whole_reads(patched) == 0
    expected = model(input_ids=IDS).logits
    assert outputs.logits.dtype == expected.dtype
    torch.testing.assert_close(outputs.logits, expected, rtol=0.02, atol=0.02)


def breaking_loss(logits: Tensor, labels: Tensor, vocab_size: int, **_: Any) -> Tensor:
    torch._dynamo.graph_break()
    logits = logits[:, :-1].float().reshape(-1, vocab_size)
    return F.cross_entropy(logits, labels[:, 1:].flatten())


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # of the compiler itself
def test_a_graph_that_breaks_before_the_loss() -> None:
    """Logits leave one graph, and go into the next."""
    model: Any = llama(False, layers=1)
    model.loss_function = breaking_loss
    patched, graphs = patch_model(copy.deepcopy(model), "auto"), Graphs()
    patched.compile(backend=graphs.backend)
    loss = FUSED["the model's own"]
    assert_accurate(run(patched, loss), run(model, loss), truth(model, loss))
    assert whole_reads(patched) == 0


@pytest.mark.parametrize("name", ["a user's own", "softmax"])
def test_returned_logits_have_gradients(name: str) -> None:
    (model, patched), graphs, loss = bare(), Graphs(), (FUSED | READ)[name]
    step: Any = torch.compile(patched, fullgraph=True, backend=graphs.backend)
    found = run(patched, lambda _: loss(step))
    assert_accurate(found, run(model, loss), truth(model, loss))
    assert whole_reads(patched) == (name == "softmax")
    assert graphs.largest() == WEIGHT


BROKEN: dict[str, Callable[[Tensor], Tensor]] = {
    "a part": lambda y: y.logsumexp(-1).mean() + (y / 2)[..., -1].mean(),
    "squares": lambda y: y.log_softmax(-1).amax(-1).mean() + (y / 2).square().mean(),
    "numbers": lambda y: y.logsumexp(-1).mean() + y.argmax(-1).float().mean(),
}


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # of the compiler itself
@pytest.mark.parametrize("name", BROKEN)
def test_a_compiled_loss_of_logits_made_outside_reads_each_as_it_asks(name: str) -> None:
    """Its graph breaks at each reader, and what torch compiled for one ran for the next."""
    (model, patched), loss = bare(), BROKEN[name]
    torch._dynamo.reset()
    broken: Any = torch.compile(loss, backend="aot_eager")

    def written(m: Any) -> Tensor:
        return loss(logits_of(m))

    found = run(patched, lambda m: broken(logits_of(m)))
    assert_accurate(found, run(model, written), truth(model, written))


def test_logits_that_leave_a_graph_after_a_write() -> None:
    _, patched = bare()
    expected = logits_of(patched).detach().clone()
    expected[..., :9] = -5.0

    def written() -> Tensor:
        logits = logits_of(patched)
        logits[..., :9] = -5.0
        return logits

    leave: Any = torch.compile(written, fullgraph=True, backend=Graphs().backend)
    if not ASKS:
        with pytest.raises(RuntimeError, match=ASSIGNED):
            leave()
        return
    logits: Tensor = leave()
    torch.testing.assert_close(logits, expected)
    logits.sum().backward()
    assert patched.lm_head.weight.grad[:9].count_nonzero() == 0
    assert patched.lm_head.weight.grad[9:].count_nonzero()


def test_logits_to_a_part_of_which_a_graph_assigns() -> None:
    """Right, in one graph where the compiler asks for it, else behind a break of the graph."""
    model, patched = bare()

    def step(m: Any) -> Tensor:
        logits = logits_of(m)
        logits[..., :9] = -5.0
        return F.cross_entropy(logits.view(-1, CLASSES), IDS.view(-1))

    if not ASKS:
        with pytest.raises(torch._dynamo.exc.Unsupported, match=ASSIGNED):
            run(patched, compiled(step, Graphs()))
        patched.zero_grad()
    torch._dynamo.reset()
    found = run(patched, torch.compile(step, fullgraph=ASKS, backend=Graphs().backend))
    assert_accurate(found, run(model, step), truth(model, step))


def test_a_label_out_of_range_is_an_error() -> None:
    _, patched = bare()
    labels = torch.full_like(IDS, CLASSES)
    with pytest.raises(IndexError, match="out of bounds"):
        torch.compile(
            lambda: F.cross_entropy(logits_of(patched).transpose(1, 2), labels),
            backend=Graphs().backend,
        )()


@pytest.mark.slow
def test_a_trainer_that_compiles(tmp_path: Path) -> None:
    losses = []
    for preset in (None, "auto"):
        model = llama(layers=1)
        if preset:
            patch_model(model, preset)
        torch._dynamo.reset()
        arguments = TrainingArguments(
            str(tmp_path), max_steps=2, per_device_train_batch_size=2, torch_compile=True,
            torch_compile_backend="aot_eager", report_to=[], save_strategy="no", logging_steps=1,
            use_cpu=True, disable_tqdm=True,
        )  # fmt: skip
        rows = [{"input_ids": ids, "labels": ids} for ids in IDS.repeat(2, 1)]
        trainer = Trainer(model, arguments, train_dataset=rows)
        trainer.train()
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
        if preset:
            assert whole_reads(model) == 0
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


class Normed(nn.Module):
    """A norm in front of the head, whose output is saved once."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(CLASSES, 32), nn.LayerNorm(32)
        self.head = nn.Linear(32, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        self.hidden = self.norm(self.embed(ids))
        logits: Tensor = self.head(self.hidden)
        return logits


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # of the compiler itself
@pytest.mark.parametrize("written", [False, True], ids=["", "a write through .data"])
def test_a_compiled_loss_of_logits_behind_a_norm(written: bool) -> None:
    model = Normed()
    patched = patch_model(copy.deepcopy(model), "exact", example_inputs=(IDS,))
    torch._dynamo.reset()

    def written_out(logits: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), IDS.flatten())

    loss: Any = torch.compile(written_out, backend="aot_eager")

    def stepped(m: Any) -> list[Tensor]:
        m.zero_grad()
        found = loss(m(IDS))
        if written:
            m.hidden.data.mul_(2)
        found.backward()
        # the gradient of the head's weight is one of what was written, or of what was there before
        return [found.detach(), *(p.grad for p in m.parameters() if p is not m.head.weight)]

    for _ in range(2):
        for ours, theirs in zip(stepped(patched), stepped(model), strict=True):
            torch.testing.assert_close(ours, theirs)
    assert type(patched(IDS)) is Unstored
