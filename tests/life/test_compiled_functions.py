"""Functions that torch.compile compiled, in the forward of a model that is patched: they stay compiled."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    masking_utils,
)
from transformers.integrations import flex_attention as integration
from transformers.models.llama.modeling_llama import LlamaMLP

from lowmem_patch import patch_model, patch_report, saved_bytes
from lowmem_patch.nn.modes import AroundForward
from lowmem_patch.tracing.inputs import ExampleInputs
from lowmem_patch.tracing.isolation import uncompiled
from lowmem_patch.verify import verify_model
from lowmem_patch.verify.judge import _run
from tests.support.tiers import slow_but

# torch's compiler asks each tensor for its gradient, and transformers for block masks in an old way
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
    pytest.mark.filterwarnings("ignore:_compile flag on create_block_mask"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]
compiled: Callable[..., Any] = torch.compile(backend="aot_eager")


@compiled
def scaled(x: Tensor) -> Tensor:
    return torch.sin(x) * 1.5


@compiled
def scaled_in_place(x: Tensor) -> Tensor:
    return x.mul_(1.5)


@compiled
def gated(x: Tensor) -> Tensor:
    return F.silu(x) * x


@compiled
def projected(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.linear(x, weight, bias)


class Block(nn.Module):
    def __init__(self, forward: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.norm, self.up, self.gate = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(8, 16)
        self.act, self.down = nn.GELU(), nn.Linear(16, 8)
        self.run = forward

    def hidden(self, x: Tensor) -> Tensor:
        h: Tensor = self.act(self.up(self.norm(x)))
        return h

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def _function_beside(m: Any, x: Tensor) -> Tensor:
    h = m.norm(x)
    out: Tensor = m.down(F.silu(m.gate(h)) * scaled(m.up(h)))
    return out


FORWARDS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "reads a norm's output": lambda m, x: m.down(m.hidden(x)) + scaled(m.norm(x)),
    "reads an activation": lambda m, x: m.down(scaled(m.hidden(x))),
    "reads an activation as a Linear does too": lambda m, x: (
        m.down(h := m.hidden(x)) + scaled(h)[..., :8]
    ),
    "reads a gated product": lambda m, x: m.down(scaled(m.hidden(x) * m.gate(x))),
    "is a Linear of an activation": lambda m, x: projected(
        m.hidden(x), m.down.weight, m.down.bias
    ),
    "is an activation": lambda m, x: m.down(gated(m.up(m.norm(x)))),
    "writes into an activation": lambda m, x: m.down(scaled_in_place(m.hidden(x))),
    "writes into a Linear's output": lambda m, x: m.down(
        m.act(scaled_in_place(m.up(m.norm(x))))
    ),
    "reads what a dropout reads": lambda m, x: (
        m.down(F.dropout(h := m.up(m.norm(x)), 0.5)) + projected(h, m.down.weight, m.down.bias)
    ),
    "runs beside an activation that is a function": _function_beside,
}  # fmt: skip


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def frames() -> int:
    """How many functions torch.compile has compiled."""
    return int(counters["frames"]["ok"])


def rows() -> Tensor:
    return torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(3))


def pair(name: str) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    twin = nn.Sequential(Block(FORWARDS[name]), Block(FORWARDS[name]))
    return copy.deepcopy(twin), twin


def gradients(model: nn.Module, dtype: torch.dtype, autocast: bool = False) -> list[Tensor]:
    model.zero_grad()
    torch.manual_seed(1)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        output = model(rows().to(dtype))
    output.double().square().sum().backward()
    return [p.grad.double() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "autocast"])
@pytest.mark.parametrize("name", FORWARDS)
def test_patched_model_trains_and_the_function_is_compiled(name: str, autocast: bool) -> None:
    model, twin = pair(name)
    truth = gradients(copy.deepcopy(twin).double(), torch.float64)
    theirs = gradients(twin, torch.float32, autocast)
    torch._dynamo.reset()
    counters.clear()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        patch_model(model, "exact", example_inputs=rows())
    assert frames() == 0
    ours = gradients(model, torch.float32, autocast)
    assert frames() > 0
    eps = torch.finfo(torch.bfloat16 if autocast else torch.float32).eps
    for found, unpatched, exact in zip(ours, theirs, truth, strict=True):
        scale = exact.abs().max()
        allowed = 2 * (unpatched - exact).abs().max() + 8 * eps * scale
        assert (found - exact).abs().max() <= allowed


def test_what_it_reads_or_calls_is_left_alone_and_named() -> None:
    reasons: dict[str, str] = {}
    for name in ("reads a norm's output", "reads a gated product", "is an activation"):
        model, _ = pair(name)
        patch_model(model, "exact", example_inputs=rows())
        for site in patch_report(model).sites:
            reasons[f"{name}: {site.name}"] = f"{site.strategy}: {site.reason}"
    said = "in a function that torch.compile compiled"
    assert said in reasons["reads a norm's output: 0.norm"]
    assert said in reasons["reads a gated product: 0.act"]
    assert "calls a function that torch.compile compiled" in reasons["is an activation: 0.silu()"]


def test_a_function_is_compiled_after_its_bytes_were_counted() -> None:
    model, _ = pair("reads an activation")
    with saved_bytes(model) as first:
        model(rows())
    assert frames() == 0
    model(rows()).sum().backward()
    assert frames() > 0
    with saved_bytes(model) as second:
        model(rows())
    assert first.activations == second.activations


@compiled
def softened(x: Tensor) -> Tensor:
    return torch.softmax(x.float(), -1).to(x.dtype)  # which would round the truth


def test_the_truth_of_verify_sees_the_casts_of_a_compiled_function() -> None:
    torch.manual_seed(0)
    block = nn.Sequential(Block(lambda m, x: m.down(softened(m.hidden(x)))))
    truth = _run(block.double(), ExampleInputs((rows().double(),), {}), 0, float64=True)
    with uncompiled():
        plain = nn.Sequential(Block(lambda m, x: m.down(torch.softmax(m.hidden(x), -1)))).double()
        plain.load_state_dict(block.state_dict())
        expected = plain(rows().double())
    torch.testing.assert_close(truth.outputs["output"], expected.detach(), rtol=1e-12, atol=1e-12)
    assert verify_model(block.float(), "exact", example_inputs=rows()).passed
    assert frames() == 0
    block(rows())
    assert frames() > 0


def test_what_a_compiled_function_computes_inside_is_the_compilers() -> None:
    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block(lambda m, x: m.down(m.hidden(x)))

        def forward(self, x: Tensor) -> Tensor:
            return whole(self.block, x)

    @compiled
    def whole(block: nn.Module, x: Tensor) -> Tensor:
        y: Tensor = block(x)
        return y

    torch.manual_seed(0)
    model = Inside()
    twin = copy.deepcopy(model)
    patch_model(model, "exact", example_inputs=rows())
    strategies = {site.name: site.strategy for site in patch_report(model).sites}
    assert strategies == {"block.norm": "share", "block.act": "recompute"}
    ours, theirs = gradients(model, torch.float32), gradients(twin, torch.float32)
    for found, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


class Layer(nn.Module):
    """A norm, and an MLP that may be compiled in place."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.mlp = LlamaMLP(LlamaConfig(hidden_size=8, intermediate_size=16, num_attention_heads=1))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.mlp(self.norm(x))
        return out


