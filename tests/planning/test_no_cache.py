"""Reports of models without a cache of keys and values: no mask is counted, and no repeated heads."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lowmem_patch import patch_model, patch_report, saved_bytes
from tests.support.heads import llama

IDS = torch.arange(2 * 48).view(2, 48) % 64


@pytest.mark.parametrize("config", [True, False], ids=["cache", "no cache"])
@pytest.mark.parametrize("given", [{}, {"use_cache": False}], ids=["config", "argument"])
def test_a_report_counts_what_a_run_saves(config: bool, given: dict[str, Any]) -> None:
    model = llama()
    model.config.use_cache = config
    batch = {"input_ids": IDS, **given}
    with saved_bytes(model) as before:
        model(**batch)
    report = patch_report(patch_model(model, "exact", example_inputs=batch))
    model(**batch)  # angles that are made once
    with saved_bytes(model) as after:
        model(**batch)
    assert (report.saved_before, report.saved_after) == (before.activations, after.activations)
