"""q, k and v of one Linear: gradients joined in one pass, and everything else as it was."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from typing import Any

import pytest
import timm
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lowmem_patch import patch_model, patch_report, plan_patch, unpatch_model
from lowmem_patch.errors import NothingToPatchError
from lowmem_patch.functional import shared_input
from lowmem_patch.nn import packed_qkv
from lowmem_patch.nn.packed_qkv import PackedOutput
from tests.support.configs import FUSED, KEEP
from tests.support.judge import assert_accurate, assert_equal
from tests.support.step import step, truth_of

NOTE = "gradients of q, k, v that are joined in one pass, for speed: {}"


def vit() -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, embed_dim=24, num_heads=3, depth=2, num_classes=5
    )
    return model


def swin() -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = timm.create_model(
        "swin_tiny_patch4_window7_224", img_size=32, window_size=4, embed_dim=12, depths=(1, 2),
        num_heads=(1, 2), num_classes=5, drop_path_rate=0.0,
    )  # fmt: skip
    return model


def lora_vit() -> nn.Module:
    config = LoraConfig(r=2, target_modules=r".*\.qkv", init_lora_weights=False)
    model: nn.Module = get_peft_model(vit(), config)
    return model


MODELS = {"vit": (vit, 2), "swin": (swin, 3), "lora_vit": (lora_vit, 2)}


def images() -> Tensor:
    return torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows with each call of the op."""
    seen: list[int] = []
    original = packed_qkv.unbind_permuted

    def counted(*args: Any, **kwargs: Any) -> Any:
        seen.append(1)
        return original(*args, **kwargs)

    monkeypatch.setattr(packed_qkv, "unbind_permuted", counted)
    return seen


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_the_same_bits_and_bytes(name: str, autocast: bool, calls: list[int]) -> None:
    build, count = MODELS[name]
    model, x = build().train(), images()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        expected = step(model, x)
        patch_model(model, FUSED, example_inputs=x)
        del calls[:]
        found = step(model, x)
    assert len(calls) == count
    report = patch_report(model)
    assert NOTE.format(count) in report.notes
    assert report.saved_after == report.saved_before
    assert_equal(found, expected)


def test_keep_leaves_it_alone_and_unpatch_takes_it_off(calls: list[int]) -> None:
    model, x = vit(), images()
    assert not any("q, k, v" in note for note in plan_patch(model, "paper", example_inputs=x).notes)
    with pytest.raises(NothingToPatchError):
        patch_model(model, {**KEEP, "attention": "keep"}, example_inputs=x, strict=True)
    patch_model(model, FUSED, example_inputs=x)
    unpatch_model(model)
    del calls[:]
    step(model, x)
    assert not calls and not any(module._forward_hooks for module in model.modules())


def test_copies_and_pickles_do_so_too(calls: list[int]) -> None:
    model, x = vit(), images()
    patch_model(model, FUSED, example_inputs=x)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        del calls[:]
        step(twin, x)
        assert len(calls) == 2


def test_without_gradients_it_is_a_plain_tensor(calls: list[int]) -> None:
    model, x = vit(), images()
    patch_model(model, FUSED, example_inputs=x)
    attention = model.get_submodule("blocks.0.attn")
    with torch.no_grad():
        assert type(attention.qkv(torch.randn(1, 4, 24))) is Tensor
    with torch.inference_mode():
        model(x)
    parameters = {n: p.detach() for n, p in model.named_parameters()}
    del calls[:]
    torch.func.grad(lambda p: torch.func.functional_call(model, p, (x,)).sum())(parameters)
    assert not calls


class Split(nn.Module):
    """Attention's way from one Linear to q, k and v, with something else on the way."""

    def __init__(self, on_the_way: Any = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv = nn.Linear(8, 24)
        self.on_the_way = on_the_way

    def forward(self, x: Tensor) -> Tensor:
        joined = self.qkv(x).reshape(2, 5, 3, 2, 4).permute(2, 0, 3, 1, 4)
        if self.on_the_way is not None:
            joined = self.on_the_way(joined)
        q, k, v = joined.unbind(0)
        return (q * k).sin() * v


class Clamp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clamp(-0.5, 0.5)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return 3 * dy


def rows() -> Tensor:
    return torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1))


ON_THE_WAY = {
    "nothing": lambda t: t,
    "written in place": lambda t: t.mul_(2),
    "an assignment": lambda t: t.__setitem__(0, t[1] * 2) or t,
    "a product": lambda t: t * 2,
    "a custom function": Clamp.apply,
    "a hook": lambda t: t.register_hook(lambda g: g * 2) and t,
    "a clone": torch.clone,
    "a copying reshape": lambda t: t.reshape(-1).reshape(t.shape),
    "another dtype": lambda t: t * torch.stack(t.view(torch.int32).unbind(0)).float().sin(),
    "read beside": lambda t: torch.stack([*(t + t.sum()).unbind(0)]),
    "a checkpoint": lambda t: checkpoint(torch.sin, t, use_reentrant=False),
    "a reentrant checkpoint": lambda t: checkpoint(torch.sin, t, use_reentrant=True),
}  # fmt: skip


