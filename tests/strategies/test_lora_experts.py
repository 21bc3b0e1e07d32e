"""PEFT's adapters of experts: their weights' sums with the adapters are not made, and never saved."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from torch import Tensor, nn

from lowmem_patch import patch_model, patch_report, saved_bytes, unpatch_model
from lowmem_patch.nn.defer import defer
from lowmem_patch.nn.deferred_experts import AdaptedWeight, GatheredRows
from tests.support.judge import assert_accurate, assert_close, assert_equal
from tests.support.models import randomise
from tests.support.step import BF16, FP32, MODES, Mode, Step, cast, step, truth_of, twin_of

pytestmark = [
    # PEFT reads a name that transformers has since deprecated
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*_pattern keys:RuntimeWarning"),
]

WIDTH, INNER, EXPERTS = 32, 24, 4
SIZES = {
    "vocab_size": 64, "hidden_size": WIDTH, "moe_intermediate_size": INNER, "intermediate_size": INNER,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts_per_tok": 2,
    "num_local_experts": EXPERTS, "num_experts": EXPERTS, "shared_expert_intermediate_size": 40,
    "head_dim": 8, "n_routed_experts": EXPERTS, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
NAMES = ("Mixtral", "Qwen3Moe", "Qwen2Moe", "GptOss", "Glm4Moe")
PARAMETERS = ("experts.gate_up_proj", "experts.down_proj")


def adapted(name: str, how: str = "grouped_mm", rank: int = 3, **options: Any) -> Any:
    """A tiny causal LM, whose experts and attention have adapters that are not zero."""
    known = getattr(transformers, f"{name}Config")
    names = known().to_dict().keys() | {"num_local_experts"}
    sizes = {key: value for key, value in SIZES.items() if key in names}
    torch.manual_seed(0)
    config = known(**sizes, experts_implementation=how, pad_token_id=0, use_cache=False)
    model = randomise(getattr(transformers, f"{name}ForCausalLM")(config))
    given = {
        "target_modules": ["q_proj", "v_proj"],
        "target_parameters": list(PARAMETERS),
        **options,
    }
    lora = LoraConfig(r=rank, lora_alpha=5, init_lora_weights=False, **given)
    return get_peft_model(model, lora).train()


def tokens() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {"input_ids": torch.randint(1, 64, (2, 9), generator=generator)}


def patched(model: Any) -> tuple[Any, Any]:
    """The model and a copy of it from before the patch."""
    stock = copy.deepcopy(model)
    return patch_model(model, "exact", example_inputs=tokens()), stock


def assert_same(model: Any, stock: Any, mode: Mode = FP32) -> None:
    """As accurate as the unpatched model; the truth is of a loop, since grouped_mm has no float64."""
    exact = copy.deepcopy(stock)
    exact.config._experts_implementation = exact.base_model.model.config._experts_implementation = (
        "eager"
    )
    exact.base_model.model.gradient_checkpointing_disable()
    own = step(stock, tokens(), mode)
    assert_accurate(step(model, tokens(), mode), own, truth_of(exact, tokens()), mode)


def weights_saved(model: Any) -> set[tuple[int, ...]]:
    """The shapes of what autograd holds of experts that are those of their weights."""
    with saved_bytes(model) as saved:
        model(**tokens())
    sizes = {tuple(sorted((WIDTH, inner))) for inner in (INNER, 2 * INNER)}
    return {
        item.shape
        for item in saved.storages
        if "experts" in item.savers[0].module and tuple(sorted(item.shape[-2:])) in sizes
    }


CASES = [
    *((name, "grouped_mm", mode) for name in NAMES for mode in MODES),
    *((name, how, "fp32") for name in ("Mixtral", "GptOss") for how in ("eager", "batched_mm")),
    ("Mixtral", "eager", "autocast"),
]


@pytest.mark.parametrize(("name", "how", "mode"), CASES)
def test_experts_with_adapters_save_no_weights(name: str, how: str, mode: str) -> None:
    model = cast(adapted(name, how), MODES[mode].weights)
    stock = copy.deepcopy(model)
    with torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast"):
        patch_model(model, "exact", example_inputs=tokens())
    assert_same(model, twin_of(stock, model), MODES[mode])
    found, expected = (step(one, tokens(), MODES[mode], count=True).saved for one in (model, stock))
    if how != "batched_mm":  # which saves a weight for each row
        assert found < expected
        assert weights_saved(stock)
        assert not weights_saved(model)
    assert how != "grouped_mm" or patch_report(model).saved_after == found


@pytest.mark.parametrize("name", ["Qwen3Moe", "Glm4Moe"])
def test_a_router_with_an_adapter(name: str) -> None:
    """GLM's computes in float32, whatever the weights are."""
    model = adapted(name, target_modules="all-linear", target_parameters=None)
    gate = model.base_model.model.model.layers[1].mlp.gate
    assert gate.parameter_name == "weight"
    model, stock = patched(model)
    assert_same(model, stock)
    assert any("adapt a parameter" in note for note in patch_report(model).notes)


