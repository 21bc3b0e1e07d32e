"""One copy: what adapters, casts and frozen weights keep, by hand; and who is left alone, and why."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from lowmem_patch import patch_model, patch_report, saved_bytes, unpatch_model
from lowmem_patch.nn.deferred import Deferred
from tests.support.configs import ONE_COPY
from tests.support.judge import assert_accurate, assert_equal_steps, assert_same_step
from tests.support.saved import saved_storages, storage_of
from tests.support.step import step, truth_of
from tests.support.versions import before

# PEFT reads a name that transformers has since deprecated
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")

ROWS, WIDTH, RANK = 10, 16, 2
ONE = ROWS * WIDTH * 2  # the input, once, in bf16


class Siblings(nn.Module):
    """Three Linears that read one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.q(x) + self.k(x) + self.v(x)


def rows(dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(2, ROWS // 2, WIDTH, generator=torch.Generator().manual_seed(4)).to(dtype)


def adapted(dtype: torch.dtype = torch.bfloat16, **options: Any) -> Any:
    """Adapters in float32, as PEFT makes them, on frozen Linears."""
    torch.manual_seed(0)
    base = Siblings().to(dtype)
    config = {"r": RANK, "target_modules": ["q", "k", "v"], "init_lora_weights": False}
    return get_peft_model(base, LoraConfig(**{**config, **options})).train()


def saved_by(model: Any, preset: str, x: Tensor | None = None) -> int:
    """Bytes that a step saves after patching; they must be those of the report."""
    x = rows() if x is None else x
    patch_model(model, preset, example_inputs=x)
    with saved_bytes(model) as saved:
        model(x)
    return saved.activations


@pytest.mark.parametrize(("preset", "width"), [("exact", 4), ("auto", 2)])
def test_siblings_share_x_and_keep_x_a(preset: str, width: int) -> None:
    """x A^T is kept: it has few columns, and would take a matmul to recompute."""
    model = adapted()
    twin = copy.deepcopy(model)
    with saved_bytes(twin) as before:
        twin(rows())
    columns = 8 if width == 2 else RANK  # a rank is padded where the product is 16 bits wide
    assert saved_by(model, preset) == ONE + 3 * ROWS * columns * width
    assert before.activations == 3 * 2 * ONE + 3 * ROWS * RANK * 4  # a float32 copy for each
    notes = patch_report(model).notes
    assert "3 adapter layers keep one copy of their input" in notes
    assert any(note.startswith("3 of them have an adapter in a wider dtype") for note in notes) is (
        preset == "auto"
    )
    if preset == "exact":
        assert_equal_steps(model, twin, rows())


def test_counted_bytes_are_those_of_a_plain_call() -> None:
    """The hooks by which `saved_bytes` learns names do not end it: the rank's padding counts."""
    model, x = adapted(), rows()
    counted = saved_by(model, "auto", x)
    with saved_bytes(model) as saved:
        model(x)
    assert saved.by_kind["linear inputs"] == counted
    _, storages = saved_storages(lambda: model(x))
    known = {storage_of(p) for p in model.parameters()}
    assert counted == sum(size for key, size in storages.items() if key not in known)


@pytest.mark.skipif(before("peft", "0.19"), reason="PEFT 0.18 adds a second adapter in bfloat16")
def test_several_adapters_share_x() -> None:
    model = adapted()
    model.add_adapter("second", LoraConfig(r=3, target_modules=["q"], init_lora_weights=False))
    model.base_model.set_adapter(["default", "second"])
    twin = copy.deepcopy(model)
    assert saved_by(model, "exact") == ONE + 3 * ROWS * RANK * 4 + ROWS * 3 * 4
    assert_equal_steps(model, twin, rows())


def test_merged_and_disabled_adapters_keep_nothing() -> None:
    model = adapted()
    twin = copy.deepcopy(model)
    assert saved_by(model, "exact") > ONE
    x = rows().requires_grad_()
    with model.disable_adapter(), saved_bytes(model) as saved:
        model(x).sum().backward()
    assert saved.activations == 0 and x.grad is not None
    model.merge_adapter(), twin.merge_adapter()
    with saved_bytes(model) as saved:
        merged = model(rows())
    assert saved.activations == 0
    assert torch.equal(merged, twin(rows()))
    model.unmerge_adapter(), twin.unmerge_adapter()
    assert_equal_steps(model, twin, rows())


def test_a_frozen_a_keeps_x_a_alone() -> None:
    model = adapted()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_B" in name)
    twin = copy.deepcopy(model)
    assert saved_by(model, "exact") == 3 * ROWS * RANK * 4
    assert_equal_steps(model, twin, rows())


def test_scaled_ranks_are_plain_adapters() -> None:
    model = adapted(use_rslora=True)
    twin = copy.deepcopy(model)
    assert saved_by(model, "exact") == ONE + 3 * ROWS * RANK * 4
    assert_equal_steps(model, twin, rows())


def test_a_dropout_keeps_one_bit_for_each_element() -> None:
    model = adapted(lora_dropout=0.25)
    twin, narrow = copy.deepcopy(model), copy.deepcopy(model)
    bits = ROWS * WIDTH // 8
    assert saved_by(model, "exact") == ONE + 3 * (bits + ROWS * RANK * 4)
    note = "3 of them keep one bit more for each element of it: the mask of their dropout of 0.25"
    assert note in patch_report(model).notes
    assert_equal_steps(model, twin, rows())
    # auto draws in the activations' dtype
    assert saved_by(narrow, "auto") == ONE + 3 * (bits + ROWS * RANK * 2)
    found, plain = (step(one, rows()).gradients for one in (narrow, twin.to(torch.bfloat16)))
    assert all(bool(found[name].isfinite().all()) for name in plain)


def test_variants_are_left_alone_with_a_reason() -> None:
    model = adapted(use_dora=True)
    twin = copy.deepcopy(model)
    patch_model(model, "exact", example_inputs=rows())
    note = patch_report(model).notes[0]
    assert note.startswith("3 adapter layers are left alone: DoraLinearVariant computes more")
    found, own = (step(one, rows(), count=True) for one in (model, twin))
    assert_accurate(found, own, truth_of(twin, rows()))
    # the product of lora_B for the magnitude, which scales it
    assert own.saved - found.saved == 3 * ROWS * WIDTH * 4


def test_variants_behind_patched_sites_are_right() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter, self.norm, self.act = (
                nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU(),
            )  # fmt: skip
            self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(self.act(self.up(self.norm(self.enter(x)))))

    torch.manual_seed(0)
    config = LoraConfig(r=2, target_modules=["enter", "up", "down"], use_dora=True)
    model = get_peft_model(Net(), config)
    twin = copy.deepcopy(model)
    x = rows(torch.float32)
    patch_model(model, "exact", example_inputs=x)
    assert {site.strategy for site in patch_report(model).patched} >= {"recompute"}
    assert_same_step(model, twin, x)


def test_adapters_that_are_no_linears_are_named() -> None:
    model = nn.Sequential(nn.Embedding(20, WIDTH), nn.Unflatten(1, (1, 5)), nn.Conv2d(1, 2, 1))
    config = LoraConfig(r=2, target_modules=["0", "2"])
    adapted_model = get_peft_model(model, config)
    with pytest.warns(UserWarning, match="nothing was patched"):
        patch_model(adapted_model, "exact", example_inputs=torch.zeros(2, 5, dtype=torch.long))
    assert sorted(patch_report(adapted_model).notes) == [
        "1 adapter layers are left alone: Embedding of lora is no LoRA of a Linear",
        "1 adapter layers are left alone: their adapter is a Conv2d and no Linear",
    ]


# autocast


class Attention(Siblings):
    """A norm whose output Linears and a residual read."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return super().forward(h) + h


def test_siblings_share_one_cast_under_autocast() -> None:
    """The norm's float32 output has other readers; the three Linears keep one bf16 copy of it."""
    model = Attention()
    x = rows(torch.float32).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        with saved_bytes(model) as before:
            model(x)
        assert before.activations == 3 * ONE + 2 * ONE + 2 * ROWS * 4
        # x itself is kept no more: the copy stands for the norm's output
        assert saved_by(model, "exact", x) == ONE + ROWS * 4


def partly_frozen() -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(WIDTH, WIDTH), Siblings(), nn.LayerNorm(WIDTH), nn.Linear(16, 4)
    )
    model[1].requires_grad_(False)
    return model


def weight_copies(model: Any, x: Tensor) -> int:
    with saved_bytes(model) as saved:
        model(x)
    return saved.weight_copies


@pytest.mark.parametrize("preset", [None, "exact", "auto", "paper"])
def test_frozen_weights_save_no_cast_copy(preset: str | None) -> None:
    model, x = partly_frozen(), rows(torch.float32)
    trained, frozen = WIDTH * 4 * 2, 3 * WIDTH * WIDTH * 2
    with torch.autocast("cpu", torch.bfloat16):
        if preset is not None:
            patch_model(model, preset, example_inputs=x)
        found = weight_copies(model, x)
        if preset is not None:
            assert found == patch_report(model).weight_copies_after
    if preset in ("exact", "auto"):
        assert found <= trained
    else:
        assert found >= frozen


class Alone(Siblings):
    """A norm whose output Linears alone read."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


@pytest.mark.parametrize("reader", ["trains", "is frozen", "has an adapter"])
def test_a_norm_defers_only_for_readers_that_save_casts(reader: str) -> None:
    """What waits costs host time at each reader."""
    torch.manual_seed(0)
    model: Any = Alone()
    model.norm.requires_grad_(False)  # or its Linears would have to save z
    if reader == "is frozen":
        model.q.requires_grad_(False)
    if reader == "has an adapter":
        model = get_peft_model(model, LoraConfig(r=RANK, target_modules=["q", "k", "v"]))
    x, got = rows(torch.float32).requires_grad_(), []
    with torch.autocast("cpu", torch.bfloat16):
        patch_model(model, "exact", example_inputs=x)
        norm = next(m for n, m in model.named_modules() if n.endswith("norm"))
        norm.register_forward_hook(lambda module, args, output: got.append(type(output)))
        with saved_bytes(model) as saved:
            model(x)
        assert saved.activations == patch_report(model).saved_after
    assert (not issubclass(got[0], Deferred)) is (reader != "is frozen")


def test_frozen_weights_that_keep_no_copy_give_the_same_bits() -> None:
    model, x = partly_frozen(), rows(torch.float32)
    twin = copy.deepcopy(model)
    with pytest.warns(UserWarning, match="nothing was patched"):
        patch_model(model, ONE_COPY, example_inputs=x)  # planned without autocast, run under it
    with torch.autocast("cpu", torch.bfloat16):
        assert weight_copies(model, x) < weight_copies(twin, x)
        assert_equal_steps(model, twin, x)
    assert_equal_steps(model, twin, x)


# softmax


class Window(nn.Module):
    """Attention as timm's Swin writes it, over windows."""

    def __init__(self, dropout: float = 0.0, scale: float = 1.0) -> None:
        super().__init__()
        self.qkv, self.softmax = nn.Linear(WIDTH, 3 * WIDTH), nn.Softmax(dim=-1)
        self.drop, self.proj, self.scale = nn.Dropout(dropout), nn.Linear(WIDTH, WIDTH), scale
        self.bias = nn.Parameter(
            torch.randn(5, 5)
        )  # of positions, in float32, which makes softmax that

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).reshape(batch, length, 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4)
        weights = self.drop(self.softmax(q @ k.transpose(-2, -1) + self.bias))
        if self.scale != 1:
            weights = weights * self.scale
        return self.proj((weights @ v).transpose(1, 2).reshape(x.shape))


