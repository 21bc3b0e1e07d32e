"""How a patched model is run: modes, generation, checkpointing, compile, hooks, second derivatives."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from lowmem_patch import patch_model, saved_bytes
from lowmem_patch.errors import DoubleBackwardError
from tests.ops.helpers import saved_storages, storage_of
from tests.patching.families import FAMILIES
from tests.patching.helpers import (
    MODES,
    Run,
    assert_gradients,
    assert_outputs,
    assert_same_step,
    in_mode,
    randomise,
    run,
    tensors_of,
    truth_of,
    twin_of,
    why_unsupported,
)
from tests.patching.toys import CONFIGS, FOLD, SHARE, Toy, batch, gated, mlp, patched_twin

Make = Callable[[str], Any]
FP32 = MODES["fp32"]


@pytest.mark.parametrize("config", ["paper", "exact", "auto"])
def test_nothing_is_kept_without_gradients(config: str, make: Make) -> None:
    inputs, model = FAMILIES["llama"].inputs(), make("llama")
    with torch.no_grad():
        before = model(**inputs).logits
        patch_model(model, config, example_inputs=inputs)
        for mode in (model.eval(), model.train()):
            with saved_bytes(mode) as saved:
                output = mode(**inputs).logits
            assert saved.total == 0
            assert type(output) is Tensor
            torch.testing.assert_close(output, before, rtol=1e-4, atol=1e-5)
    with torch.inference_mode():
        torch.testing.assert_close(model(**inputs).logits, before, rtol=1e-4, atol=1e-5)


def test_training_flag_reaches_the_originals() -> None:
    net = patch_model(Toy(gated), FOLD, example_inputs=batch())
    assert net.eval().norm.training is False
    assert net.train().act.training is True


@pytest.mark.parametrize("name", ["llama", "t5"])
@pytest.mark.parametrize("config", ["paper", "exact"])
def test_generation_with_a_cache(config: str, name: str, make: Make) -> None:
    model = make(name)
    inputs = {"input_ids": FAMILIES[name].inputs()["input_ids"]}
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    options = {"max_new_tokens": 8, "do_sample": False, "num_beams": 2, "pad_token_id": 0}
    before = model.generate(**inputs, **options)
    patch_model(model, config, example_inputs=FAMILIES[name].inputs())
    assert torch.equal(model.generate(**inputs, **options), before)


@pytest.mark.parametrize("config", ["exact", FOLD], ids=["share", "fold"])
def test_every_hidden_state_is_the_original_one(config: Any, make: Make) -> None:
    for name in ("llama", "bert", "vit", "swin", "t5"):
        inputs, model = FAMILIES[name].inputs(), make(name)
        if hasattr(model, "set_attn_implementation"):
            model.set_attn_implementation("eager")  # which returns attentions
        asked = {**inputs, "output_hidden_states": True, "output_attentions": True}
        before = tensors_of(model(**asked))
        patch_model(model, config, example_inputs=inputs)
        after = tensors_of(model(**asked))
        assert len(before) > 3
        for one, two in zip(after, before, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not-reentrant"])
@pytest.mark.parametrize("mode_name", ["fp32", "autocast"])
def test_gradient_checkpointing(mode_name: str, reentrant: bool, make: Make) -> None:
    mode, plain = MODES[mode_name], make("llama")
    inputs = in_mode(FAMILIES["llama"].inputs(), mode)
    for config in ("exact", {"norms": "fold", "activations": "recompute"}):
        model = patch_model(copy.deepcopy(plain), config, example_inputs=inputs)
        twin = twin_of(plain, model)
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        # a reentrant checkpoint runs again only where its input needs a gradient: embeddings train
        assert_same_step(model.train(), twin.train(), inputs, mode)


@pytest.mark.filterwarnings("ignore:.*use_reentrant parameter:UserWarning")  # of timm 1.0.9
def test_checkpointed_before_patching(make: Make) -> None:
    inputs, plain = FAMILIES["timm-vit"].inputs(), make("timm-vit")
    twin = copy.deepcopy(plain)
    plain.set_grad_checkpointing(True)
    model = patch_model(plain, "exact", example_inputs=inputs)
    assert_same_step(model.train(), twin.train(), inputs, FP32)


@pytest.mark.parametrize("config", [*CONFIGS, "paper"], ids=["fold", "share", "paper"])
def test_second_derivative_is_a_clear_error(config: Any) -> None:
    net = patch_model(randomise(Toy(mlp)), config, example_inputs=batch())
    x = batch().requires_grad_(True)
    (first,) = torch.autograd.grad(net(x).square().sum(), x, create_graph=True)
    with pytest.raises(DoubleBackwardError, match="unpatched"):
        first.sum().backward()


def test_backward_twice_through_a_kept_graph() -> None:
    for config in CONFIGS:
        patched, twin, _ = patched_twin(Toy(gated), config)
        gradients = []
        for model in (patched, twin):
            loss = model(batch()).square().mean()
            loss.backward(retain_graph=True)
            loss.backward()
            gradients.append([p.grad for p in model.parameters() if p.grad is not None])
        for one, two in zip(*gradients, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)


COMPILED = [
    ("llama", "exact", "fp32"), ("llama", "auto", "fp32"), ("gemma", "exact", "fp32"),
    ("timm-vit", "auto", "autocast"), ("timm-vit", "paper", "fp32"), ("roberta", "exact", "autocast"),
    ("timm-swin", "exact", "autocast"), ("llama-lora", "auto", "fp32"), ("timm-vit-lora", "auto", "autocast"),
]  # fmt: skip


class _Wrapped:
    """As little of a tensor as F.pad can be called on."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        return func(args[0].tensor, *args[1:], **(kwargs or {}))


