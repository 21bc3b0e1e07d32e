"""A patch that fails late leaves nothing behind, and dtypes under which one failed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lowmem_patch import api, patch_model, patch_report
from lowmem_patch.errors import PatchError
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

    monkeypatch.setattr(api, "watch_first_forward", fails)
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
