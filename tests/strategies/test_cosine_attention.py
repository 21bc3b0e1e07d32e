"""Cosine attention (Swin V2, XCiT): rows that are normalised for matmuls, and scores times a scale."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import Swinv2Config, Swinv2Model

from lowmem_patch import patch_model, patch_report, saved_bytes, unpatch_model
from lowmem_patch.errors import DoubleBackwardError
from lowmem_patch.functional import scaled_scores
from lowmem_patch.nn.cosine_attention import scales
from tests.support.judge import assert_accurate, assert_same_step
from tests.support.lives import assert_backwards_add_up, assert_trains_alike
from tests.support.models import randomise
from tests.support.saved import saved_storages
from tests.support.step import AUTOCAST, BF16, FP32, Mode, cast, step, truth_of

HEADS, WIDTH, LENGTH = 2, 16, 6
ROWS = 2 * LENGTH
HEAD = WIDTH // HEADS
# what a forward may do besides, which unpatched and patched models are compared in
USES = ("rows of zeros", "another eps", "q is read", "hooked", "written", "turned")


class Attention(nn.Module):
    """As of Swin V2; ``use`` does something else to the scores, or to queries and keys."""

    def __init__(self, shape: tuple[int, ...] = (HEADS, 1, 1)) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.rand(shape) + 1)
        self.use: str = "plainly"
        self.held: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).reshape(batch, length, 3, HEADS, HEAD).permute(2, 0, 3, 1, 4).unbind()
        if self.use == "rows of zeros":
            q = q * (torch.arange(length) > 1).view(-1, 1)
        eps = 1.0 if self.use == "another eps" else 1e-12
        q, k = F.normalize(q, dim=-1, eps=eps), F.normalize(k, 2.0, 3, eps)
        if self.use == "q is read":
            x = x + q.transpose(1, 2).reshape(x.shape)
        scores = q @ k.transpose(-2, -1)
        if self.use == "kept":
            self.held = [scores, scores.detach().clone()]
        if self.use == "hooked":
            scores.register_hook(lambda gradient: gradient * 2)
        if self.use == "written without a trace":
            q.detach().numpy()[...] *= 3
        if self.use == "q is written":
            with torch.no_grad():
                q.mul_(2)
        if self.use == "written":
            scores = scores.mul_(2)
        scores = self.scale * scores if self.use == "turned" else scores * self.scale
        if self.use == "no grad":
            with torch.no_grad():
                x = x + (q @ k.mT * self.scale).mean()
        scores = F.dropout(scores.softmax(-1), 0.0)
        return x + self.proj((scores @ v).transpose(1, 2).reshape(x.shape))


def rows(seed: int = 0) -> Tensor:
    return torch.randn(2, LENGTH, WIDTH, generator=torch.Generator().manual_seed(seed))


def made(shape: tuple[int, ...] = (HEADS, 1, 1)) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Attention(shape))
    return model.train()


def patched(model: Any, x: Any = None) -> Any:
    return patch_model(copy.deepcopy(model), "exact", example_inputs=rows() if x is None else x)


def saved(model: Any) -> int:
    with saved_bytes(model) as counted:
        model(rows())
    return counted.activations


@pytest.mark.parametrize("mode", [FP32, BF16, AUTOCAST], ids=["fp32", "bf16", "autocast"])
@pytest.mark.parametrize("shape", [(HEADS, 1, 1), (), (1,), (1, HEADS, 1, 1), (2, HEADS, 1, 1)])
def test_a_step_is_accurate(shape: tuple[int, ...], mode: Mode) -> None:
    model = cast(made(shape), mode.weights)
    x = rows().to(mode.weights)
    ours = patched(model, x)
    assert "cosine attention that saves q and k once" in "".join(patch_report(ours).notes)
    found, own = (step(one, x, mode) for one in (ours, model))
    assert_accurate(found, own, truth_of(model, x), mode)


def test_neither_queries_nor_keys_nor_scores_are_saved_twice() -> None:
    model = made()
    ours = patched(model)
    scores, three, lengths = 2 * HEADS * LENGTH**2, 3 * ROWS * WIDTH, 2 * ROWS * HEADS
    # torch saves what is normalised (and v with it), and a length and its clamped value for each row
    before = three + scores + 2 * lengths
    assert saved(model) - saved(ours) == 4 * (before - lengths - 2 * HEAD)  # and two gammas
    report = patch_report(ours)
    assert report.saved_after == saved(ours)
    q_k, softmax = 2 * ROWS * WIDTH, scores  # of v, the matmul saves a copy
    inputs = 2 * ROWS * WIDTH  # of qkv and proj
    assert report.floor == 4 * (ROWS * WIDTH + q_k + ROWS * WIDTH + softmax + inputs + lengths)


@pytest.mark.parametrize("use", [*USES, "plainly", "kept", "no grad"])
def test_whatever_else_is_done_is_right(use: str) -> None:
    model = made()
    ours = patched(model)
    model[1].use = ours[1].use = use
    assert_same_step(ours, model, rows())
    if use == "kept":
        held, copied = ours[1].held
        assert torch.equal(held, copied)


@pytest.mark.parametrize("use", [*USES, "q is written", "written without a trace"])
def test_it_may_be_planned(use: str) -> None:
    model = made()
    model[1].use = use
    ours = patched(model)
    assert_same_step(ours, model, rows())
    if use in ("q is read", "turned", "another eps"):
        model[1].use = ours[1].use = "plainly"
        assert_same_step(ours, model, rows())


class Around(nn.Module):
    """Normalises for its matmul; so does a part of it for something else."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.q, self.part = nn.Linear(WIDTH, WIDTH), part

    def forward(self, x: Tensor) -> Tensor:
        q = F.normalize(self.q(x), dim=-1)
        return self.part(x) + q @ q.transpose(-2, -1) @ x