def _why_the_graph_breaks(name: str, unpatched: Any, inputs: dict[str, Any], autocast: Any) -> str:
    """What torch cannot trace though no patch is there: old torch with old transformers."""
    with autocast:
        why = why_unsupported(lambda: unpatched(**inputs))
    if why:
        return why
    if name == "timm-swin":  # pads what a norm gives
        return why_unsupported(lambda x: nn.functional.pad(_Wrapped(x), (0, 1)), torch.ones(2))
    return ""


@pytest.mark.filterwarnings("ignore:.*(script_method|should not be inst):DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize(("name", "config", "mode_name"), COMPILED)
@pytest.mark.parametrize("dynamic", [None, True], ids=["static", "dynamic"])
def test_compiled_without_a_graph_break(
    name: str, config: str, mode_name: str, dynamic: bool | None, make: Make
) -> None:
    """The same gradients as eager, and no more kept."""
    if dynamic and (name, config) not in (("llama", "auto"), ("timm-vit", "auto")):
        pytest.skip("two models with symbolic sizes suffice")
    mode, adapted = MODES[mode_name], name.endswith("-lora")
    name = name.removesuffix("-lora")
    inputs, model = in_mode(FAMILIES[name].inputs(), mode), make(name)
    if adapted:
        adapters = LoraConfig(r=4, target_modules=FAMILIES[name].linears)
        model = randomise(get_peft_model(model, adapters))
    inputs.pop("attention_mask", None)  # transformers looks into a mask, which breaks its own graph
    unpatched = copy.deepcopy(model)
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=mode.autocast is not None)
    with autocast:
        patch_model(model, config, example_inputs=inputs)
    truth, eager = truth_of(model, inputs), run(model, inputs, mode)

    def compiled_run(fullgraph: bool) -> tuple[Any, Run]:
        torch._dynamo.reset()
        made = torch.compile(
            model, fullgraph=fullgraph, backend="aot_eager_decomp_partition", dynamic=dynamic
        )
        return made, run(made, inputs, mode)

    broken = ""
    try:
        compiled, found = compiled_run(fullgraph=True)
    except torch._dynamo.exc.Unsupported:
        broken = _why_the_graph_breaks(name, unpatched, inputs, autocast)
        if not broken:
            raise
        compiled, found = compiled_run(fullgraph=False)
    found.gradients = {
        key.removeprefix("_orig_mod."): gradient for key, gradient in found.gradients.items()
    }
    assert_outputs(found, eager, truth, mode)
    assert_gradients(found, eager, truth, mode)
    if broken:
        pytest.skip(f"right, but torch itself breaks this graph: {broken.splitlines()[0]}")
    kept = {}
    for one, runs in (("eager", model), ("compiled", compiled)):
        with autocast:
            _, saved = saved_storages(lambda runs=runs: runs(**inputs))
        known = {storage_of(t) for t in (*model.parameters(), *model.buffers())}
        kept[one] = sum(size for storage, size in saved.items() if storage not in known)
    assert kept["compiled"] <= 1.05 * kept["eager"]


def _reads_values(output: Any) -> list[Any]:
    """What hooks do to activations; all must work on what a patched module returns."""
    return [
        output.detach().clone(), output.float().mean(), output[..., 0], output[0], output.shape,
        output.size(-1), output.dtype, output.device, output.dim(), len(output), output + 1, 1 - output,
        output / 2, output > 0,
        torch.cat([output, output]), torch.stack([output]), output.chunk(2, -1), torch.isnan(output).any(),
        output.detach().numpy(), output.max().item(), output.abs().sum().tolist(), output.norm(),
        torch.allclose(output, output), output.to(torch.float64), output.t() if output.dim() == 2 else None,
        output @ output.transpose(-1, -2), -output, output**2, output.flatten(0, 1), output.unbind(0),
        nn.functional.layer_norm(output, output.shape[-1:]), output.requires_grad, output.is_cuda,
    ]  # fmt: skip


