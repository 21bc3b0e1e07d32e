"""storage: eight_bit: what is stored, its bytes, its gradients; the forward is equal."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import LlamaConfig, LlamaForCausalLM

from lowmem_patch import patch_model, patch_report, plan_patch, saved_bytes, verify_model
from lowmem_patch.config import load_config
from lowmem_patch.constants import EIGHT_BIT_GROUP
from lowmem_patch.demo import demo_tasks
from lowmem_patch.nn import eight_bit
from tests.support.models import EVERY_FAMILY, build, fill_adapters, first_blocks
from tests.support.step import MODES, Mode, Step, cast, in_mode, step

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),
]

COMPACT = load_config("compact")
EXACT = dataclasses.replace(COMPACT, storage="exact")
LEAST_COSINE = 0.999  # that is asked of a layer's gradient


def wide_llama(dtype: torch.dtype = torch.bfloat16) -> tuple[Any, dict[str, Tensor]]:
    """Two layers whose tensors are whole groups."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
    )
    tokens = torch.randint(0, 512, (2, 64))
    model = LlamaForCausalLM(config).to(dtype)
    return model, {"input_ids": tokens, "labels": tokens}


def both(model: Any, inputs: Any) -> tuple[Any, Any]:
    """The model with 8-bit storage and without."""
    return tuple(
        patch_model(copy.deepcopy(model), config, example_inputs=inputs)
        for config in (COMPACT, EXACT)
    )  # type: ignore[return-value]


def assert_along(found: Step, exact: Step) -> None:
    """Gradients of weights are along those that nothing was rounded for, unless they are but rounding."""
    size = max(float(gradient.norm()) for gradient in exact.gradients.values())
    for name, gradient in exact.gradients.items():
        ours, theirs = found.gradients[name].double(), gradient.double()
        if gradient.dim() > 1 and float(theirs.norm()) > 1e-4 * size:
            cosine = float((ours * theirs).sum() / (ours.norm() * theirs.norm()))
            assert cosine >= LEAST_COSINE, (name, cosine)


