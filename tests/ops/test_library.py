"""The ops as torch.library operators: fake, compile, autograd's edges, the choice of implementation."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

from lowmem_patch.errors import DoubleBackwardError
from lowmem_patch.functional import (
    NormSettings,
    _implementation,
    activation,
    activation_linear,
    codes_activation,
    ms_norm,
)
from lowmem_patch.functional.eight_bit import stored_matrix
from lowmem_patch.reference import unpack_bool
from tests.support.saved import saved_storages

ops = torch.ops.lowmem_patch
R = "reference"


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    """Each test has torch.compile's whole budget of recompilations."""
    torch.compiler.reset()


def randn(*shape: int, grad: bool = True) -> Tensor:
    return torch.randn(*shape, requires_grad=grad)


def operator_samples() -> Iterator[tuple[str, tuple[Any, ...]]]:
    yield "codes_activation", (randn(3, 7), "gelu", 2, R)
    yield "codes_activation", (randn(3, 7, grad=False), "gelu", 3, R)
    codes = torch.zeros(9, dtype=torch.uint8)
    yield "codes_activation_backward", (randn(3, 7, grad=False), codes, "silu", 3, torch.float32, R)
    yield "activation", (torch.randn(4, 3).t().requires_grad_(), None, "quick_gelu", R)
    yield "activation_backward", (randn(3, 4, grad=False), randn(3, 4, grad=False), None, "gelu", R)
    packed = torch.randn(4, 12)
    yield "activation", (*(half.requires_grad_() for half in packed.chunk(2, -1)), "silu", R)
    yield "activation_backward", (*torch.randn(3, 4, 6).unbind(), "silu", R)
    yield "glu_backward_over", (*(torch.randn(4, 6) for _ in range(3)), "silu", R)
    low = torch.bfloat16
    vectors, centered, rms = (randn(6), randn(6)), [1e-5, 0.0, True], [1e-5, 1.0, False]
    yield "norm", (randn(4, 6), *vectors, centered, torch.float32, None, None, R)
    yield "norm", (randn(4, 6), None, None, rms, low, None, low, R)
    yield "norm", (randn(4, 6), *vectors, centered, torch.float32, low, None, R)
    yield "norm", (randn(4, 6), *vectors, centered, torch.float32, low, low, R)
    y, rstd, vector = torch.randn(4, 6), torch.rand(4), torch.randn(6)
    given = (y, y.clone(), rstd, vector, vector.clone(), centered, torch.float32, [True] * 3)
    yield "norm_backward", (*given, False, R)
    yield "norm_backward", (*given, True, R)
    hidden, source, weight = torch.randn(2, 3, 6), randn(2, 3, 6), randn(5, 6)
    rest = (1.0, "gelu", torch.float32, R)
    yield "activation_linear", (hidden, source, None, weight, randn(5), None, None, *rest)
    adapter = (randn(2, 6), randn(5, 2), 0.5)
    frozen = (torch.randn(5, 6), None)
    yield (
        "activation_linear",
        (hidden, source, randn(2, 3, 6), *frozen, *adapter, "silu", torch.float32, R),
    )
    source, dy, low = torch.randn(2, 3, 6), torch.randn(2, 3, 5), torch.randn(6, 2)
    weights = (torch.randn(5, 6), torch.randn(2, 6), torch.randn(5, 2))
    tail = ([True] * 5, R)
    yield (
        "activation_linear_backward",
        (dy, source, source * 2, *weights, low, 0.5, "silu", *tail),
    )
    yield "activation_linear_backward", (dy, source, None, *weights, low, 0.5, "identity", *tail)
    for width in (6, 128):  # a row of values, and one of a whole group
        integers, scales = stored_matrix(torch.randn(2, 3, width))
        weights_of = (torch.randn(5, width), torch.randn(2, width), weights[2])
        eight_bits = (integers, scales, integers.clone(), scales.clone(), torch.float32)
        given = (dy, *eight_bits, *weights_of, low, 0.5, "silu", *tail)
        yield "activation_linear_backward_of_eight_bits", given
        given = (
            dy,
            *eight_bits[:2],
            None,
            None,
            torch.float32,
            *weights_of,
            low,
            0.5,
            "gelu",
            *tail,
        )
        yield "activation_linear_backward_of_eight_bits", given
    for up in (source * 2, None):
        given = (dy, source.clone(), up, *weights, low, 0.5, "silu", *tail)
        yield "activation_linear_backward_over", given
    for x in (torch.randn(2, 3, 6), torch.randn(6, 4, 3).transpose(0, 2)):
        yield "packed_in_eight_bits", (x, R)
    for x in (torch.randn(2, 3, 6), torch.randn(2, 128, 3).transpose(1, 2)):
        yield "near_in_eight_bits", (x,)
    q, k, v = (randn(2, 3, 8, 64) for _ in range(3))
    yield "attention_in_eight_bits", (q, k, v)
    yield "attention_in_eight_bits", (q, k, v, None, 0.0, True)
    yield "low_product", (source, *weights[1:], torch.bfloat16, R)
    q = torch.randn(2, 5, 3, 8).transpose(1, 2)
    cos, sin = torch.randn(2, 5, 6), torch.randn(1, 5, 6).expand(2, -1, -1)
    narrow_q, rest = q[..., :6].bfloat16(), (1, "forward", None, torch.float32, R)
    yield "rotary", (q.clone().requires_grad_(), cos, sin, *rest)
    yield "rotary", (torch.cat((q, q), 1)[:, :3].requires_grad_(), cos, sin, *rest)
    yield "rotary", (narrow_q.requires_grad_(), cos, sin, *rest)
    for direction in ("transposed", "inverse"):
        yield "rotary", (q.contiguous(), cos, sin, 1, direction, q.stride(), torch.bfloat16, R)
    yield "pack_bool", (torch.rand(3, 5) > 0.5, R)
    bits = torch.zeros(3, dtype=torch.uint8)
    yield "drop", (torch.randn(7, 3).t(), bits, 0.3, True, torch.float32, torch.bfloat16, R)
    image, vectors = torch.randn(2, 4, 3, 5), (torch.randn(4), torch.randn(4))
    for x, groups in ((image, 0), (image.to(memory_format=torch.channels_last), 0), (image, 2)):
        mean, rstd = torch.randn(2, 2 * groups or 4).unbind()
        running = (None, None) if groups else (torch.zeros(4), torch.ones(4))
        yield "channel_statistics", (x, groups, 1e-5, *running, 0.1, R)
        given = (x, mean, rstd, *vectors, groups, "silu")
        yield "channel_norm_forward", (*given, None, torch.bfloat16, R)
        yield "channel_norm_forward", (*given, torch.randn_like(x), torch.bfloat16, R)
        yield "channel_sum_gradient", (torch.randn_like(x), *given, torch.randn_like(x), R)
        yield "channel_norm_backward", (torch.randn_like(x), *given, R)
    of_scale = torch.randn(4, 6), torch.randn(4, 6).bfloat16(), torch.randn(4)
    for dtype in (torch.bfloat16, None):
        yield "scaled_gradients", (*of_scale, dtype, R)
    yield "to_eight_bits", (torch.randn(130), R)
    integers = torch.zeros(130, dtype=torch.int8)
    yield "from_eight_bits", (integers, torch.rand(2).bfloat16(), torch.float16, R)