@pytest.mark.parametrize("name", ON_THE_WAY)
def test_whatever_happens_on_the_way_has_its_gradient(name: str, calls: list[int]) -> None:
    """Planned on the plain path; then the forward takes another one."""
    plain, patched = Split(), Split()
    patch_model(patched, FUSED, example_inputs=rows())
    plain.on_the_way = patched.on_the_way = ON_THE_WAY[name]
    expected = step(plain, rows())
    del calls[:]
    found = step(patched, rows())
    assert len(calls) == (name in ("nothing", "written in place", "an assignment"))
    assert_equal(found, expected)


def test_hooks_on_the_linear_see_gradients_and_tensors() -> None:
    plain, patched = Split(), Split()
    patch_model(patched, FUSED, example_inputs=rows())
    seen: dict[Any, list[Tensor]] = {plain: [], patched: []}
    for model in (plain, patched):

        def look(_m: Any, _i: Any, output: Tensor, seen: Any = seen[model]) -> None:
            assert isinstance(output, Tensor)
            output.retain_grad()
            output.register_hook(seen.append)

        model.qkv.register_forward_hook(look)
        model.qkv.register_full_backward_hook(lambda _m, _i, o, s=seen[model]: s.append(o[0]))
        step(model, rows().requires_grad_())
    assert len(seen[plain]) == len(seen[patched]) == 2
    for a, b in zip(seen[plain], seen[patched], strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("watch", [Tensor.retain_grad, lambda t: t.register_hook(print)])
def test_a_gradient_asked_for_too_late_is_an_error(watch: Any) -> None:
    model = Split()
    patch_model(model, FUSED, example_inputs=rows())
    held: list[Tensor] = []
    model.on_the_way = lambda t: held.append(t) or t
    model(rows())
    assert type(held[0]) is PackedOutput
    with pytest.raises(RuntimeError, match="call it before unbind"):
        watch(held[0])


def test_what_a_hook_kept_is_saved_as_a_tensor() -> None:
    model, held = Split(), list[Tensor]()
    patch_model(model, FUSED, example_inputs=rows())
    model.qkv.register_forward_hook(lambda _m, _i, output: held.append(output))
    model(rows())
    file = io.BytesIO()
    torch.save(held, file)
    file.seek(0)
    (loaded,) = torch.load(file, weights_only=True)
    assert type(loaded) is Tensor and torch.equal(loaded, held[0])


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_traced_it_is_plain_code(calls: list[int]) -> None:
    model = Split()
    patch_model(model, FUSED, example_inputs=rows())
    del calls[:]
    traced = torch.jit.trace(model, rows())  # type: ignore[no-untyped-call]
    assert not calls
    found, expected = step(traced, rows()), step(model, rows())
    assert torch.equal(found.output, expected.output)
    assert_accurate(found, expected, truth_of(Split(), rows()))


def test_a_reader_beside_the_split_is_no_site() -> None:
    class Reads(Split):
        def forward(self, x: Tensor) -> Tensor:
            y = self.qkv(x)
            q, k, v = y.reshape(2, 5, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
            return (q * k * v).sum() + y.sum()

    class Ordered(Split):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).reshape(2, 5, 3, 2, 4).unbind(2)
            return q * k * v

    for model in (Reads(), Ordered()):
        report = plan_patch(model, FUSED, example_inputs=rows())
        assert not any("q, k, v" in note for note in report.notes)


def test_nothing_is_held_beyond_the_step() -> None:
    model = Split()
    patch_model(model, FUSED, example_inputs=rows())
    held: list[Any] = []

    def hold(tensor: Tensor) -> Tensor:
        held.append(weakref.ref(tensor))
        assert type(tensor) is PackedOutput
        return tensor

    model.on_the_way = hold
    gc.disable()
    try:
        output = model(rows())
        assert held[0]() is None  # no cycle: freed without the collector
        output.sum().backward()
    finally:
        gc.enable()


def test_compiled_it_is_plain_code(calls: list[int]) -> None:
    model = Split()
    patch_model(model, FUSED, example_inputs=rows())
    expected = step(model, rows())
    del calls[:]
    found = step(torch.compile(model, backend="aot_eager", fullgraph=True), rows())
    assert not calls and torch.equal(found.output, expected.output)
    assert_accurate(found, expected, truth_of(Split(), rows()))


@pytest.mark.gpu
@pytest.mark.parametrize("least", [0, 1 << 30])
def test_on_a_gpu_small_outputs_are_left_to_torch(
    least: int, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_input, "LEAST_BYTES", least)
    model, x = vit().to("cuda"), images().to("cuda")
    patch_model(model, "exact", example_inputs=x)
    model(x).sum().backward()
    assert len(calls) == (0 if least else 2)
