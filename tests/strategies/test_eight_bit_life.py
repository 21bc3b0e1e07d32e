"""8-bit storage in the life of a model: checkpointing, accumulation, copies, undoing, odd inputs."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

from lowmem_patch import patch_model, saved_bytes, unpatch_model
from lowmem_patch.errors import DoubleBackwardError
from lowmem_patch.functional import from_eight_bits, to_eight_bits
from lowmem_patch.nn.adapters import is_adapter_forward
from lowmem_patch.nn.own import is_own
from tests.strategies.test_eight_bit import COMPACT, EXACT, wide_llama
from tests.support.live import LiveBytes
from tests.support.step import call

# PEFT's and transformers' own names
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6:FutureWarning"),
]
Gradients = dict[str, Tensor]


def gradients(model: Any, loss: Tensor) -> Gradients:
    loss.backward()
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def assert_equal(found: Gradients, expected: Gradients) -> None:
    assert found.keys() == expected.keys() and found
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


@pytest.fixture
def stock() -> Any:
    return wide_llama(torch.float32)


@pytest.fixture
def patched(stock: Any) -> Any:
    model, inputs = stock
    return patch_model(copy.deepcopy(model), "compact", example_inputs=inputs).train(), inputs


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_blocks_store_the_same_when_they_run_again(
    patched: Any, reentrant: bool
) -> None:
    model, inputs = patched
    inputs = {
        **inputs,
        "use_cache": False,
    }  # a cache has keys in another order, and so in other groups
    expected = gradients(model, model(**inputs).loss)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    with saved_bytes(model) as saved:
        loss = model(**inputs).loss
    assert_equal(gradients(model, loss), expected)
    assert saved.by_kind["attention"] == 0


def test_a_budget_finds_its_blocks(stock: Any) -> None:
    model, inputs = stock
    roomy = patch_model(copy.deepcopy(model), "compact", example_inputs=inputs)
    expected = gradients(roomy, roomy(**inputs).loss)
    tight = patch_model(
        copy.deepcopy(model), "compact", example_inputs=inputs, fit="8MiB", optimizer="sgd"
    )
    assert_equal(gradients(tight, tight(**inputs).loss), expected)


def test_offloading_moves_what_is_stored(patched: Any) -> None:
    model, inputs = patched
    expected = gradients(model, model(**inputs).loss)
    moved: list[torch.dtype] = []

    def pack(tensor: Tensor) -> Tensor:
        moved.append(tensor.dtype)
        return tensor.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(**inputs).loss
    assert moved.count(torch.int8) == 2 * 8  # two x, q, k, v, out, gate and up of two layers
    assert_equal(gradients(model, loss), expected)


def test_accumulated_and_retained_graphs_give_the_same_again(patched: Any) -> None:
    model, inputs = patched
    once = gradients(model, model(**inputs).loss)
    loss = model(**inputs).loss
    loss.backward(retain_graph=True)
    model.zero_grad()
    assert_equal(gradients(model, loss), once)
    model(**inputs).loss.backward()
    assert_equal(gradients(model, model(**inputs).loss), {n: 2 * g for n, g in once.items()})


def test_copies_pickles_and_undoing(stock: Any) -> None:
    original, inputs = stock
    config = dataclasses.replace(
        COMPACT, attention="keep"
    )  # of a fused rotation there is no pickle
    model = patch_model(copy.deepcopy(original), config, example_inputs=inputs).train()
    expected = gradients(model, model(**inputs).loss)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_equal(gradients(other, other(**inputs).loss), expected)
    assert list(model.state_dict()) == list(original.state_dict())
    plain = unpatch_model(model)
    assert not any(is_own(vars(m).get("forward")) for m in plain.modules())
    original.train()
    assert_equal(
        gradients(plain, plain(**inputs).loss), gradients(original, original(**inputs).loss)
    )


def test_evaluation_stores_nothing(patched: Any) -> None:
    model, inputs = patched
    with torch.no_grad(), saved_bytes(model) as saved:
        model.eval()(**inputs)
    assert saved.activations == 0
    with torch.inference_mode():
        model(**inputs)


def test_where_hooks_are_forbidden_all_is_saved_in_full(stock: Any, patched: Any) -> None:
    (original, inputs), (model, _) = stock, patched
    exact = patch_model(original, EXACT, example_inputs=inputs).train()
    with torch.autograd.graph.disable_saved_tensors_hooks("no hooks"):
        loss = model(**inputs).loss
    assert_equal(gradients(model, loss), gradients(exact, exact(**inputs).loss))


def test_adapters_with_dropout_are_stored_and_known_as_patched(stock: Any) -> None:
    model, inputs = stock
    config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], lora_dropout=0.1)
    adapted = get_peft_model(copy.deepcopy(model), config)
    compact = patch_model(adapted, "compact", example_inputs=inputs).train()
    with saved_bytes(compact) as saved:
        loss = compact(**inputs).loss
    assert {storage.dtype for storage in saved.storages} >= {torch.int8}
    assert gradients(compact, loss)
    layer = adapted.base_model.model.model.layers[0].self_attn.q_proj
    assert is_adapter_forward(layer.forward)


def test_a_second_derivative_is_an_error(stock: Any) -> None:
    model, inputs = stock
    kept = dict.fromkeys(("norms", "activations", "head", "linear_inputs"), "keep")
    patch_model(model, config={**kept, "storage": "eight_bit"}, example_inputs=inputs)
    loss = model(**inputs).loss
    with pytest.raises(DoubleBackwardError, match="eight_bit_storage has no second derivative"):
        loss.backward(create_graph=True)


class Rows(nn.Module):
    """A Linear behind something that changes rows."""

    def __init__(self, move: Any) -> None:
        super().__init__()
        self.first, self.linear, self.move = nn.Linear(128, 128), nn.Linear(128, 64), move

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(self.move(self.first(x)))
        return y


def two(model: nn.Module, x: Tensor) -> tuple[Any, Any]:
    """The model with 8-bit storage and without, of which nothing else is patched."""
    return patch_model(copy.deepcopy(model), "compact", example_inputs=(x,)), model


def assert_near(model: nn.Module, x: Tensor) -> int:
    """Gradients as the step of integers allows, and the bytes that are stored."""
    ours, exact = two(model, x)
    with saved_bytes(ours) as saved:
        y = ours(x)
    assert torch.equal(y, exact(x))
    found, expected = gradients(ours, y.sum()), gradients(exact, exact(x).sum())
    for name, gradient in expected.items():
        # half a step of the largest number, in each of a column's rows
        room = 1.01 / 254 * x.shape[0] * x.shape[1] * float(gradient.abs().max())
        assert float((found[name] - gradient).abs().max()) <= room
    return saved.activations


def test_views_that_are_not_contiguous() -> None:
    x = torch.randn(4, 6, 128)
    assert assert_near(Rows(lambda x: x.transpose(0, 1)), x) == 2 * (24 * 128 + 2 * 24)
    assert assert_near(Rows(lambda x: x.flip(1)), x) == 2 * (24 * 128 + 2 * 24)


def test_a_small_part_of_a_memory_is_stored_alone() -> None:
    x = torch.randn(4, 64, 128)
    stored = assert_near(Rows(lambda x: x[:, 0]), x)
    assert stored == (256 * 128 + 2 * 256) + (4 * 128 + 2 * 4)


def test_rows_of_zeros_and_rows_that_are_not_finite() -> None:
    model, x = Rows(lambda x: x), torch.randn(4, 6, 128)
    x[0] = 0
    assert_near(model, x)
    x[1, 2, 3] = torch.inf
    ours, exact = two(model, x)
    found, expected = gradients(ours, ours(x).sum()), gradients(exact, exact(x).sum())
    for name, gradient in expected.items():
        finite = gradient.isfinite()
        # what is not finite stays so
        assert bool((~found[name].isfinite())[~finite].all())


def test_an_empty_batch() -> None:
    model = patch_model(Rows(lambda x: x), "compact", example_inputs=(torch.randn(2, 3, 128),))
    found = gradients(model, model(torch.randn(0, 3, 128)).sum())
    assert all(float(gradient.abs().max()) == 0 for gradient in found.values())


def test_as_many_rows_as_a_weight_has_are_told_from_the_weight() -> None:
    """The gradient of the input needs the weight as it is, whatever number of elements it has."""
    model = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128))
    for autocast in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            ours, exact = two(model, torch.randn(128, 128))
            x = torch.randn(128, 128, requires_grad=True)
            (found,) = torch.autograd.grad(ours(x).float().square().sum(), x)
            (expected,) = torch.autograd.grad(exact(x).float().square().sum(), x)
        assert torch.equal(found, expected)


def test_a_weight_that_is_written_before_backward_is_an_error(patched: Any) -> None:
    model, inputs = patched
    loss = model(**inputs).loss
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.add_(1.0)
    with pytest.raises(RuntimeError, match="inplace operation"):
        loss.backward()


def test_a_checkpoint_of_one_linear(patched: Any) -> None:
    """A user's own, around a module that stores."""
    model, inputs = patched
    expected = gradients(model, model(**inputs).loss)
    mlp = model.model.layers[0].mlp
    forward = mlp.forward
    mlp.forward = lambda x: checkpoint(forward, x, use_reentrant=False)
    assert_equal(gradients(model, model(**inputs).loss), expected)


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:.*gradient_checkpointing:FutureWarning",
    "ignore:.*should not be instantiated:DeprecationWarning",
)
def test_the_compiler_runs_what_else_a_layer_has(stock: Any) -> None:
    """The one op of an adapted Linear adds the adapter's product before it rounds, compiled or not."""
    model, inputs = stock
    config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    adapted = get_peft_model(copy.deepcopy(model), config).train()
    with torch.autocast("cpu", torch.float16):
        plain = adapted(**inputs).loss
        compact = patch_model(adapted, "compact", example_inputs=inputs)
        expected = compact(**inputs).loss
        found = torch.compile(compact, backend="aot_eager")(**inputs).loss
    assert plain != expected
    assert torch.equal(found, expected)


