"""What all integrations share leaves a trainer's own state alone."""

from __future__ import annotations

import pytest
import torch

from lowmem_patch.integrations.patching import Patching
from lowmem_patch.planning.report import find_records
from tests.support.models import llama


@pytest.mark.parametrize("fit", [None, "1GiB"])
def test_random_numbers_stay_as_they_are(fit: str | None) -> None:
    """Inputs of a length are drawn; batches and dropouts of the training are not of other numbers for it."""
    model, state = llama(), torch.get_rng_state()
    Patching("exact", fit=fit, sequence_length=16, batch_size=2).patch(model)
    assert find_records(model)
    assert torch.equal(torch.get_rng_state(), state)