def windows(**options: Any) -> tuple[Any, Any, int]:
    """A patched module, its twin, and by how much they differ in saved bytes under autocast."""
    torch.manual_seed(0)
    twin = Window(**options)
    model = copy.deepcopy(twin)
    x = rows(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="nothing was patched")
            patch_model(model, ONE_COPY, example_inputs=x)
        with saved_bytes(twin) as before:
            twin(x)
        with saved_bytes(model) as after:
            model(x)
        report = patch_report(model)
        assert (report.saved_before, report.saved_after) == (before.activations, after.activations)
        assert_equal_steps(model, twin, x)
    assert_equal_steps(model, twin, x)  # without autocast there is one copy anyway
    return model, twin, before.activations - after.activations


def test_a_softmax_is_kept_once_under_autocast() -> None:
    model, _, saved = windows()
    assert saved == 2 * 2 * 5 * 5 * 2  # images, heads, a square of bf16
    unpatch_model(model)
    assert not model.softmax._forward_hooks


@pytest.mark.parametrize(
    ("options", "expected"),
    [({"dropout": 0.5}, 100 * 4 - 13), ({"scale": 2.0}, 0)],  # the dropout's mask, in bits
)
def test_a_softmax_with_other_readers_is_left_alone(
    options: dict[str, float], expected: int
) -> None:
    model, _, saved = windows(**options)
    assert saved == expected and not model.softmax._forward_hooks


def test_products_of_other_shapes_are_plain() -> None:
    """The batch of one is spread, which is torch's own to do."""

    class Spread(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter, self.softmax = nn.Linear(WIDTH, WIDTH), nn.Softmax(dim=-1)

        def forward(self, x: Tensor) -> Tensor:
            h = self.enter(x)
            return self.softmax(h) @ h[:1].transpose(-2, -1)

    torch.manual_seed(0)
    model, x = Spread(), rows(torch.float32)
    twin = copy.deepcopy(model)
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.warns(UserWarning, match="nothing was patched"):
            patch_model(model, ONE_COPY, example_inputs=x)
        assert_equal_steps(model, twin, x)