def head_samples() -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Of the loss of a head; what an operator writes into needs no gradient."""
    target, weights = torch.tensor([1, -100, 3, 0, 2, 1]), torch.rand(5)
    labels, settings = (target, weights, -100, 0.1), (-100, 0.1, 0.5, 3.0)
    logits, rows = torch.randn(6, 5), torch.rand(6)
    yield "cross_entropy_forward", (logits, target, weights, torch.rand(()), *settings, True, R)
    yield "cross_entropy_forward", (logits.clone(), None, None, None, -100, 0.0, 1.0, 0.0, False, R)
    yield "cross_entropy_backward", (logits.clone(), rows, rows, target, weights, *settings, R)
    yield "scale_in_place", (torch.rand(4, 4), torch.rand(()), R)
    yield "placeholder", (torch.rand(2, 3), (2, 1, 5), torch.float16)
    for low, high in ((torch.float32, torch.float32), (torch.float16, torch.float32)):
        parts = (randn(2, 3, 4), randn(5, 4), randn(5), randn(2, 3, 2), randn(5, 2))
        head = (*parts, 0.5, 3.0, low, high)
        yield "linear_cross_entropy", (*head, *labels, True, False, [True] * 5, R)
        yield "linear_cross_entropy_rows", (*head, *labels, R)
    frozen = (randn(6, 4), torch.randn(5, 4), None, None, None, 1.0, 0.0, *[torch.float32] * 2)
    needs = [True, False, False, False, False]
    yield "linear_cross_entropy", (*frozen, target, None, -100, 0.0, False, False, needs, R)
    fixed = (
        torch.randn(6, 4),
        torch.randn(5, 4),
        torch.randn(5),
        None,
        None,
        1.0,
        0.0,
        torch.float32,
        torch.float32,
    )
    needs = [True, True, True, False, False]
    yield "linear_cross_entropy_rows_backward", (rows, rows, needs, *fixed, *labels, R)


SAMPLES = [*operator_samples(), *head_samples()]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised inside torch's own checks
@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"
)  # so since 2.15
@pytest.mark.parametrize(
    ("name", "arguments"), SAMPLES, ids=[f"{n}-{i}" for i, (n, _) in enumerate(SAMPLES)]
)
def test_every_operator_passes_torchs_opcheck(name: str, arguments: tuple[Any, ...]) -> None:
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    if name != "placeholder":  # whose number is nan, which equals no other
        checks += ("test_aot_dispatch_dynamic",)
    torch.library.opcheck(getattr(ops, name).default, arguments, test_utils=checks)


@pytest.mark.parametrize(
    ("name", "arguments"), SAMPLES, ids=[f"{n}-{i}" for i, (n, _) in enumerate(SAMPLES)]
)
def test_fakes_have_the_strides_of_the_results(name: str, arguments: tuple[Any, ...]) -> None:
    operator = getattr(ops, name).default
    with FakeTensorMode() as mode:
        fakes = operator(*tree_map_only(Tensor, mode.from_tensor, arguments))
    pairs = zip(tree_leaves(fakes), tree_leaves(operator(*arguments)), strict=True)
    for fake, real in pairs:
        if real is None:  # it writes into what it is given
            assert fake is None
            continue
        assert (fake.shape, fake.dtype) == (real.shape, real.dtype)
        assert fake.stride() == real.stride()


def every_operator() -> set[str]:
    names = torch._C._dispatch_get_all_op_names()
    return {n.partition("::")[2] for n in names if n.startswith("lowmem_patch::")}


def test_no_operator_is_left_out() -> None:
    assert every_operator() == {name for name, _ in SAMPLES}


def mlp(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return activation_linear(activation(x, "gelu"), (x,), weight, bias, "gelu", x.dtype)


def gated_mlp(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    up = x * 2
    return activation_linear(activation(x, "silu", up), (x, up), weight, bias, "silu", x.dtype)


FUNCTIONS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "codes": lambda x, weight, bias: codes_activation(x, "gelu"),
    "quick_gelu": lambda x, weight, bias: activation(x, "quick_gelu"),
    "glu": lambda x, weight, bias: activation(x, "gelu_tanh", x * 2),
    "layer_norm": lambda x, weight, bias: ms_norm(x, weight[0], bias, NormSettings(1e-5))[0],
    "rms_norm": lambda x, weight, bias: ms_norm(
        x, weight[0], None, NormSettings(1e-5, 1.0, centered=False)
    )[0],
    "mlp": mlp,
    "gated_mlp": gated_mlp,
}


@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_compiled_equals_eager_and_saves_no_more(name: str, autocast: bool) -> None:
    function = FUNCTIONS[name]
    inputs = randn(3, 8), randn(8, 8), randn(8)

    def run(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            return function(x, weight, bias)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    eager, kept = saved_storages(lambda: run(*inputs))
    y, compiled_kept = saved_storages(lambda: compiled(*inputs))
    dy = torch.randn_like(eager)
    assert torch.equal(y, eager)
    assert sum(compiled_kept.values()) <= sum(kept.values())
    for mine, true in zip(
        torch.autograd.grad(y, inputs, dy, allow_unused=True),
        torch.autograd.grad(eager, inputs, dy, allow_unused=True),
        strict=True,
    ):
        assert (mine is None and true is None) or torch.equal(mine, true)


def test_batch_sizes_share_one_dynamic_graph() -> None:
    graphs = 0

    def count(graph: torch.fx.GraphModule, _: Any) -> torch.fx.GraphModule:
        nonlocal graphs
        graphs += 1
        return graph

    compiled = torch.compile(FUNCTIONS["codes"], fullgraph=True, backend=count, dynamic=True)
    for size in (3, 5, 9):
        compiled(randn(size, 8), randn(8, 8), randn(8))
    assert graphs == 1


@pytest.mark.parametrize("name", FUNCTIONS)
def test_second_derivatives_are_refused_by_name(name: str) -> None:
    inputs = randn(3, 8), randn(8, 8), randn(8)
    y = FUNCTIONS[name](*inputs)
    with pytest.raises(DoubleBackwardError, match="lowmem_patch::"):
        torch.autograd.grad(y.square().sum(), inputs[0], create_graph=True)


@pytest.mark.parametrize("size", [8, 9])  # with and without padding of the codes
@pytest.mark.parametrize("name", FUNCTIONS)
def test_saved_sizes_are_exact_under_fake_tensors(name: str, size: int) -> None:
    def run() -> int:
        inputs = randn(5, size), randn(size, size), randn(size)
        _, storages = saved_storages_by_identity(lambda: FUNCTIONS[name](*inputs))
        return storages

    real = run()
    with FakeTensorMode():
        assert run() == real


def saved_storages_by_identity(function: Callable[[], Any]) -> tuple[Any, int]:
    """As saved_storages, for tensors without addresses."""
    sizes: dict[int, int] = {}
    alive = []

    def pack(tensor: Tensor) -> Tensor:
        sizes[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = function()
    return result, sum(sizes.values())


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # inside torch.func.jvp
def test_function_transforms_work_or_say_no() -> None:
    x = randn(3, 8, grad=False)
    plain = torch.nn.functional.gelu(x)
    assert torch.equal(torch.vmap(lambda v: codes_activation(v, "gelu"))(x), plain)
    _, tangent = torch.func.jvp(lambda v: codes_activation(v, "gelu"), (x,), (x,))
    assert torch.equal(tangent, torch.func.jvp(torch.nn.functional.gelu, (x,), (x,))[1])
    gradients = [
        torch.func.grad(lambda v, gelu=gelu: gelu(v).sum())(x)
        for gelu in (partial(codes_activation, kind="gelu"), torch.nn.functional.gelu)
    ]
    assert torch.equal(*gradients)
    with pytest.raises(RuntimeError, match=r"does not compose with torch\.func"):
        torch.func.grad(lambda v: ms_norm(v, None, None, NormSettings(1e-5), trains=True)[0].sum())(
            x
        )


def test_implementation_is_met_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    x = randn(3)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(RuntimeError, match="on cpu; the kernels need CUDA"):
        codes_activation(x, "gelu", implementation="triton")
    with pytest.raises(ValueError, match="must be 'auto', 'triton' or 'reference'"):
        codes_activation(x, "gelu", implementation="cuda")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(RuntimeError, match=r"torch\.float64; the kernels take"):
        codes_activation(x.double(), "gelu", implementation="triton")
    assert _implementation.resolve("auto", x.double()) == "reference"


def test_missing_triton_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(_implementation, "_TRITON_INSTALLED", False)
    _implementation._warn_without_triton.cache_clear()
    with pytest.warns(RuntimeWarning, match="triton is not installed"):
        assert _implementation.resolve("auto", randn(3)) == "reference"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert _implementation.resolve("auto", randn(3)) == "reference"
    with pytest.raises(RuntimeError, match="triton is not installed"):
        _implementation.resolve("triton", randn(3))


def test_flags_survive_compilation() -> None:
    mask = torch.rand(3, 5) > 0.5
    compiled = torch.compile(
        lambda m: unpack_bool(ops.pack_bool(m, R), m.shape), fullgraph=True, backend="aot_eager"
    )
    assert torch.equal(compiled(mask), mask)
