"""8-bit storage under torch.compile, in ops of the graph."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lowmem_patch import patch_model, unpatch_model
from tests.strategies.test_eight_bit import assert_along, both, family_in, wide_llama
from tests.support.step import MODES, call, step
from tests.support.tiers import slow_but

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """A function is compiled anew at most eight times."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(model: Any) -> Any:
    """With the partitioner that decides what is saved, and no code to generate."""
    return torch.compile(model, backend="aot_eager_decomp_partition", fullgraph=True)


def saved_by(model: Any, run: Any) -> list[Tensor]:
    """What autograd saves of a run, one tensor a storage, without parameters."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    found: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        place = tensor.untyped_storage().data_ptr()
        if place not in parameters:
            found[place] = tensor
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return list(found.values())


# each model in both modes, and with adapters in one of them
@pytest.mark.parametrize(
    ("name", "mode_name", "training"),
    slow_but(
        [
            ("llama", "fp32", "full"),
            ("llama", "autocast", "lora"),
            ("timm-vit", "fp32", "lora"),
            ("timm-vit", "autocast", "full"),
        ],
        ("llama", "autocast", "lora"),
        ("timm-vit", "autocast", "full"),
    ),
)
def test_the_forward_is_equal_and_gradients_are_along(
    name: str, mode_name: str, training: str
) -> None:
    mode = MODES[mode_name]
    model, inputs = family_in(mode, name, training == "lora", blocks=1)
    compact, plain = both(model, inputs)
    found = step(compiled(compact), inputs, mode)
    # compiled, exact norms compute the output of z as it is rounded, which their backward reads
    exact = step(plain if mode.autocast else compiled(plain), inputs, mode)
    assert all(map(torch.equal, found.outputs, exact.outputs))
    assert_along(found, exact)
    assert any(
        not torch.equal(found.gradients[name], gradient)
        for name, gradient in exact.gradients.items()
    )


class Block(nn.Module):
    """A norm, a gated MLP behind it, and a Linear that attention gives its output."""

    def __init__(self, trains: bool) -> None:
        super().__init__()
        self.first = nn.Linear(128, 128)
        self.norm = nn.LayerNorm(128).requires_grad_(trains)
        self.gate, self.up = (nn.Linear(128, 512, bias=False) for _ in range(2))
        self.down, self.act = nn.Linear(512, 384, bias=False), nn.SiLU()
        self.out = nn.Linear(128, 128)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.first(x))
        q, k, v = self.down(self.act(self.gate(y)) * self.up(y)).chunk(3, -1)
        heads = (t.view(2, 8, 2, 64).transpose(1, 2) for t in (q, k, v))
        o = nn.functional.scaled_dot_product_attention(*heads)
        return self.out(o.transpose(1, 2).reshape(x.shape))


@pytest.mark.parametrize("norm", ["frozen", "uneven", "trained"])
def test_what_is_stored_and_what_is_not(norm: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 8, 128)
    block = Block(norm == "trained")
    if norm == "uneven":
        block.norm.weight[3] = 1 / 40  # where half a step of the group's largest number is much
    model = patch_model(block, "compact", example_inputs=(x,))
    graph = compiled(model)
    saved = saved_by(model, lambda: graph(x))
    rows = x.shape[0] * x.shape[1]
    in_bytes = sorted(t.numel() / rows for t in saved if t.dtype == torch.int8)
    # x; the norm's output, or z where the 8 bits of that might not tell it; attention's output, which the
    # Linear behind it reads; q, k and v, parts of one; gate and up; each 128 with a scale of 2 bytes
    assert in_bytes == [130, 130, 130, 390, 520, 520]
    full = (t.untyped_storage().nbytes() // (4 * rows) for t in saved if t.dtype == x.dtype)
    assert [size for size in full if size >= 128] == []


class Masked(nn.Module):
    """Attention whose mask has the shape of the queries."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(128, 384), nn.Linear(128, 128)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (t.view(2, -1, 2, 64).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        o = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(o.transpose(1, 2).reshape(x.shape))


