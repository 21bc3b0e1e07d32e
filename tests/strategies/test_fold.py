"""Folding was asked for: what other code mistakes for stock weights is right, or said at once."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import timm
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn.utils import parametrize, prune

from lowmem_patch import patch_model, patch_report, unpatch_model
from lowmem_patch.errors import PatchError, UnfoldedWeightsError
from tests.support.configs import FOLD
from tests.support.judge import assert_close, assert_same_outputs
from tests.support.models import randomise
from tests.support.step import warned
from tests.support.toys import Outer, Toy, batch, gated, mlp

BOTH = pytest.mark.parametrize("config", ["paper", FOLD], ids=["paper", "fold"])
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")


def folded(config: Any, model: Any = None) -> tuple[Any, Any]:
    torch.manual_seed(0)
    net = randomise(model or Toy(gated))
    stock = copy.deepcopy(net)
    patch_model(net, config, example_inputs=batch())
    assert patch_report(net).fold_steps
    return net, stock


@BOTH
@pytest.mark.parametrize("target", ["up", "modules_to_save"])
def test_adapter_on_a_folded_linear_is_said_before_training(target: str, config: Any) -> None:
    net, _ = folded(config)
    saves = {"modules_to_save": ["gate"]} if target == "modules_to_save" else {}
    adapted = get_peft_model(
        net, LoraConfig(r=2, target_modules=["up"] if not saves else ["down"], **saves)
    )
    adapted.train()
    with warned() as texts:
        adapted(batch())
        adapted(batch())
    assert len(texts) == 1 and "Linears into which norms had been folded" in texts[0]
    assert "unpatch_model before get_peft_model" in texts[0]
    assert any("Linears into which" in note for note in patch_report(adapted).notes)


@BOTH
def test_adapter_beside_folded_linears_is_no_mistake(config: Any) -> None:
    net, _ = folded(config)
    adapted = get_peft_model(net, LoraConfig(r=2, target_modules=["down"])).train()
    with warned() as texts:
        adapted(batch())
    assert not any("folded" in text for text in texts)


@BOTH
def test_modules_to_save_of_a_folded_norm_is_refused(config: Any) -> None:
    net, _ = folded(config)
    options = LoraConfig(r=2, target_modules=["down"], modules_to_save=["norm"])
    adapted = get_peft_model(net, options)
    with (
        pytest.raises(PatchError, match=r"(?s)set to train.*after get_peft_model"),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        adapted.train()(batch())


@BOTH
@pytest.mark.parametrize("root", [True, False])
def test_state_dict_without_the_norms_is_refused_whole(root: bool, config: Any) -> None:
    net, stock = folded(config, None if root else Outer(Toy(mlp)))
    part, source = (net, stock) if root else (net.block, stock.block)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    linears = {n: v + 1 for n, v in source.state_dict().items() if "norm" not in n}
    with pytest.raises(UnfoldedWeightsError, match=r"without (block\.)?norm\.weight"):
        part.load_state_dict(linears, strict=False)
    if root:
        assert all(torch.equal(net.state_dict()[name], value) for name, value in before.items())


@BOTH
@pytest.mark.parametrize("through", ["linear", "bias"])
def test_weights_of_a_folded_linear_alone_are_refused(through: str, config: Any) -> None:
    net, stock = folded(config, Outer(Toy(mlp)))
    source = stock.block.up.state_dict()
    if through == "bias":
        del source["weight"]
    with pytest.raises(UnfoldedWeightsError, match="whose affine was folded into"):
        net.block.up.load_state_dict(source, strict=False)


@BOTH
def test_folded_state_dicts_still_load(config: Any) -> None:
    net, stock = folded(config, Outer(Toy(mlp)))
    net.load_state_dict(net.state_dict())
    net.block.load_state_dict(net.block.state_dict())
    net.load_state_dict({"head.weight": net.head.weight.detach()}, strict=False)
    copy.deepcopy(net).load_state_dict(net.state_dict())
    stock.load_state_dict(net.state_dict())
    assert_same_outputs(net, stock, batch())
    unpatch_model(net)
    assert not net.block.up._load_state_dict_pre_hooks
    net.block.up.load_state_dict(stock.block.up.state_dict())


@BOTH
def test_hook_on_a_folded_norm_is_said(config: Any) -> None:
    net, stock = folded(config)
    seen: list[torch.Tensor] = []
    handle = net.norm.register_forward_hook(lambda module, args, output: seen.append(output))
    with torch.no_grad(), pytest.warns(UserWarning, match="without gamma and beta"):
        net(batch())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        net.train()(batch())
    patch_model(net, {"norms": "fold"}, example_inputs=batch())
    assert "a forward hook reads it" in {s.name: s.reason for s in patch_report(net).sites}["norm"]
    seen.clear()
    stock.double(), net.double()(batch().double())
    assert_close(seen[-1], stock.norm(stock.enter(batch().double())), "norm")
    handle.remove()


@BOTH
def test_pruned_folded_norm_is_refused(config: Any) -> None:
    net, _ = folded(config)
    prune.l1_unstructured(net.norm, "weight", amount=0.5)
    with pytest.raises(PatchError, match="pruned or parametrized"):
        net(batch())


@BOTH
def test_parametrized_folded_norm_is_refused(config: Any) -> None:
    net, _ = folded(config)
    parametrize.register_parametrization(net.norm, "weight", nn.Softplus())
    with pytest.raises(PatchError, match="pruned or parametrized"):
        net(batch())


def siglip() -> Any:
    torch.manual_seed(0)
    return timm.create_model(
        "vit_base_patch16_siglip_224", img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=4,
        num_classes=0,
    )  # fmt: skip


@BOTH
def test_features_of_a_pooling_vit_stay_right(config: Any) -> None:
    net = randomise(siglip()).eval().double()
    x = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    stock = copy.deepcopy(net)
    patch_model(net, config, example_inputs=x)
    report = {site.name: site for site in patch_report(net).sites}
    assert report["norm"].strategy == "share" and "forward_features" in report["norm"].reason
    assert report["blocks.0.norm1"].strategy == "fold"
    for read in (
        lambda m: m.forward_features(x),
        lambda m: m.get_intermediate_layers(x, n=1, norm=True)[0],
        lambda m: m(x),
    ):
        with torch.no_grad():
            assert_close(read(net), read(stock), "features")


@BOTH
@pytest.mark.parametrize("when", ["before", "loaded"])
def test_optimizer_state_from_before_the_fold_is_said(when: str, config: Any) -> None:
    torch.manual_seed(0)
    net = randomise(Toy(gated))
    optimizer = torch.optim.Adam(net.parameters())
    net(batch()).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    patch_model(net, config, example_inputs=batch())
    if when == "loaded":
        state, optimizer = optimizer.state_dict(), torch.optim.Adam(net.parameters())
        optimizer.load_state_dict(state)
    with pytest.warns(UserWarning, match="make the optimizer after the patch"):
        net(batch())


@BOTH
def test_fresh_optimizer_of_a_folded_model_is_no_mistake(config: Any) -> None:
    net, _ = folded(config)
    optimizer = torch.optim.Adam(p for p in net.parameters() if p.requires_grad)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            optimizer.zero_grad()
            net(batch()).sum().backward()
            optimizer.step()
    assert not [note for note in patch_report(net).notes if "optimizer" in note]


def test_optimizer_state_of_a_linear_with_a_longer_name_is_no_mistake() -> None:
    torch.manual_seed(0)
    linears = (nn.Linear(8, 8) for _ in range(10))
    net = randomise(nn.Sequential(nn.LayerNorm(8), *linears, nn.LayerNorm(8)))
    optimizer = torch.optim.Adam(net[10].parameters())
    net(torch.randn(3, 8)).sum().backward()
    optimizer.step()
    patch_model(net, FOLD, example_inputs=(torch.randn(3, 8),))
    assert [step.norm for step in patch_report(net).fold_steps] == ["0"]  # into "1", and not "10"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        net(torch.randn(3, 8))


def test_optimizer_state_of_another_shape_is_refused_by_torch() -> None:
    torch.manual_seed(0)
    net = randomise(Toy(gated))
    state = torch.optim.Adam(net.parameters()).state_dict()
    patch_model(net, FOLD, example_inputs=batch())
    after = torch.optim.Adam([p for p in net.parameters() if p.requires_grad])
    with pytest.raises(ValueError, match="doesn't match the size"):
        after.load_state_dict(state)


def folded_block() -> nn.Sequential:
    torch.manual_seed(0)
    last = (nn.LayerNorm(8), nn.Linear(8, 8))
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8), *last)
    with torch.no_grad():
        model[1].weight.uniform_(0.5, 2)  # type: ignore[operator]
    return patch_model(model, FOLD, example_inputs=torch.randn(2, 8))


def written(norm: Any) -> None:
    with torch.no_grad():
        norm.weight.mul_(2)


def replaced(norm: Any) -> None:
    norm.weight = nn.Parameter(torch.full((8,), 2.0), requires_grad=False)


@pytest.mark.parametrize("change", [written, replaced])
def test_a_write_into_a_folded_gamma_is_refused(change: Any) -> None:
    model = folded_block()
    model(torch.randn(2, 8))
    change(model[1])
    with pytest.raises(PatchError, match="would have no effect"):
        model(torch.randn(2, 8))


def test_folded_weights_may_be_loaded_again() -> None:
    model, x = folded_block(), torch.randn(2, 8)
    before = model(x)
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    assert torch.equal(model(x), before)
