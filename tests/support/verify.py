"""A model to verify, and what damages each that verification patches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lowmem_patch.api import patch_model
from lowmem_patch.verify import api
from tests.support.models import FAMILIES, build

F32 = (torch.float32,)


def randomised_llama() -> Any:
    return build(FAMILIES["llama"])


def broken(monkeypatch: pytest.MonkeyPatch, damage: Callable[[nn.Module], None]) -> None:
    """Damage every model that verification patches."""

    def patch(model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        patched = patch_model(model, *args, **kwargs)
        damage(patched)
        return patched

    monkeypatch.setattr(api, "patch_model", patch)
