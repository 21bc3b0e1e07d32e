"""Who reads an activation or a norm that is patched: as unpatched, whoever it is and whenever he comes."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lowmem_patch import patch_model, saved_bytes
from lowmem_patch.errors import DoubleBackwardError
from lowmem_patch.nn.deferred import Deferred
from lowmem_patch.nn.deferred_ops import Activation, Saved
from tests.support.judge import BAND, TOLERANCE, assert_close, assert_rounded
from tests.support.step import step

WIDTH, HIDDEN, ROWS = 8, 12, 10


class Block(nn.Module):
    """A norm and a two-layer MLP, between which ``read`` stands once it is set."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.up, self.act, self.down = nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH)
        self.read: Callable[[Block, Tensor], Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(self.norm(self.enter(x)))
        y: Tensor = self.down(self.act(h)) if self.read is None else self.read(self, h)
        return y


def pair(**config: str) -> tuple[Block, Block]:
    torch.manual_seed(0)
    plain = Block().double()
    with torch.no_grad():
        for parameter in plain.norm.parameters():
            parameter.uniform_(0.5, 1.5)
    chosen: Any = config or "exact"
    return patch_model(copy.deepcopy(plain), chosen, example_inputs=rows()), plain


def rows() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, ROWS // 2, WIDTH, generator=generator, dtype=torch.float64)


def assert_same(patched: Block, plain: Block, tolerance: float = TOLERANCE) -> None:
    x = rows().requires_grad_()
    assert_rounded(step(patched, x), step(plain, x), tolerance)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:
        ctx.save_for_backward(a)
        return a * a

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy * 2 * ctx.saved_tensors[0]  # type: ignore[no-any-return]


def hooked(h: Tensor) -> Tensor:
    h.register_hook(lambda gradient: gradient * 3)
    return h


def written(h: Tensor) -> Tensor:
    h.data.mul_(2)
    return h


def looked_at(h: Tensor) -> Tensor:
    str(h), h.sum().item(), h.detach().numpy(), h.tolist(), float(h.detach()[0, 0, 0])
    return h


def stored(h: Tensor) -> Tensor:
    buffer = io.BytesIO()
    torch.save(h, buffer)
    buffer.seek(0)
    assert torch.equal(torch.load(buffer), h)
    return h


def in_a_tuple(b: Block, h: Tensor) -> Tensor:
    first, second = checkpoint(lambda z: (z * 2, b.act(z)), h, use_reentrant=True)
    out: Tensor = b.down(second) + first[..., :WIDTH]
    return out


READERS: dict[str, Callable[[Block, Tensor], Tensor]] = {
    "linear": lambda b, h: b.down(b.act(h)),
    "custom function": lambda b, h: b.down(Square.apply(b.act(h))),
    "another reader beside the linear": lambda b, h: (lambda a: b.down(a) + a[..., :WIDTH])(
        b.act(h)
    ),
    "two linears": lambda b, h: (lambda a: b.down(a) + b.down(a))(b.act(h)),
    "reentrant, in a tuple": in_a_tuple,
    "reentrant, alone": lambda b, h: b.down(checkpoint(b.act, h, use_reentrant=True)),
    "reentrant, with the linear": lambda b, h: checkpoint(
        lambda z: b.down(b.act(z)), h, use_reentrant=True
    ),
    "not reentrant, in a tuple": lambda b, h: (lambda t: b.down(t[0]) + t[1][..., :WIDTH])(
        checkpoint(lambda z: (b.act(z), z * 2), h, use_reentrant=False)
    ),
    "hook, then another reader": lambda b, h: b.down(hooked(b.act(h)) * 1.5),
    "hook, then the linear": lambda b, h: b.down(hooked(b.act(h))),
    "operands by name": lambda b, h: b.down(
        torch.add(input=torch.mul(input=b.act(h), other=h), other=b.act(h))
    ),
    "moves of rows by name": lambda b, h: b.down(
        torch.cat(
            torch.chunk(input=torch.flatten(input=b.act(h), start_dim=0, end_dim=1), chunks=2)
        )
    ).view(2, ROWS // 2, WIDTH),
    "parts by another name": lambda b, h: b.down(
        torch.cat(torch.split(tensor=b.act(h), split_size_or_sections=1))
    ),
    "numpy's name": lambda b, h: b.down(torch.transpose(x=b.act(h), dim0=0, dim1=1)).transpose(
        0, 1
    ),
    "linear by name": lambda b, h: F.linear(input=b.act(h), weight=b.down.weight),
    "write in place": lambda b, h: b.down(b.act(h).mul_(2)),
    "write into a view": lambda b, h: (lambda a: (a.view(-1).mul_(2), b.down(a))[1])(b.act(h)),
    "write through data": lambda b, h: b.down(written(b.act(h))),
    "write into a product": lambda b, h: b.down((b.act(h) * 1).mul_(2)),
    "augmented assignment": lambda b, h: b.down(torch.add(b.act(h), 1).add_(b.act(h))),
    "view": lambda b, h: b.down(b.act(h).view(ROWS, HIDDEN)).view(2, ROWS // 2, WIDTH),
    "transpose of columns": lambda b, h: b.down(
        b.act(h).transpose(1, 2).contiguous().transpose(1, 2)
    ),
    "print, item, numpy": lambda b, h: b.down(looked_at(b.act(h))),
    "saved to a file": lambda b, h: b.down(stored(b.act(h))),
    "isinstance": lambda b, h: b.down(a) if isinstance(a := b.act(h), Tensor) else h,
    "matmul": lambda b, h: b.act(h) @ b.down.weight.t(),
    "cat and stack": lambda b, h: b.down(torch.cat([b.act(h), torch.stack([b.act(h)])[0]]))[:2],
    "indexed by a mask": lambda b, h: b.down(b.act(h)[h[..., 0] > 0]).sum(0, keepdim=True),
    "attention": lambda b, h: b.down(F.scaled_dot_product_attention(b.act(h), b.act(h), b.act(h))),
    "einsum": lambda b, h: torch.einsum("bsf,of->bso", b.act(h), b.down.weight),
    "gated": lambda b, h: b.down(b.act(h) * h),
    "gated, in place": lambda b, h: b.down((b.act(h) * h).mul_(2)),
    "cast and back": lambda b, h: b.down(b.act(h).to(torch.float32).double()),
}


@pytest.mark.parametrize("name", READERS)
def test_reader_on_a_path_that_was_not_traced_is_right(name: str) -> None:
    patched, plain = pair()
    for model in (patched, plain):
        model.read = READERS[name]
    # a reader that casts rounds to float32, and a value between two of its numbers either way
    narrow = BAND * torch.finfo(torch.float32).eps
    assert_same(patched, plain, narrow if name == "cast and back" else TOLERANCE)


def doubled(module: nn.Module, args: tuple[Tensor, ...]) -> None:
    args[0].mul_(2)


def doubled_data(module: nn.Module, args: tuple[Tensor, ...]) -> None:
    args[0].data.mul_(2)


def exposed(module: nn.Module, args: tuple[Tensor, ...]) -> None:
    assert args[0].data_ptr() != 0


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("hook", [doubled, doubled_data, exposed])
@pytest.mark.parametrize("linear", ["up", "down"])
def test_pre_hook_added_after_the_patch(linear: str, hook: Any, frozen: bool) -> None:
    _, plain = pair()
    plain.norm.requires_grad_(not frozen)
    patched = patch_model(copy.deepcopy(plain), "exact", example_inputs=rows())
    for model in (patched, plain):
        model.get_submodule(linear).register_forward_pre_hook(hook)
    if (linear, hook) != ("up", doubled):
        assert_same(patched, plain)
        return
    with pytest.raises(
        RuntimeError,
        match="lowmem_patch: the output of a norm, or its weight or bias, was written in place",
    ):
        step(patched, rows().requires_grad_())


def through_zero(norm: nn.Module, number: int) -> None:
    with torch.no_grad():
        norm.weight[::2] = 0.1 - 0.1 * number  # 0.1, 0, -0.1  # type: ignore[index]


@pytest.mark.parametrize("preset", ["exact", "auto"])
@pytest.mark.parametrize("trains", [True, False])
def test_gamma_through_zero_after_the_patch(trains: bool, preset: str) -> None:
    torch.manual_seed(0)
    plain = Block().double()
    plain.norm.requires_grad_(trains)
    patched = patch_model(copy.deepcopy(plain), preset, example_inputs=rows())
    for number in range(3):
        for model in (patched, plain):
            through_zero(model.norm, number)
            model.zero_grad()
        assert_same(patched, plain)


def test_gamma_trained_to_zero_keeps_its_gradient() -> None:
    """By weight decay alone, which takes all of it in one step."""
    patched, plain = pair()
    for model in (patched, plain):
        torch.optim.SGD([model.norm.weight], lr=1.0, weight_decay=1.0).step()
        model(rows()).square().sum().backward()
        optimizer = torch.optim.SGD([model.norm.weight], lr=0.0, weight_decay=0.0)
        with torch.no_grad():
            model.norm.weight.zero_()
        optimizer.step()
        model.zero_grad()
    assert_same(patched, plain)


@pytest.mark.parametrize("unfit", [0.0, 1e-20, None])
def test_unfit_gamma_saves_what_a_fit_one_saves(unfit: float | None) -> None:
    torch.manual_seed(0)
    plain = Block().double()
    if unfit is not None:
        with torch.no_grad():
            plain.norm.weight[2] = unfit
    patched = patch_model(copy.deepcopy(plain), "exact", example_inputs=rows())
    with saved_bytes(patched) as saved:
        patched(rows())
    # the input, z, the input of the activation, one number a row
    assert saved.activations == 8 * ROWS * (WIDTH + WIDTH + HIDDEN + 1)
    assert_same(patched, plain)


def test_activation_that_is_returned_is_a_tensor_with_its_gradient() -> None:
    patched, plain = pair()
    for model in (patched, plain):
        model.read = lambda b, h: (b.down(b.act(h)), b.act(h))[1]  # type: ignore[return-value]
    assert isinstance(patched(rows()), Tensor) and isinstance(patched(rows()), Deferred)
    assert_same(patched, plain)


def test_late_hook_is_refused_by_name() -> None:
    patched, _ = pair()
    patched.read = lambda b, h: (lambda a: (b.down(a), hooked(a))[0])(b.act(h))
    with pytest.raises(RuntimeError, match=r"lowmem_patch: .* call register_hook before"):
        patched(rows())


def backward_of(patched: Block, plain: Block, **options: Any) -> tuple[Any, Any]:
    found = []
    for model in (patched, plain):
        x = rows().requires_grad_()
        wanted = [x, model.up.weight, model.norm.weight]
        found.append(torch.autograd.grad(model(x).square().sum(), wanted, **options))
    return found[0], found[1]


def assert_all_close(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for place, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert_close(ours, theirs, str(place))


def test_second_backward_through_a_norm_that_trains_gives_the_same() -> None:
    patched, _ = pair()
    x = rows().requires_grad_()
    loss = patched(x).square().sum()
    first = torch.autograd.grad(loss, [x, patched.up.weight], retain_graph=True)
    second = torch.autograd.grad(loss, [x, patched.up.weight])
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_derivative_of_a_weights_gradient_is_refused() -> None:
    patched, _ = pair()
    x = rows().requires_grad_()
    with pytest.raises(DoubleBackwardError, match="second derivative"):
        torch.autograd.grad(patched(x).square().sum(), patched.up.weight, create_graph=True)


def test_where_saved_tensors_must_not_be_packed() -> None:
    patched, plain = pair()
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        ours, theirs = backward_of(patched, plain)
    assert_all_close(ours, theirs)


def test_offloaded_saved_tensors_hold_z_once() -> None:
    patched, plain = pair()
    with torch.autograd.graph.save_on_cpu():
        ours, theirs = backward_of(patched, plain)
    assert_all_close(ours, theirs)


def test_checkpointed_block_saves_only_its_input() -> None:
    patched, plain = pair()
    x = rows().requires_grad_()
    with saved_bytes(patched) as saved:
        y = checkpoint(patched, x, use_reentrant=False)
    y.square().sum().backward()
    assert saved.activations == 8 * ROWS * WIDTH  # no pack of ours holds z
    theirs = rows().requires_grad_()
    plain(theirs).square().sum().backward()
    assert_close(x.grad, theirs.grad, "input")


@pytest.mark.parametrize(
    "function",
    [
        lambda h: h.to(h.device),
        lambda h: h.cpu(),
        lambda h: h.requires_grad_(),
        lambda h: h.mul_(2),
    ],
    ids=["to", "cpu", "requires_grad_", "mul_"],
)
def test_a_function_that_returns_its_input_returns_the_deferred_tensor(
    function: Callable[[Tensor], Tensor],
) -> None:
    h = Saved().of(torch.randn(3, 4, requires_grad=True) * 1, passing=True)
    assert function(h) is h


@pytest.mark.parametrize("trains", [True, False])
def test_a_product_behind_two_casts_reads_what_the_first_one_rounded(trains: bool) -> None:
    weight = torch.randn(5, WIDTH).requires_grad_(trains)
    found = []
    for act in (Activation("gelu").of, lambda sources: F.gelu(*sources)):
        x = rows().float().requires_grad_()
        y = F.linear(act((x * 1,)).to(torch.bfloat16).float(), weight)
        y.square().sum().backward()
        found.append((y.detach(), x.grad))
    assert_all_close(*found)
