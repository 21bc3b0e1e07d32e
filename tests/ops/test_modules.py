"""The activation modules are thin."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from lowmem_patch.functional import codes_activation
from lowmem_patch.nn.activations import CodesActivation, ReGELU2, ReQuickGELU2, ReSiLU2
from tests.support.saved import saved_storages

MODULES = [
    (ReGELU2(), "gelu"),
    (ReGELU2("tanh"), "gelu_tanh"),
    (ReSiLU2(), "silu"),
    (ReQuickGELU2(), "quick_gelu"),
    (CodesActivation("silu"), "silu"),
]


@pytest.mark.parametrize(("module", "kind"), MODULES)
def test_modules_are_the_function(module: CodesActivation, kind: str) -> None:
    x = torch.randn(3, 5, requires_grad=True)
    for each in (module, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        y, saved = saved_storages(lambda m=each: m(x))
        assert torch.equal(y, codes_activation(x, kind))
        assert sum(saved.values()) == 4
    assert f"strategy=codes, kind={kind}" in repr(module)
    assert not module.state_dict()


def test_unknown_approximation() -> None:
    with pytest.raises(ValueError, match="'none' or 'tanh'"):
        ReGELU2("erf")