@pytest.mark.parametrize("grad", [True, False], ids=["with-grad", "under-no-grad"])
@pytest.mark.parametrize("config", CONFIGS, ids=["fold", "share"])
def test_hooks_that_read_activations(config: Any, grad: bool) -> None:
    found: list[list[Any]] = []

    def hook(module: nn.Module, args: Any, output: Any) -> None:
        with torch.set_grad_enabled(grad):
            found.append(_reads_values(output))

    def attach(model: Any) -> None:
        for module in (model.norm, model.act, model.last):
            module.register_forward_hook(hook)

    patched, twin, _ = patched_twin(Toy(gated), config)
    attach(patched), attach(twin)
    with (
        pytest.warns(UserWarning, match="hook sees") if config["norms"] == "fold" else nullcontext()
    ):
        patched(batch())
    twin(batch())
    for ours, theirs in zip(found[:3], found[3:], strict=True):
        for one, two in zip(ours, theirs, strict=True):
            if isinstance(two, Tensor):
                one = one if isinstance(one, Tensor) else one + 0  # a part may be deferred, too
                torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)
            elif isinstance(two, tuple) and isinstance(two[0], Tensor):
                torch.testing.assert_close(tuple(one), two, rtol=1e-4, atol=1e-5)
            elif isinstance(two, (torch.Size, torch.dtype, torch.device, int)):
                assert one == two
    found.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        for model in (patched, twin):
            model(batch()).square().mean().backward()
    for (name, ours), theirs in zip(patched.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.parametrize("config", CONFIGS, ids=["fold", "share"])
@pytest.mark.parametrize("change", ["write", "replace"])
def test_hooks_that_change_activations(change: str, config: Any) -> None:
    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        if change == "replace":
            return output * 2
        output[..., 1] = 0.5
        return None

    patched, twin, _ = patched_twin(Toy(mlp), config)
    outputs = []
    for model in (patched, twin):
        model.act.register_forward_hook(hook)
        outputs.append(model(batch()))
        outputs[-1].square().mean().backward()
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-4, atol=1e-5)
    for (name, ours), theirs in zip(patched.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-5, msg=name)


def test_hook_that_writes_into_what_has_a_narrow_copy() -> None:
    def body(net: Any, x: Tensor) -> Tensor:
        h = net.norm(x)
        return net.down(net.act(net.up(h))) + h

    def hook(module: nn.Module, args: Any, output: Any) -> None:
        with torch.no_grad():
            output.mul_(2.0)

    patched, twin, _ = patched_twin(Toy(body), "exact")
    outputs = []
    for model in (patched, twin):
        model.norm.register_forward_hook(hook)
        with torch.autocast("cpu", torch.bfloat16):
            outputs.append(model(batch()))
    torch.testing.assert_close(outputs[0], outputs[1], rtol=0.03, atol=0.03)


@pytest.mark.parametrize("config", CONFIGS, ids=["fold", "share"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_backward_hooks_are_called_with_the_gradient(when: str, config: Any) -> None:
    seen: list[Tensor] = []

    def attach(model: Any) -> None:
        model.act.register_full_backward_hook(lambda m, inputs, outputs: seen.append(outputs[0]))

    net = Toy(mlp)
    if when == "before":
        attach(net)
    patched, twin, _ = patched_twin(net, config, attach if when == "after" else lambda model: None)
    if when == "after":
        attach(twin)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        for model in (patched, twin):
            model(batch()).square().mean().backward()
    assert len(seen) == 2
    torch.testing.assert_close(seen[0], seen[1], rtol=1e-3, atol=1e-5)


def test_functional_call_with_other_parameters() -> None:
    patched, twin, _ = patched_twin(Toy(gated), SHARE)
    other = {name: p.detach() * 1.5 for name, p in twin.named_parameters()}
    one, two = (torch.func.functional_call(model, other, (batch(),)) for model in (patched, twin))
    torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)


def test_mixed_precision_of_a_t5_that_keeps_wo_in_float32(make: Make) -> None:
    """Its residual is float32 then, and its norms return the dtype of their bf16 weights."""
    inputs, model = FAMILIES["t5"].inputs(), make("t5").to(torch.bfloat16)
    for name, module in model.named_modules():
        if name.endswith(".wo"):
            module.float()
    before = run(model, inputs, MODES["bf16"])
    for config in ("exact", FOLD):
        patched = patch_model(copy.deepcopy(model), config, example_inputs=inputs)
        after = run(patched, inputs, MODES["bf16"])
        error = (after.outputs[0] - before.outputs[0]).norm() / before.outputs[0].norm()
        assert float(error) < 0.05
        assert len(after.gradients) == len(before.gradients) - (4 + 1) * (config is FOLD)