@pytest.mark.parametrize("part", ["mlp", ""], ids=["mlp", "layer"])
def test_a_module_compiled_in_place_before_the_patch(part: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Layer(), Layer())
    twin = copy.deepcopy(model)
    for layer in model:
        layer.get_submodule(part).compile(backend="aot_eager")
    patch_model(model, "exact", example_inputs=rows())
    strategies = {site.name: site.strategy for site in patch_report(model).sites}
    # its output enters the graph of the MLP from outside, or is made in the layer's
    assert strategies["0.norm"] == ("keep" if part else "share")
    assert strategies["0.mlp.act_fn"] == "recompute"
    ours, theirs = gradients(model, torch.float32), gradients(twin, torch.float32)
    for found, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert frames() > 0


def test_beneath_a_mode_of_ours_it_runs_as_written_in_all_threads() -> None:
    class Passes(AroundForward):
        def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return func(*args, **kwargs)

    entered, left = threading.Event(), threading.Event()

    def other() -> None:
        with Passes():
            entered.set()
            left.wait(30)
            scaled(rows())

    thread = threading.Thread(target=other)
    with Passes():
        thread.start()
        assert entered.wait(30)
        scaled(rows())
    left.set()
    thread.join()
    assert frames() == 0
    scaled(rows())
    assert frames() == 1


