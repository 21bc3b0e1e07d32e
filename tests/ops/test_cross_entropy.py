"""linear_cross_entropy: the loss of a head whose logits are never whole."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lowmem_patch.errors import DoubleBackwardError
from lowmem_patch.functional import Head, Labels, head, linear_cross_entropy, linear_losses
from lowmem_patch.functional._implementation import module
from tests.ops.conftest import INTERPRETED, Backend, part
from tests.support.judge import assert_near, assert_within_budget
from tests.support.saved import saved_storages
from tests.support.step import Mode

ROWS, WIDTH, CLASSES, RANK = 50, 12, 37, 4
IGNORED = -100


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "_ROWS", 16)


def made(*shape: int, dtype: torch.dtype, device: str) -> Tensor:
    return torch.randn(*shape).to(device, dtype).requires_grad_()


def make_head(
    backend: Backend,
    dtype: torch.dtype = torch.float32,
    *,
    bias: bool = False,
    wide: bool = False,
    adapter: bool = False,
    scale: float = 1.0,
    cap: float = 0.0,
) -> Head:
    torch.manual_seed(0)
    how: dict[str, Any] = {"dtype": dtype, "device": backend.device}
    of_sum = WIDER[dtype] if wide else dtype
    return Head(
        made(ROWS, WIDTH, **how),
        made(CLASSES, WIDTH, **how),
        made(CLASSES, dtype=of_sum, device=backend.device) if bias else None,
        made(ROWS, RANK, **how) if adapter else None,
        made(CLASSES, RANK, **how) if adapter else None,
        scale,
        cap,
        dtype,
        of_sum,
    )


def make_labels(backend: Backend, *, weights: bool = False, smoothing: float = 0.0) -> Labels:
    target = torch.randint(0, CLASSES, (ROWS,))
    target[::3] = IGNORED
    weight = torch.rand(CLASSES).to(backend.device) if weights else None
    return Labels(target.to(backend.device), weight, IGNORED, smoothing)


def plain(of: Head, labels: Labels, reduction: str) -> Tensor:
    """The same in torch, in the dtype of the head."""
    a = F.linear(of.x, of.weight, None if of.has_wider_sums else of.bias)
    if of.low is not None and of.lora_B is not None:
        a = a + of.low @ of.lora_B.t()
    if of.has_wider_sums and of.bias is not None:
        a = a + of.bias
    y = of.cap * torch.tanh(a * of.scale) if of.cap else a * of.scale
    y = y.to(torch.promote_types(y.dtype, torch.float32))
    if labels.target is None:
        return y.logsumexp(-1)
    weight = None if labels.class_weight is None else labels.class_weight.to(y.dtype)
    return F.cross_entropy(
        y, labels.target, weight, ignore_index=IGNORED, reduction=reduction,
        label_smoothing=labels.smoothing,
    )  # fmt: skip


def gradients(loss: Tensor, of: Head, start: Tensor | None = None) -> list[Tensor]:
    wanted = [tensor for tensor in of.tensors if tensor is not None]
    return list(torch.autograd.grad(loss, wanted, start))


def in_float64(of: Head) -> Head:
    tensors = (None if t is None else t.detach().double().requires_grad_() for t in of.tensors)
    dtypes = (torch.float64, torch.float64)
    return Head(*tensors, of.scale, of.cap, *dtypes)  # type: ignore[arg-type]  # x is there


WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.float32: torch.float64}
HEADS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias": {"bias": True},
    "wide bias": {"bias": True, "wide": True, "adapter": True},
    "adapter": {"adapter": True, "bias": True},
    "scale": {"scale": 0.3},
    "soft cap": {"cap": 3.0, "scale": 1 / 3},
}
LABELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "class weights": {"weights": True},
    "smoothing": {"smoothing": 0.1},
    "both": {"weights": True, "smoothing": 0.1},
}
CASES = [
    *((of, "plain") for of in HEADS),
    *(("plain", labels) for labels in LABELS if labels != "plain"),
    ("soft cap", "both"),
]


# the interpreter takes each case with one of them
REDUCED = [
    (*case, reduction)
    for i, case in enumerate(CASES)
    for k, reduction in enumerate(("mean", "sum", "none"))
    if not INTERPRETED or i % 3 == k
]


@pytest.mark.parametrize("of,labels,reduction", REDUCED)
def test_loss_and_gradients_are_torchs(
    backend: Backend, of: str, labels: str, reduction: str
) -> None:
    if of == "wide bias" and backend.implementation == "triton":
        pytest.skip("the sums are float64, which runs on the reference")
    head, given = make_head(backend, **HEADS[of]), make_labels(backend, **LABELS[labels])
    exact, truth = in_float64(head), given
    start = torch.rand(ROWS if reduction == "none" else ()).to(backend.device)
    results = []
    for which, loss in (
        (head, linear_cross_entropy(head, given, reduction, implementation=backend.implementation)),
        (head, plain(head, given, reduction)),
        (exact, plain(exact, truth, reduction)),
    ):
        found = gradients(loss, which, start.to(loss.dtype))
        results.append([loss.detach(), *found])
    for ours, theirs, right in zip(*results, strict=True):
        assert_near(ours, theirs, right)


@pytest.mark.parametrize(
    ("of", "dtype"),
    part(HEADS, [torch.bfloat16, torch.float16], of=2 if INTERPRETED else 1),
    ids=str,
)
def test_low_precision_is_as_accurate_as_torch(
    backend: Backend, of: str, dtype: torch.dtype
) -> None:
    head, labels = make_head(backend, dtype, **HEADS[of]), make_labels(backend)
    exact = in_float64(head)
    scale = 1024.0 if dtype == torch.float16 else 1.0  # as a gradient scaler
    results = []
    for which, loss in (
        (head, linear_cross_entropy(head, labels, implementation=backend.implementation)),
        (head, plain(head, labels, "mean")),
        (exact, plain(exact, labels, "mean")),
    ):
        results.append([loss.detach(), *gradients(loss * scale, which)])
    for ours, theirs, right in zip(*results, strict=True):
        assert_near(ours, theirs, right, Mode(dtype))


@pytest.mark.skipif(INTERPRETED, reason="the interpreter truncates where it should round")
def test_many_chunks_are_added_up_in_float32(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head, "_ROWS", 4)
    monkeypatch.setitem(globals(), "ROWS", 800)
    of, labels = make_head(backend, torch.bfloat16), make_labels(backend)
    exact = in_float64(of)
    right = gradients(plain(exact, labels, "mean"), exact)[1]
    theirs = gradients(plain(of, labels, "mean"), of)[1]
    loss = linear_cross_entropy(of, labels, implementation=backend.implementation)
    ours = gradients(loss, of)[1]
    assert_near(ours, theirs, right, Mode(torch.bfloat16))
    error, own = ((g.double() - right).norm() / right.norm() for g in (ours, theirs))
    assert error <= 1.4 * own


def test_a_chunk_is_small_where_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "_ROWS", 1024)
    monkeypatch.setattr(head, "_available", lambda device, enough: 0)
    x, weight = (
        torch.empty(8192, 4, dtype=torch.bfloat16),
        torch.empty(CLASSES, 4, dtype=torch.bfloat16),
    )
    made = Head(x, weight, None, None, None, 1.0, 0.0, torch.bfloat16, torch.bfloat16)
    trained = (True, True, False, False, False)
    assert head.chunk_rows(made, (True, False, False, False, False)) == 64
    # more chunks would be added in float32, and take more memory than they save
    assert head.chunk_rows(made, trained) == 1024
    assert head.chunk_rows(made._replace(x=x[:2048]), trained) == 256
    # so many are added in float32 in any case
    assert head.chunk_rows(made._replace(x=x.repeat(2, 1)), trained) == 64


@pytest.mark.parametrize("classes", [70_000, 70_001])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_rows_longer_than_the_cache(backend: Backend, classes: int, smoothing: float) -> None:
    rows = torch.randn(4, classes, device=backend.device) * 4
    target = torch.tensor([classes - 1, 5, -100, 0], device=backend.device)
    rows[2, 7] = float("inf")  # of a row that is ignored
    logits, weight = rows.clone(), torch.rand(classes, device=backend.device)
    operations: Any = module(backend.implementation)
    with numpy.errstate(all="ignore"):  # of the interpreter
        losses, _ = operations.cross_entropy_forward(
            logits,
            target,
            weight,
            torch.ones((), device=backend.device),
            -100,
            smoothing,
            1.0,
            0.0,
            True,
        )
    wide = rows.double()[[0, 1, 3]].requires_grad_()
    options: Any = {"reduction": "none", "label_smoothing": smoothing}
    truth = F.cross_entropy(wide, target[[0, 1, 3]], weight.double(), **options)
    (gradient,) = torch.autograd.grad(truth.sum(), wide)
    own = rows[[0, 1, 3]].requires_grad_()
    theirs = F.cross_entropy(own, target[[0, 1, 3]], weight, **options)
    (d_theirs,) = torch.autograd.grad(theirs.sum(), own)
    assert_within_budget(losses[[0, 1, 3]], theirs.detach(), truth.detach())
    assert_within_budget(logits[[0, 1, 3]], d_theirs, gradient)
    assert losses[2] == 0 and not logits[2].any()


def test_float64_is_exact() -> None:
    backend = Backend("cpu", "reference")
    head, labels = make_head(backend, torch.float64), make_labels(backend)
    ours, theirs = (
        [loss.detach(), *gradients(loss, head)]
        for loss in (linear_cross_entropy(head, labels), plain(head, labels, "mean"))
    )
    for found, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


def test_logsumexp_without_labels(backend: Backend) -> None:
    head = make_head(backend, bias=True)
    exact = in_float64(head)
    ours = linear_losses(head, Labels(None), implementation=backend.implementation)
    theirs, right = plain(head, Labels(None), ""), plain(exact, Labels(None), "")
    assert_within_budget(ours, theirs, right)
    for found, own, truth in zip(
        *(
            gradients(loss.square().sum(), of)
            for loss, of in ((ours, head), (theirs, head), (right, exact))
        ),
        strict=True,
    ):
        assert_near(found, own, truth)


def test_rows_without_a_label_may_be_left_out(backend: Backend) -> None:
    head, labels = make_head(backend, bias=True, adapter=True), make_labels(backend)
    found, expected = (
        [loss.detach(), *gradients(loss, head)]
        for loss in (
            linear_cross_entropy(
                head, labels, selects=selects, implementation=backend.implementation
            )
            for selects in (True, False)
        )
    )
    exact = in_float64(head)
    right = plain(exact, labels, "mean")
    for ours, theirs, truth in zip(
        found, expected, [right.detach(), *gradients(right, exact)], strict=True
    ):
        assert_near(ours, theirs, truth)


@pytest.mark.parametrize("selects", [False, True])
def test_all_rows_ignored_as_torch_has_it(selects: bool) -> None:
    backend = Backend("cpu", "reference")
    head = make_head(backend)
    labels = Labels(torch.full((ROWS,), IGNORED))
    for reduction in ("mean", "sum"):
        loss = linear_cross_entropy(head, labels, reduction, selects=selects)
        assert torch.equal(loss.isnan(), plain(head, labels, reduction).isnan())
        assert all(bool((gradient == 0).all()) for gradient in gradients(loss, head))


def test_no_rows() -> None:
    head = make_head(Backend("cpu", "reference"))
    head = head._replace(x=head.x[:0])
    labels = Labels(torch.empty(0, dtype=torch.int64))
    assert linear_cross_entropy(head, labels).isnan()
    total = linear_cross_entropy(head, labels, "sum")
    assert total == 0 and linear_cross_entropy(head, labels, "none").shape == (0,)
    assert (torch.autograd.grad(total, head.weight)[0] == 0).all()


def test_a_label_out_of_range_is_torchs_error() -> None:
    head, labels = make_head(Backend("cpu", "reference")), torch.full((ROWS,), CLASSES)
    for call in (
        lambda: F.cross_entropy(head.x @ head.weight.t(), labels),
        lambda: linear_cross_entropy(head, Labels(labels)),
    ):
        with pytest.raises(IndexError, match=f"Target {CLASSES} is out of bounds"):
            call()


def test_a_graph_that_is_retained_gives_the_same_again() -> None:
    head, labels = (
        make_head(Backend("cpu", "reference"), bias=True),
        make_labels(Backend("cpu", "")),
    )
    loss = linear_cross_entropy(head, labels)
    tensors = [head.x, head.weight, head.bias]
    first = torch.autograd.grad(loss, tensors, retain_graph=True)  # type: ignore[arg-type]  # all are there
    first = tuple(gradient.clone() for gradient in first)
    second = torch.autograd.grad(loss * 3, tensors)  # type: ignore[arg-type]
    for one, three in zip(first, second, strict=True):
        torch.testing.assert_close(three, 3 * one)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_a_second_derivative_is_an_error() -> None:
    head, labels = make_head(Backend("cpu", "reference")), make_labels(Backend("cpu", ""))
    for reduction in ("mean", "none"):
        loss = linear_cross_entropy(head, labels, reduction).sum()
        with pytest.raises(DoubleBackwardError, match="linear_cross_entropy"):
            torch.autograd.grad(loss, head.x, create_graph=True)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_saved_is_the_gradient_of_the_input_or_a_number_a_row(reduction: str) -> None:
    backend = Backend("cpu", "reference")
    head, labels = make_head(backend), make_labels(backend)
    assert labels.target is not None
    _, storages = saved_storages(lambda: linear_cross_entropy(head, labels, reduction))
    given = sum(t.untyped_storage().nbytes() for t in (head.x, head.weight, labels.target))
    new = ROWS * WIDTH * 4 if reduction == "mean" else ROWS * 4
    assert sum(storages.values()) == given + new


def test_what_is_frozen_has_no_gradient(backend: Backend) -> None:
    head, labels = make_head(backend, bias=True), make_labels(backend)
    whole = gradients(plain(head, labels, "mean"), head)
    for frozen in range(3):
        tensors = [
            t if t is None else t.detach().requires_grad_(n != frozen)
            for n, t in enumerate(head.tensors)
        ]
        part = Head(*tensors, *head[5:])  # type: ignore[arg-type]  # x is there
        linear_cross_entropy(part, labels, implementation=backend.implementation).backward()
        for number, tensor in enumerate(part.tensors[:3]):
            assert tensor is not None
            if number == frozen:
                assert tensor.grad is None
            else:
                torch.testing.assert_close(tensor.grad, whole[number])