class Branch(nn.Module):
    """An MLP whose first part is a module of its own, as BERT's, or is not."""

    def __init__(self, apart: bool) -> None:
        super().__init__()
        up, act = nn.Linear(64, 256), nn.GELU()
        self.first = nn.Sequential(up, act) if apart else nn.ModuleList((up, act))
        self.norm, self.down, self.last = nn.LayerNorm(64), nn.Linear(256, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        for part in (self.first,) if isinstance(self.first, nn.Sequential) else self.first:
            y = part(y)
        found: Tensor = self.last(x + self.down(y))
        return found


def test_an_activation_at_the_end_of_a_part_counts_as_any_other() -> None:
    x, counts = torch.randn(512, 64).bfloat16(), []
    for apart in (True, False):
        model = patch_model(Branch(apart).bfloat16(), "compact", example_inputs=x)
        with saved_bytes(model) as saved:
            model(x)
        assert saved.activations == patch_report(model).saved_after
        counts.append(saved.activations)
    assert counts[0] == counts[1]


def family_in(mode: Mode, name: str, adapted: bool, blocks: int | None = None) -> tuple[Any, Any]:
    """A family's model, of which some blocks may be enough, with adapters if asked, and inputs."""
    family = EVERY_FAMILY[name]
    model = first_blocks(cast(build(family), mode.weights), blocks)
    if adapted:
        transposed = name == "gpt2"
        config = LoraConfig(r=2, target_modules=family.linears, fan_in_fan_out=transposed)
        model = fill_adapters(get_peft_model(model, config)).eval()
    return model, in_mode(family.inputs(), mode)


NAMES = ("llama", "timm-vit", "bert", "gpt2", "timm-swin", "t5", "qwen3")
# each family in both modes, and with adapters in one of them
STORED = [
    pytest.param(name, mode, (i + k) % 2 == 1, id=f"{name}-{mode}-{('full', 'lora')[(i + k) % 2]}")
    for i, name in enumerate(NAMES)
    for k, mode in enumerate(("fp32", "autocast"))
]


@pytest.mark.parametrize(("name", "mode_name", "adapted"), STORED)
def test_the_forward_is_equal_and_gradients_are_along(
    name: str, mode_name: str, adapted: bool
) -> None:
    model, inputs = family_in(MODES[mode_name], name, adapted)
    mode = MODES[mode_name]
    with torch.autocast("cpu", torch.bfloat16, enabled=mode.autocast is not None):
        compact, exact = both(model, inputs)
    found, expected = (step(one, inputs, mode, count=True) for one in (compact, exact))
    assert all(map(torch.equal, found.outputs, expected.outputs))
    assert found.saved < expected.saved
    if name != "gpt2":  # which was planned with its dropouts
        ours, theirs = (patch_report(one).saved_after for one in (compact, exact))
        assert expected.saved - found.saved == theirs - ours
    assert_along(found, expected)
    assert any(
        not torch.equal(found.gradients[name], gradient)
        for name, gradient in expected.gradients.items()
    )


def stored(elements: int) -> int:
    """Bytes of so many elements, in whole groups."""
    return elements + 2 * elements // EIGHT_BIT_GROUP


def test_saved_bytes_of_a_llama() -> None:
    model, inputs = wide_llama()
    compact, exact = both(model, inputs)
    rows, width, inner = 128, 128, 256
    layer = 6 * rows * width + 2 * rows * inner  # two x; q, k, v and out; gate and up
    with saved_bytes(exact) as before:
        exact(**inputs)
    with saved_bytes(compact) as after:
        compact(**inputs)
    gained = 2 * (2 * layer - stored(layer))
    assert before.activations - after.activations == gained
    report = patch_report(compact)
    assert (report.saved_after, patch_report(exact).saved_after) == (
        after.activations,
        before.activations,
    )
    head = 2 * (2 * rows * width)  # the last norm's output, and the gradient of the head's input
    assert after.activations - head < 0.58 * (report.floor - head)


def test_the_report_says_that_it_is_approximate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    model, inputs = wide_llama()
    report = plan_patch(model, "compact", example_inputs=inputs)
    names = {site.name for site in report.approximate}
    parts = ("q_proj", "k_proj", "v_proj", "o_proj")
    assert {f"model.layers.0.self_attn.{part}" for part in parts} <= names
    assert {"model.layers.1.mlp.down_proj", "model.layers.1.self_attn"} <= names
    assert "lm_head" not in names
    assert "eight_bit (approximate)" in str(report)
    assert any("the inputs of 14 Linears and q, k, v" in note for note in report.notes)
    assert not plan_patch(model, "auto", example_inputs=inputs).approximate


@pytest.mark.parametrize("task", demo_tasks(), ids=lambda task: task.name)
def test_trained_models_have_gradients_along_the_truth(task: Any) -> None:
    model, batch = task.load().float().train(), task.train_batches[0]
    truth = copy.deepcopy(model).double()
    wide = {name: t.double() if t.is_floating_point() else t for name, t in batch.items()}
    task.loss(truth, wide).backward()
    patched = patch_model(model, "compact", example_inputs=task.example_inputs)
    task.loss(patched, batch).backward()
    exact = dict(truth.named_parameters())
    for name, parameter in patched.named_parameters():
        ours, theirs = parameter.grad.double(), exact[name].grad
        cosine = float((ours * theirs).sum() / (ours.norm() * theirs.norm()))
        assert cosine >= LEAST_COSINE, (name, cosine)


def test_verify_proves_the_rest_and_names_what_is_approximate() -> None:
    model, inputs = wide_llama(torch.float32)
    result = verify_model(
        model, "compact", example_inputs=inputs, dtypes=(torch.float32,), autocast=None
    )
    assert result.passed
    assert "model.layers.0.self_attn.q_proj" in result.approximate_sites


class Read(nn.Module):
    """A Linear whose input somebody else reads."""

    def __init__(self, read: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.linear = nn.Linear(128, 128), nn.Linear(128, 128)
        self.read = read

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.read(x, self.linear(x))


def stored_sites(model: nn.Module, inputs: Any) -> list[str]:
    report = plan_patch(model, "compact", example_inputs=inputs)
    return [site.name for site in report.sites if site.strategy == "eight_bit"]


def test_an_input_that_others_save_in_full_is_not_stored_beside_that() -> None:
    x = torch.randn(4, 128)
    assert stored_sites(Read(lambda x, y: x + y), (x,)) == ["first", "linear"]
    assert stored_sites(Read(lambda x, y: x * y), (x,)) == ["first"]


class Readers(nn.Module):
    """Several Linears behind activations of one or two tensors.

    Args:
        inputs: what the Linears read, of two tensors and of how many there are.
    """

    def __init__(self, inputs: Callable[[Tensor, Tensor, int], list[Tensor]], readers: int) -> None:
        super().__init__()
        self.inputs, self.readers = inputs, readers
        self.first, self.second = nn.Linear(128, 128), nn.Linear(128, 128)
        self.linears = nn.ModuleList(nn.Linear(128, 64) for _ in range(readers))

    def forward(self, x: Tensor) -> Tensor:
        inputs = self.inputs(self.first(x), self.second(x), self.readers)
        return sum(linear(one) for linear, one in zip(self.linears, inputs, strict=True))  # type: ignore[return-value]


READERS = {
    "activation": lambda x, _, readers: [nn.functional.gelu(x)] * readers,
    "activations": lambda x, _, readers: [nn.functional.silu(x) for _ in range(readers)],
    "product": lambda x, y, readers: [nn.functional.silu(x) * y] * readers,
    "products": lambda x, y, readers: [nn.functional.silu(x) * y for _ in range(readers)],
    "both": lambda x, _, readers: [
        nn.functional.silu(x) * x,
        nn.functional.silu(x),
        nn.functional.gelu(x),
    ][:readers],
}


def stored_sizes(readers: Readers, x: Tensor) -> list[int]:
    """Bytes of what is stored in 8 bits; gradients are along the exact ones."""
    compact, exact = both(nn.Sequential(readers), (x,))
    with saved_bytes(compact) as result:
        loss = compact(x).sum()
    assert torch.equal(loss, exact(x).sum())
    assert_along(step(compact, (x,)), step(exact, (x,)))
    return [storage.bytes for storage in result.storages if storage.dtype == torch.int8]


@pytest.mark.parametrize("name", READERS)
def test_what_several_linears_read_behind_activations_is_stored_once(name: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 8, 128)
    one, three = (stored_sizes(Readers(READERS[name], readers), x) for readers in (1, 3))
    assert one == three


def test_float64_and_frozen_weights_store_nothing() -> None:
    model, x = Read(torch.add), torch.randn(4, 128)
    assert stored_sites(copy.deepcopy(model).double(), (x.double(),)) == []
    model.first.requires_grad_(False)
    assert stored_sites(model, (x,)) == ["linear"]
    assert stored_sites(model.requires_grad_(False), (x,)) == []


class Seen(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:  # fmt: skip
        self.names.append(getattr(func, "__name__", ""))
        return func(*args, **(kwargs or {}))


def test_attention_does_not_watch_its_lora_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each function that it sees takes longer than many kernels; a mode of somebody else's sees all."""
    model, inputs = wide_llama()
    model = get_peft_model(model, LoraConfig(target_modules=["q_proj", "k_proj", "v_proj"]))
    patch_model(model.train(), COMPACT, example_inputs=inputs)
    own: list[str] = []
    asked = eight_bit._AttentionInEightBits.__torch_function__

    def watched(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        own.append(getattr(func, "__name__", ""))
        return asked(mode, func, types, args, kwargs)

    monkeypatch.setattr(eight_bit._AttentionInEightBits, "__torch_function__", watched)
    model(**inputs)
    with Seen() as seen:
        model(**inputs)
    assert "scaled_dot_product_attention" in own
    assert "addmm_" in seen.names  # of an adapter
    assert own.count("addmm_") == seen.names.count("addmm_")  # of the second forward alone