class Clips(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        x = x.float()
        clipped = F.normalize(x, dim=-1)
        self.seen.append(clipped.dtype)
        return clipped + F.normalize(x, dim=-1, eps=5.0)


@pytest.mark.parametrize("mode", [FP32, AUTOCAST], ids=["fp32", "autocast"])
def test_what_a_part_normalises_is_left_to_torch(mode: Mode) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Around(Clips()))
    with torch.autocast("cpu", torch.bfloat16, enabled=mode.autocast is not None):
        ours = patched(model)
    found, own = (step(one, rows(), mode) for one in (ours, model))
    assert_accurate(found, own, truth_of(model, rows()), mode)
    assert set(ours[1].part.seen) == set(model[1].part.seen) == {torch.float32}


class InFloat32(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q = F.normalize(self.q(x).float(), dim=-1)
        with torch.autocast("cpu", enabled=False):
            return q @ q.transpose(-2, -1) @ x.float()


@pytest.mark.filterwarnings("ignore:nothing was patched")
@pytest.mark.parametrize("planned", [False, True], ids=["planned-without", "planned-under"])
def test_matmuls_that_run_without_autocast_get_float32(planned: bool) -> None:
    model = nn.Sequential(InFloat32())
    with torch.autocast("cpu", torch.bfloat16, enabled=planned):
        ours = patched(model)
    found, own = (step(one, rows(), AUTOCAST) for one in (ours, model))
    assert found.output.dtype == torch.float32
    assert_accurate(found, own, truth_of(model, rows()), AUTOCAST)


@pytest.mark.filterwarnings("ignore:nothing was patched")
def test_what_the_op_does_not_know_is_left_to_torch() -> None:
    class Views(nn.Module):
        """Scores of views of one tensor, which torch's matmul copies and does not save."""

        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.scale = nn.Linear(WIDTH, 3 * WIDTH), nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).view(2, LENGTH, 3, HEADS, HEAD).permute(2, 0, 3, 1, 4)
            y: Tensor = (q @ k.transpose(-2, -1) * self.scale).softmax(-1) @ v
            z = F.normalize(torch.complex(x, x), dim=-1).real + F.normalize(x.sum(), dim=-1)
            return y.mean() + z * self.scale

    model = nn.Sequential(Views())
    ours = patched(model)
    assert saved(ours) <= saved(model)
    assert_same_step(ours, model, rows())


def test_an_unplanned_write_is_torchs_error() -> None:
    """Torch's matmul copies the rows first; what is saved once may not be written."""
    model = made()
    ours = patched(model)
    model[1].use = ours[1].use = "q is written"
    with pytest.raises(RuntimeError, match="inplace operation"):
        ours(rows()).sum().backward()
    assert_same_step(patched(model), model, rows())


@pytest.mark.filterwarnings("ignore:.* parameters that trained at the patch are frozen")
@pytest.mark.parametrize("frozen", ["0.", "1.qkv", "1.scale"])
def test_frozen_parts(frozen: str) -> None:
    model = made()
    for when in ("before", "after"):
        one = copy.deepcopy(model)
        ours = patched(one) if when == "after" else one
        for name, parameter in (*one.named_parameters(), *ours.named_parameters()):
            parameter.requires_grad_(not name.startswith(frozen))
        ours = patched(one) if when == "before" else ours
        assert_same_step(ours, one, rows())