def assert_trains_alike(model: Any, stock: Any, steps: int = 4) -> None:
    """Trajectories of both, float32, in which every step changes what the next one reads."""
    for one in (model, stock):
        optimizer = torch.optim.SGD([p for p in one.parameters() if p.requires_grad], lr=0.05)
        for _ in range(steps):
            optimizer.zero_grad()
            one(**tokens(), labels=tokens()["input_ids"]).loss.backward()
            optimizer.step()
    theirs = dict(stock.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter, theirs[name], atol=2e-5, rtol=2e-4, msg=name)


def test_a_life_of_adapters() -> None:
    """Trained, disabled, merged and unmerged, saved and loaded, and taken off."""
    model, stock = patched(adapted("Mixtral"))
    assert_trains_alike(model, stock)
    for one in (model, stock):
        one.eval()
    with torch.no_grad():
        torch.testing.assert_close(model(**tokens()).logits, stock(**tokens()).logits)
        with model.disable_adapter(), stock.disable_adapter():
            torch.testing.assert_close(model(**tokens()).logits, stock(**tokens()).logits)
    found = get_peft_model_state_dict(model)
    assert found.keys() == get_peft_model_state_dict(stock).keys()
    for one in (model, stock):
        one.train().merge_adapter()
    torch.testing.assert_close(model(**tokens()).logits, stock(**tokens()).logits)
    for one in (model, stock):
        one.unmerge_adapter()
    assert_same(model, stock)
    unpatch_model(model)
    assert_equal(step(model, tokens()), step(copy.deepcopy(model), tokens()))
    experts = model.base_model.model.model.layers[0].mlp.experts.get_base_layer()
    assert "gate_up_proj" not in vars(experts)


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("how", ["grouped_mm", "eager"])
def test_an_evaluation_before_the_backward_is_no_write(how: str, guard: Any) -> None:
    """PEFT's own sets the weights to themselves, which torch counts as writes; real ones are still errors."""
    model, stock = patched(adapted("Mixtral", how))

    def lived(one: Any) -> Step:
        one.zero_grad()
        logits = one.train()(**tokens()).logits
        with guard():
            seen = one.eval()(**tokens()).logits
        logits.square().sum().backward()
        return Step([logits.detach(), seen.clone()], gradients_of(one))

    found, expected = lived(model), lived(stock)
    for ours, theirs in zip(found.outputs, expected.outputs, strict=True):
        torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(found.gradients, expected.gradients)
    loss = model.train()(**tokens()).logits.sum()
    with torch.no_grad():
        model.eval()(**tokens())
        model.base_model.model.model.layers[0].mlp.experts.get_base_layer().down_proj.mul_(2)
    with pytest.raises(RuntimeError, match=r"written|modified"):
        loss.backward()


def gradients_of(model: Any) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_two_adapters_at_a_time_are_left_to_peft() -> None:
    model = adapted("Mixtral")
    lora = LoraConfig(
        r=2, init_lora_weights=False, target_parameters=list(PARAMETERS), target_modules=[]
    )
    model.add_adapter("other", lora)
    model.base_model.set_adapter(["default", "other"])
    model, stock = patched(model.train())
    assert_same(model, stock)
    for one in (model, stock):
        one.base_model.set_adapter("other")
    assert_same(model, stock)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_blocks_with_adapted_experts(reentrant: bool) -> None:
    model, stock = patched(adapted("Qwen3Moe"))
    for one in (model, stock):
        one.enable_input_require_grads()
        one.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert_same(model, stock)


