"""A patch that fails late leaves nothing behind, and dtypes under which one failed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowmem_patch import api, patch_model, patch_report
from lowmem_patch.errors import BudgetError, ConfigError, LowmemPatchError, PatchError, TraceError
from lowmem_patch.strategies.swap import is_replacement
from tests.support.configs import FOLD
from tests.support.judge import UNFOLDED, assert_close
from tests.support.models import FAMILIES

Make = Callable[[str], Any]


@pytest.mark.parametrize("config", [FOLD, "exact"], ids=["fold", "exact"])
def test_a_failure_after_the_patch_puts_the_model_back(
    config: Any, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs, model = FAMILIES["llama"].inputs(), make("llama")
    values = {key: value.clone() for key, value in model.state_dict().items()}

    def fails(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("no look")

    monkeypatch.setattr(api, "watch_forwards", fails)
    with pytest.raises(PatchError, match=r"the patch was undone.*no look"):
        patch_model(model, config, example_inputs=inputs)
    assert not any(map(is_replacement, model.modules()))
    assert not any(module._forward_pre_hooks for module in model.modules())
    for key, value in model.state_dict().items():
        assert_close(value, values[key], key, UNFOLDED)
    with pytest.raises(PatchError, match="is not patched"):
        patch_report(model)
    monkeypatch.undo()
    assert patch_report(patch_model(model, config, example_inputs=inputs)).patched


WRONG: dict[str, tuple[type[LowmemPatchError], dict[str, Any]]] = {
    "too small a budget": (BudgetError, {"fit": "100KiB"}),
    "no budget": (ConfigError, {"fit": "lots"}),
    "a budget without inputs": (ConfigError, {"fit": "2GiB", "example_inputs": None}),
    "no preset": (ConfigError, {"preset": "exat"}),
    "no inputs of this model": (TraceError, {"example_inputs": {"nope": torch.ones(1)}}),
}


@pytest.mark.parametrize("earlier", [{"fit": "1GiB"}, {"preset": "paper"}], ids=["fit", "paper"])
@pytest.mark.parametrize("name", WRONG)
def test_an_earlier_patch_stays_where_the_next_one_fails(
    name: str, earlier: dict[str, Any], make: Make
) -> None:
    inputs = FAMILIES["llama"].inputs()
    model = patch_model(make("llama"), example_inputs=inputs, **earlier)
    report, modules = patch_report(model), dict(model.named_modules())
    values = {key: value.clone() for key, value in model.state_dict().items()}
    error, call = WRONG[name]
    with pytest.raises(error):
        patch_model(model, **{"example_inputs": inputs, **call})
    assert patch_report(model) == report
    assert dict(model.named_modules()) == modules
    assert all(torch.equal(value, values[key]) for key, value in model.state_dict().items())


class OfValues(nn.Module):
    """A forward that asks for a value, which only data have."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.act, self.down = (
            nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.act(self.up(self.norm(x))))
        return y if bool(y.sum() < torch.inf) else x


def test_a_model_that_is_traced_with_data_is_patched_again() -> None:
    inputs = (torch.ones(2, 8),)
    model = patch_model(OfValues(), "exact", example_inputs=inputs)
    with pytest.raises(TraceError):
        patch_model(model, "auto", example_inputs=(torch.ones(2, 9),))
    assert patch_report(model).config.name == "exact"
    patch_model(model, "auto", example_inputs=inputs)
    assert patch_report(model).config.name == "auto"


def test_a_check_says_that_the_model_itself_fails() -> None:
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    x = torch.ones(2, 8, dtype=torch.bfloat16)
    with pytest.raises(PatchError, match=r"without a patch, too: RuntimeError: .*dtype"):
        patch_model(model, "exact", example_inputs=x, check=True)
    assert not any(vars(module).keys() & {"forward"} for module in model.modules())


def test_logits_that_a_check_read_are_not_counted(make: Make) -> None:
    inputs = FAMILIES["llama"].inputs()
    model = patch_model(make("llama"), example_inputs=inputs, check=True)
    assert not any("computed whole" in note for note in patch_report(model).notes)
    model(**inputs).logits.isinf()
    assert any("computed whole once" in note for note in patch_report(model).notes)


@pytest.mark.parametrize("preset", ["exact", "compact"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_16_bit_model_under_autocast_to_the_other(
    dtype: torch.dtype, preset: str, make: Make
) -> None:
    other = torch.float16 if dtype == torch.bfloat16 else torch.bfloat16
    inputs, stock = FAMILIES["llama"].inputs(), make("llama").to(dtype)
    late = patch_model(copy.deepcopy(stock), preset, example_inputs=inputs)
    with torch.autocast("cpu", other):
        early = patch_model(copy.deepcopy(stock), preset, example_inputs=inputs)
        for model in (stock, late, early):
            model(**inputs).logits.float().square().mean().backward()
    for name, parameter in stock.named_parameters():
        for model in (late, early):
            found = dict(model.named_parameters())[name].grad
            expected = parameter.grad.double()
            difference = (found.double() - expected).norm()
            assert difference <= 0.1 * expected.norm(), name