def test_a_mask_like_the_queries_is_not_stored() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 64, 128)
    mask = torch.zeros(2, 2, 64, 64).masked_fill(torch.rand(2, 2, 64, 64) > 0.7, -torch.inf)
    block = Masked()
    ours = patch_model(copy.deepcopy(block), "compact", example_inputs=(x, mask))
    assert_along(step(compiled(ours), (x, mask)), step(block, (x, mask)))
    saved = saved_by(ours, lambda: compiled(ours)(x, mask))
    # x; q, k and v; attention's output
    in_bytes = sorted(t.numel() / 128 for t in saved if t.dtype == torch.int8)
    assert in_bytes == [130, 130, 390]


def test_an_input_that_is_not_contiguous_and_one_without_rows() -> None:
    torch.manual_seed(0)
    linear = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 64))
    x = torch.randn(128, 6).t()
    ours = patch_model(copy.deepcopy(linear), "compact", example_inputs=(x,))
    for rows in (x, x[:0]):
        found, exact = step(compiled(ours), (rows,)), step(linear, (rows,))
        torch._dynamo.reset()
        assert found.gradients.keys() == exact.gradients.keys()
        assert_along(found, exact)


@pytest.mark.slow
def test_adapters_come_and_go() -> None:
    model, inputs = wide_llama(torch.float32)
    model.model.layers = model.model.layers[:1]
    config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    stock = get_peft_model(model, config)
    ours = patch_model(copy.deepcopy(stock), "compact", example_inputs=inputs)
    graph = torch.compile(ours, backend="aot_eager_decomp_partition")

    def assert_alike() -> None:
        assert_along(step(graph, inputs), step(stock, inputs))

    assert_alike()
    with ours.disable_adapter(), stock.disable_adapter(), torch.no_grad():
        torch.testing.assert_close(call(graph, inputs).loss, call(stock, inputs).loss)
    for one in (ours, stock):
        torch.manual_seed(3)
        second = LoraConfig(r=2, target_modules=["down_proj"], init_lora_weights=False)
        one.add_adapter("second", second)
        one.set_adapter("second")
    assert_alike()
    unpatch_model(ours)
    for one in (ours, stock):
        one.set_adapter("default")
    assert_alike()


class Aliases(torch.fx.Interpreter):
    """Runs a graph, and finds what shares memory with what it is given and has a gradient."""

    def __init__(self, graph: Any) -> None:
        super().__init__(graph)
        self.given: dict[int, str] = {}
        self.found: list[tuple[str, str]] = []

    def run_node(self, n: torch.fx.Node) -> Any:
        result = super().run_node(n)
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor) and n.op != "output":
                place = tensor.untyped_storage()._cdata
                if n.op == "placeholder":
                    if tensor.requires_grad:
                        self.given[place] = n.name
                elif place in self.given:
                    self.found.append((n.name, self.given[place]))
        return result


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("preset", ["exact", "compact"])
def test_no_forward_makes_an_alias_of_its_input(preset: str, autocast: bool) -> None:
    """Compiled by torch 2.11, an autograd.Function loses the gradient of an input of which it makes one."""
    x = torch.randn(2, 8, 128)
    functions: list[Aliases] = []

    def look(graph: Any, _: Any) -> Any:
        for node in graph.graph.nodes:
            if node.target is torch.ops.higher_order.autograd_function_apply:
                body, _, *given = node.args
                values = [one.meta["example_value"] for one in given]
                function = Aliases(getattr(graph, body.target))
                with values[0].fake_mode:
                    function.run(*values)
                functions.append(function)
        return graph.forward

    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        model = patch_model(Block(True), preset, example_inputs=(x,))
        torch.compile(model, backend=look, fullgraph=True)(x)
    # the norm; and five Linears, what four of their inputs are in 8 bits
    assert len(functions) == (1 if preset == "exact" else 10)
    assert [function.found for function in functions if function.found] == []


def test_a_gamma_made_uneven_after_compilation_gives_no_number() -> None:
    model = nn.Sequential(nn.Linear(128, 128), nn.RMSNorm(128), nn.Linear(128, 128))
    gamma: Any = model[1].weight.requires_grad_(False)
    x = torch.randn(16, 128)
    patched = patch_model(model, "compact", example_inputs=(x,))
    run = compiled(patched)
    run(x).square().sum().backward()
    first: Any = model[0].weight
    assert first.grad.isfinite().all()
    first.grad = None
    gamma[3] = 1 / 64  # 8 bits of the output tell nothing of this column's z
    run(x).square().sum().backward()
    assert first.grad.isnan().all()