def test_nothing_more_is_held_beside_what_is_counted(stock: Any) -> None:
    """Autograd holds its hooks as long as what they packed: they must not hold q, k or v."""
    beside = {}
    for preset in ("auto", "compact"):
        model = patch_model(copy.deepcopy(stock[0]), preset, example_inputs=stock[1]).train()
        call(model, stock[1]).loss.backward()  # what is made once belongs to no step
        model.zero_grad()
        with saved_bytes(model) as counted:
            call(model, stock[1])
        with LiveBytes() as live:
            loss = call(model, stock[1]).loss
        beside[preset] = live.settled() - counted.activations - loss.nbytes
    assert beside["compact"] == beside["auto"]


def test_a_mask_of_the_shape_of_q_stays_as_it_is() -> None:
    """Infinite numbers have no 8 bits: one head, as many keys as q has columns."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=1,
    )  # fmt: skip
    model = patch_model(LlamaForCausalLM(config), "compact").train()
    ids, mask = torch.randint(0, 64, (2, 64)), torch.ones(2, 64, dtype=torch.long)
    mask[1, -10:] = 0
    found = gradients(model, model(input_ids=ids, attention_mask=mask, labels=ids).loss)
    assert all(gradient.isfinite().all() for gradient in found.values())


class _Neighbours(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(128, 128), nn.Linear(100, 128)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        h[..., 100:] = -1e4
        return self.b(h[..., :100])


def test_what_lies_beside_an_input_does_not_count() -> None:
    torch.manual_seed(0)
    model, x = _Neighbours(), torch.randn(32, 128)
    expected = gradients(model, model(x).sum())
    found = gradients(patch_model(model, "compact", example_inputs=x), model(x).sum())
    for name, gradient in expected.items():
        assert torch.cosine_similarity(gradient.flatten(), found[name].flatten(), dim=0) > 0.999


def test_a_norm_whose_gammas_differ_stores_z() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.RMSNorm(128), nn.Linear(128, 64)), torch.randn(64, 128)
    with torch.no_grad():
        model[0].weight.fill_(0.05)[3] = 50.0
    target = torch.randn(64, 64)
    expected = gradients(model, (model(x) * target).sum())["0.weight"]
    model = patch_model(model, "compact", example_inputs=x)
    found = gradients(model, (model(x) * target).sum())["0.weight"]
    assert torch.cosine_similarity(expected, found, dim=0) > 0.999


def test_the_largest_numbers_stay_finite() -> None:
    for dtype in (torch.float16, torch.bfloat16):
        x = torch.full((200,), torch.finfo(dtype).max, dtype=dtype)
        assert torch.equal(from_eight_bits(*to_eight_bits(x), dtype), x)
