"""The activation modules are thin."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from lowmem_patch.constants import STEP_TABLES, ActivationKind
from lowmem_patch.functional import codes_activation
from lowmem_patch.nn.activations import CodesActivation
from tests.support.saved import saved_storages


@pytest.mark.parametrize("kind", STEP_TABLES)
def test_modules_are_the_function(kind: ActivationKind) -> None:
    module = CodesActivation(kind)
    x = torch.randn(3, 5, requires_grad=True)
    for each in (module, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        y, saved = saved_storages(lambda m=each: m(x))
        assert torch.equal(y, codes_activation(x, kind))
        assert sum(saved.values()) == 2 * STEP_TABLES[kind][2].bits
    assert f"strategy=codes, kind={kind}, bits={STEP_TABLES[kind][2].bits}" in repr(module)
    assert not module.state_dict()