def test_a_forward_that_fails_leaves_the_parameter() -> None:
    model, _ = patched(adapted("Mixtral"))
    experts = model.base_model.model.model.layers[0].mlp.experts.get_base_layer()

    def fail(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = experts.act_fn.register_forward_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        model(**tokens())
    handle.remove()
    assert "gate_up_proj" not in vars(experts)
    assert isinstance(experts.gate_up_proj, nn.Parameter)


def test_a_reader_that_nobody_knows_gets_the_sum() -> None:
    """Whoever reads the weight otherwise has its values, and a gradient of them."""
    model, stock = patched(adapted("Mixtral", "eager"))
    for one in (model, stock):
        experts = one.base_model.model.model.layers[0].mlp.experts.get_base_layer()

        def looks(module: Any, args: Any, output: Tensor) -> Tensor:
            return output + module.gate_up_proj.square().mean() + module.down_proj[1].mT.sum()

        experts.register_forward_hook(looks)
    assert_same(model, stock)


@pytest.mark.parametrize("transposed", [Tensor.t, lambda w: w.T, lambda w: w.mT])
def test_a_weight_that_is_transposed_in_any_way_is_not_saved(transposed: Any) -> None:
    x, w, left, right = (
        torch.randn(*shape, dtype=torch.float64, requires_grad=True)
        for shape in ((3, 6), (8, 6), (8, 2), (2, 6))
    )
    found = []
    for weight in (w + 0.5 * left @ right, defer(AdaptedWeight(0.5), (w, left, right))):
        saved: list[Tensor] = []

        def pack(tensor: Tensor, into: list[Tensor] = saved) -> Tensor:
            into.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            y = x @ transposed(weight)
        found.append(torch.autograd.grad(y.square().sum(), (x, w, left, right)))
    own = {t.untyped_storage().data_ptr() for t in (x, w, left, right)}
    made = [t for t in saved if t.untyped_storage().data_ptr() not in own]
    assert [tuple(t.shape) for t in made] == [(3, 2)]
    for ours, theirs in zip(found[1], found[0], strict=True):
        assert_close(ours, theirs, "gradient")


class Rewritten(nn.Module):
    """Writes into what the weights of experts were multiplied with, before the product is weighed."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / 5)
        self.writes = False

    def forward(self, x: Tensor) -> Tensor:
        rows = self.inner(x) * 2
        y = torch.bmm(rows, self.down)
        if self.writes:
            rows.add_(1.0)
        return y * self.inner(x).mean(-1, keepdim=True)


def test_rows_that_are_written_before_their_product_is_weighed_are_an_error() -> None:
    """As of the unpatched model, which saved them for the product."""
    lora = LoraConfig(r=4, init_lora_weights=False, target_modules=[], target_parameters=["down"])
    model: Any = get_peft_model(randomise(nn.Sequential(Rewritten())), lora)
    x = torch.randn(EXPERTS, 6, WIDTH, requires_grad=True)
    patch_model(model, "exact", example_inputs=(x,))
    model(x).sum().backward()
    model.base_model.model[0].get_base_layer().writes = True
    with pytest.raises(RuntimeError, match="written in place after it was made"):
        model(x).sum().backward()


@pytest.mark.gpu
@pytest.mark.parametrize("rank", [4, 16])
@pytest.mark.parametrize("name", ["Qwen3Moe", "GptOss"])
def test_adapted_experts_on_a_gpu(name: str, rank: int) -> None:
    """Rows of a rank of 4 are too short for torch's grouped_mm, and are padded."""
    model = adapted(name, rank=rank).to("cuda", torch.bfloat16)
    stock = copy.deepcopy(model)
    given = {key: value.cuda() for key, value in tokens().items()}
    patch_model(model, "exact", example_inputs=given)
    exact = copy.deepcopy(stock)
    exact.config._experts_implementation = exact.base_model.model.config._experts_implementation = (
        "eager"
    )
    own = step(stock, given, BF16)
    assert_accurate(step(model, given, BF16), own, truth_of(exact, given), BF16)


@pytest.mark.parametrize("name", ["Qwen3Moe", "GptOss"])
def test_rows_that_are_not_saved_are_not_held(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Autograd saves parts of the first product, and with them what Python hangs on it."""
    model, _ = patched(adapted(name))
    gathered: list[Any] = []
    of = GatheredRows.of

    def noted(*given: Any) -> Any:
        h = of(*given)
        gathered.append(weakref.ref(h.untyped_storage()))
        return h

    monkeypatch.setattr(GatheredRows, "of", noted)
    output = model(**tokens())
    assert gathered  # of which a look at the shape is no use
    assert [one() for one in gathered if one() is not None] == []
    output.logits.sum().backward()
