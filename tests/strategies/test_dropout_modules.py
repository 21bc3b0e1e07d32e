"""Dropout modules before anything but a Linear: torch's numbers, and one bit kept for each element."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel

from lowmem_patch import patch_model, patch_report, plan_patch, unpatch_model
from lowmem_patch.nn.activations import PackedDropout
from tests.support.configs import RECOMPUTE
from tests.support.judge import assert_close, assert_equal_steps
from tests.support.models import FAMILIES
from tests.support.toys import ROWS, WIDTH, rows

# PEFT reads a name that transformers has since deprecated
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
P = 0.25
TEXT = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


class Residual(nn.Module):
    """x + dropout(linear(x)), as a block ends."""

    def __init__(self, p: float = P, inplace: bool = False) -> None:
        super().__init__()
        self.proj, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(p, inplace)
        self.leave = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(x + self.drop(self.proj(x)))


MASK, BITS = ROWS * WIDTH * 4, ROWS * WIDTH // 8  # the CPU's mask is as wide as the tensor


def patched(model: nn.Module, **config: Any) -> tuple[Any, Any]:
    """The patched model and its twin."""
    twin = copy.deepcopy(model.train())
    return patch_model(model, {**RECOMPUTE, **config}, example_inputs=rows()), twin


def test_saved_bytes_of_a_residual_by_hand() -> None:
    torch.manual_seed(0)
    model, twin = patched(Residual())
    original = twin.drop
    report = patch_report(model)
    assert report.notes[0] == "dropouts whose mask is kept in bits, one for each element: 1"
    assert len(report.notes) == 2 and "a CPU saves (unpatched) a mask" in report.notes[1]
    assert isinstance(model.drop, PackedDropout) and isinstance(model.drop, nn.Dropout)
    assert assert_equal_steps(model, twin, rows()) == MASK - BITS
    assert report.saved_before - report.saved_after == MASK - BITS
    assert report.saved_after == report.floor
    assert report.kinds.after["codes and statistics"] == BITS
    unpatch_model(model)
    assert type(model.drop) is type(original)
    assert assert_equal_steps(model, twin, rows()) == 0


@pytest.mark.parametrize(
    ("make", "config"),
    [
        (lambda: Residual(0.0), {}),
        (lambda: Residual(1.0), {}),
        (lambda: Residual(inplace=True), {}),
        (Residual, {"linear_inputs": "keep"}),
        (lambda: Residual().requires_grad_(False), {}),
    ],
    ids=["p 0", "p 1", "in place", "as the framework does", "frozen"],
)
def test_what_needs_no_bits_is_left_alone(
    make: Callable[[], nn.Module], config: dict[str, str]
) -> None:
    model = make().train()
    drop = model.get_submodule("drop")
    with pytest.warns(UserWarning, match="nothing was patched|no parameter trains"):
        patch_model(model, {**RECOMPUTE, **config}, example_inputs=rows())
    assert model.get_submodule("drop") is drop


@pytest.mark.filterwarnings("ignore:.*are frozen now")
@pytest.mark.parametrize("change", ["eval", "p 0", "p 1", "in place", "another p", "no gradient"])
def test_what_changes_after_patching_counts(change: str) -> None:
    model, twin = patched(Residual())
    for one in (model, twin):
        if change == "eval":
            one.eval()
        elif change == "in place":
            one.drop.inplace = True
        elif change == "no gradient":
            one.proj.requires_grad_(False)
        else:
            one.drop.p = {"p 0": 0.0, "p 1": 1.0, "another p": 0.5}[change]
    saved = assert_equal_steps(model, twin, rows())
    assert saved == (MASK - BITS if change == "another p" else 0)
    unpatch_model(model)
    assert type(model.drop) is nn.Dropout
    assert (model.drop.p, model.drop.training) == (twin.drop.p, twin.drop.training)


def _doubles(module: nn.Module) -> None:
    module.register_forward_hook(lambda m, a, output: output * 2)


def _doubles_gradient(module: nn.Module) -> None:
    module.register_full_backward_hook(lambda m, given, wanted: (given[0] * 2,))


def _writes(module: nn.Module) -> None:
    module.register_forward_hook(lambda m, a, output: output.add_(1))


@pytest.mark.parametrize("hook", [_doubles, _doubles_gradient, _writes])
@pytest.mark.parametrize("before", [True, False])
def test_hooks_of_users_act_as_unpatched(hook: Callable[[nn.Module], None], before: bool) -> None:
    model = Residual().train()
    twin = copy.deepcopy(model)
    if before:
        hook(model.drop)
    patch_model(model, RECOMPUTE, example_inputs=rows())
    if not before:
        hook(model.drop)
    hook(twin.drop)
    assert assert_equal_steps(model, twin, rows()) == MASK - BITS


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_draws_the_same_mask_again(reentrant: bool) -> None:
    class Checkpointed(Residual):
        checkpoints = False

        def forward(self, x: Tensor) -> Tensor:
            x = self.leave(x)  # reentrant checkpoints want an input with a gradient
            if not self.checkpoints:
                return super().forward(x)
            y: Tensor = checkpoint(super().forward, x, use_reentrant=reentrant)
            return y

    model, twin = patched(Checkpointed())
    model.checkpoints = twin.checkpoints = True
    assert_equal_steps(model, twin, rows())


def test_one_dropout_in_two_places() -> None:
    class Twice(Residual):
        def forward(self, x: Tensor) -> Tensor:
            return self.leave(x + self.drop(self.proj(self.drop(self.proj(x)) + x)))

    model, twin = patched(Twice())
    assert assert_equal_steps(model, twin, rows()) == 2 * (MASK - BITS)


def bert() -> Any:
    return BertModel(BertConfig(**TEXT, intermediate_size=48), add_pooling_layer=False)


def gpt2() -> Any:
    return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4))


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("make", [bert, gpt2])
def test_models_with_their_dropouts_keep_every_bit(make: Callable[[], Any], autocast: bool) -> None:
    torch.manual_seed(0)
    model, inputs = make().train(), FAMILIES["bert"].inputs()
    twin = copy.deepcopy(model)
    config = {"norms": "keep", "activations": "keep", "linear_inputs": "one_copy"}
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        patch_model(model, config, example_inputs=inputs)
        report = patch_report(model)
    packed = sum(isinstance(m, PackedDropout) for m in model.modules())
    assert packed == 5  # embeddings, and two in each block; attention's is a call of a function
    saved = assert_equal_steps(model, twin, inputs, autocast)
    assert saved == report.saved_before - report.saved_after > 0


def test_a_gpu_keeps_an_eighth() -> None:
    """Planned on the meta device: a byte for each element before, a bit after."""
    with torch.device("meta"):
        model = bert().train()
        ids = torch.zeros(2, 8, dtype=torch.long)
    config = {"norms": "keep", "activations": "keep", "linear_inputs": "one_copy"}
    report = plan_patch(model, config, example_inputs={"input_ids": ids})
    elements = 5 * ids.numel() * TEXT["hidden_size"]
    assert report.saved_before - report.saved_after == elements - elements // 8
    assert report.notes[1] == "before, a mask is counted as a GPU keeps it: a byte for each element"


def test_dropouts_of_adapters_are_given_a_deferred_input() -> None:
    config = LoraConfig(r=2, target_modules=["query", "output.dense"], lora_dropout=P)
    adapted = get_peft_model(bert().train(), config)
    patch_model(adapted, RECOMPUTE, example_inputs=FAMILIES["bert"].inputs())
    packed = [name for name, m in adapted.named_modules() if isinstance(m, PackedDropout)]
    assert packed and not any("lora_dropout" in name for name in packed)


def test_compiled_is_the_plain_one() -> None:
    model, twin = patched(Residual())
    graphs = []

    def look(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        graphs.append(graph.code)
        return graph.forward

    torch.manual_seed(7)
    found = torch.compile(model, fullgraph=True, backend=look)(rows())
    torch.manual_seed(7)
    assert torch.equal(found, twin(rows()))
    (code,) = graphs
    assert "dropout" in code and "autograd_function" not in code


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_keeps_every_bit_and_saves_an_eighth(dtype: torch.dtype) -> None:
    model = Residual().to("cuda", dtype).train()
    twin = copy.deepcopy(model)
    inputs = rows().to("cuda", dtype)
    patch_model(model, RECOMPUTE, example_inputs=inputs)
    assert assert_equal_steps(model, twin, inputs) == ROWS * WIDTH - BITS


def test_a_packed_dropout_is_torchs_own_under_torch_func() -> None:
    stock = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4)).double().train()
    x = torch.randn(3, 4, dtype=torch.float64)
    found = []
    for model in (stock, patch_model(copy.deepcopy(stock), "exact", example_inputs=(x,))):
        torch.manual_seed(5)

        def loss(parameters: dict[str, Tensor], model: nn.Module = model) -> Tensor:
            out: Tensor = torch.func.functional_call(model, parameters, (x,))
            return out.square().sum()

        found.append(torch.func.grad(loss)(dict(model.named_parameters())))
    assert type(model[1]) is PackedDropout
    for name, gradient in found[0].items():
        assert_close(found[1][name], gradient, name)