def test_a_forward_that_fails_beneath_a_mode_leaves_the_compiler_on() -> None:
    class Fails(AroundForward):
        def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"), Fails():
        torch.sin(rows())
    scaled(rows())
    assert frames() == 1


@pytest.fixture
def flex(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flex attention trains on a CPU, which torch refuses, with the backend that compiles nothing. Its mask,
    for which transformers starts a compiler of C++, is computed as it is written."""
    from torch.nn.attention import flex_attention as own

    def block_mask(*args: Any, _compile: bool, **kwargs: Any) -> Any:
        return own.create_block_mask(*args, **kwargs)

    monkeypatch.setattr(own, "_validate_device", lambda *tensors: None)
    monkeypatch.setattr(masking_utils, "create_block_mask", block_mask)
    made = torch.compile(own.flex_attention, backend="aot_eager")
    monkeypatch.setattr(integration, "WrappedFlexAttention", lambda training: lambda: made)


SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 2, "head_dim": 16, "num_key_value_heads": 1, "use_cache": False,
    "attn_implementation": "flex_attention",
}  # fmt: skip


def language_model(name: str) -> Any:
    torch.manual_seed(0)
    if name == "gemma3":
        return Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, sliding_window=16)).train()
    return LlamaForCausalLM(LlamaConfig(**SIZES)).train()


def tokens() -> dict[str, Tensor]:
    ids = torch.randint(3, 64, (2, 128), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


@pytest.mark.usefixtures("flex")
@pytest.mark.parametrize("fit", slow_but([None, "1MiB"], None))
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_flex_attention_trains_patched(name: str, fit: str | None) -> None:
    model = language_model(name)
    twin = copy.deepcopy(model)
    budget = {} if fit is None else {"fit": fit, "optimizer": "sgd"}
    patch_model(model, "exact", example_inputs=tokens(), **budget)
    assert frames() == 0
    plan = patch_report(model).fit
    assert plan is None if fit is None else plan is not None and plan.levels["checkpointed"] >= 2
    losses = [one(**tokens()).loss for one in (model, twin)]
    for loss in losses:
        loss.backward()
    assert frames() > 0
    torch.testing.assert_close(*losses)
    for (path, found), expected in zip(model.named_parameters(), twin.parameters(), strict=True):
        scale = expected.grad.abs().max().clamp_min(1e-6)
        assert ((found.grad - expected.grad).abs().max() / scale) < 1e-4, path


@pytest.mark.slow
@pytest.mark.usefixtures("flex")
def test_no_mode_of_ours_stands_around_flex_attention() -> None:
    fitted = patch_model(
        language_model("llama"), "exact", example_inputs=tokens(), fit="1MiB", optimizer="sgd"
    )
    fit = patch_report(fitted).fit
    assert fit is not None
    levels = set(fit.levels)
    assert levels and levels <= {"patched", "checkpointed", "host"} and levels != {"patched"}
    stored = patch_model(language_model("llama"), "compact", example_inputs=tokens())
    kinds = {site.kind for site in patch_report(stored).sites if site.strategy == "eight_bit"}
    assert kinds == {"linear"}


@pytest.mark.usefixtures("flex")
def test_flex_attention_counts_as_attention() -> None:
    model = language_model("llama")
    report = patch_report(patch_model(model, "exact", example_inputs=tokens()))
    queries = 2 * 2 * 128 * 16 * 4  # bytes; as many of the output, and half as many of k and v each
    assert report.kinds.after["attention"] >= 4 * 3 * queries
    with saved_bytes(model) as found:
        model(**tokens())
    assert 0.99 * report.saved_after <= found.activations <= 1.01 * report.saved_after


@pytest.mark.gpu
def test_flex_attention_trains_patched_on_a_gpu() -> None:
    model = language_model("llama").cuda().to(torch.bfloat16)
    twin = copy.deepcopy(model)
    inputs = {name: value.cuda() for name, value in tokens().items()}
    patch_model(model, "exact", example_inputs=inputs)
    losses = [one(**inputs).loss for one in (model, twin)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(*losses, rtol=2e-2, atol=2e-2)
    assert frames() > 0