def test_lives() -> None:
    model = made()
    ours = patched(model)
    assert_backwards_add_up(copy.deepcopy(ours), copy.deepcopy(model), rows())
    assert_trains_alike(copy.deepcopy(ours), copy.deepcopy(model), rows)
    again = pickle.loads(pickle.dumps(ours))
    assert saved(again) == saved(ours) == saved(copy.deepcopy(ours))
    ours.eval(), model.eval()
    with torch.no_grad():
        assert torch.equal(ours(rows()), model(rows()))
    ours.train(), model.train()
    unpatch_model(ours)
    assert saved(ours) == saved(model)


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_blocks(reentrant: bool) -> None:
    class Recomputed(nn.Module):
        def __init__(self, inner: Any) -> None:
            super().__init__()
            self.first, self.inner = inner[0], inner[1]

        def forward(self, x: Tensor) -> Tensor:
            made: Tensor = checkpoint(self.inner, self.first(x), use_reentrant=reentrant)
            return made

    model = made()
    ours = patched(model)
    assert_same_step(Recomputed(ours), Recomputed(model), rows())


@pytest.mark.parametrize("mode", [FP32, AUTOCAST], ids=["fp32", "autocast"])
def test_one_graph_leaves_it_to_the_compiler(mode: Mode) -> None:
    model = made()
    torch._dynamo.reset()
    net: Any = torch.compile(patched(model), backend="aot_eager", fullgraph=True)
    assert_same_step(net, model, rows(), mode)
    _, own = saved_storages(lambda: torch.compile(model, backend="aot_eager")(rows()))
    _, found = saved_storages(lambda: net(rows()))
    assert sum(found.values()) == sum(own.values())


def test_a_scale_that_repeats_the_scores_is_left_to_torch() -> None:
    scores = torch.randn(1, HEADS, 4, 4)
    assert scales(scores, torch.ones(HEADS, 1, 1)) and scales(scores, torch.ones(()))
    for shape in ((2, HEADS, 1, 1), (1, 1, 1, 4), (4,), (1, 1, 1, 1, 1)):
        assert not scales(scores, torch.ones(shape))


def test_double_backward_names_the_op() -> None:
    a, b = torch.randn(2, 3, 4), torch.randn(2, 4, 3)
    scale = torch.ones((), requires_grad=True)
    z = scaled_scores(a @ b, scale, a, b).sum()
    with pytest.raises(DoubleBackwardError, match="scaled_scores"):
        torch.autograd.grad(z, scale, create_graph=True)


@pytest.mark.parametrize("mode", [FP32, AUTOCAST], ids=["fp32", "autocast"])
@pytest.mark.parametrize("name", ["timm", "transformers", "xcit"])
def test_models(name: str, mode: Mode) -> None:
    torch.manual_seed(0)
    inputs: Any = torch.randn(2, 3, 32, 32)
    model: Any
    if name == "timm":
        model = timm.create_model(
            "swinv2_tiny_window8_256", img_size=32, window_size=4, embed_dim=16, depths=(1, 2),
            num_heads=(2, 4), num_classes=3,
        )  # fmt: skip
    elif name == "xcit":
        model = timm.create_model(
            "xcit_nano_12_p16_224", img_size=32, depth=1, embed_dim=16, num_heads=2, num_classes=3
        )
    else:
        config = Swinv2Config(
            image_size=32, embed_dim=16, depths=[1, 2], num_heads=[2, 4], window_size=4,
        )  # fmt: skip
        model, inputs = Swinv2Model(config), {"pixel_values": inputs}
    randomise(model)
    model = model.train()
    with torch.autocast("cpu", torch.bfloat16, enabled=mode.autocast is not None):
        ours = patch_model(copy.deepcopy(model), "exact", example_inputs=inputs)
        with saved_bytes(model) as before:
            model(**inputs) if isinstance(inputs, dict) else model(inputs)
        with saved_bytes(ours) as after:
            ours(**inputs) if isinstance(inputs, dict) else ours(inputs)
    assert "no scores for their scale" in "".join(patch_report(ours).notes)
    assert after.activations < 0.85 * before.activations
    found, own = (step(one, inputs, mode) for one in (ours, model))
    assert_accurate(found, own, truth_of(model, inputs), mode)
