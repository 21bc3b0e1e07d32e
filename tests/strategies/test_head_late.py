"""head: logits that are read after a backward, and after an optimizer's step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import Tensor

from lowmem_patch import patch_model
from lowmem_patch.nn import trained_weights
from tests.support.heads import CLASSES, HEAD, IDS, llama

BATCH = {"input_ids": IDS, "labels": IDS}
OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "SGD, fused": lambda p: torch.optim.SGD(p, lr=0.5, fused=True),
    "Adagrad, fused": lambda p: torch.optim.Adagrad(p, lr=1e-2, fused=True),
}
READERS: dict[str, Callable[[Tensor], Any]] = {
    "clone": lambda y: y.detach().clone(),
    "argmax": lambda y: y.argmax(-1),
    "rows": lambda y: y[:, 1:].argmax(-1),
    "cross entropy": lambda y: F.cross_entropy(y.view(-1, CLASSES), IDS.view(-1)).detach(),
    "numpy": lambda y: torch.from_numpy(numpy.asarray(y.detach())),
}


def _pair(adapted: bool = False) -> tuple[Any, Any]:
    """A model, and a copy of it whose head is patched."""
    model = llama()
    if adapted:
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"]))
    return model, patch_model(copy.deepcopy(model), HEAD, example_inputs=BATCH)


def _outputs(model: Any) -> Any:
    outputs = model(**BATCH)
    outputs.loss.backward()
    return outputs


@pytest.mark.parametrize("detached", [False, True])
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_logits_behind_a_step_are_those_before_or_refused(
    name: str, reader: str, detached: bool
) -> None:
    model, patched = _pair()
    for each in (model, patched):
        held = each(**BATCH)
        y = held.logits.detach() if detached else held.logits
        held.loss.backward()
        before = READERS[reader](each(**BATCH).logits)
        optimizer = OPTIMIZERS[name](each.parameters())
        optimizer.step()
        optimizer.zero_grad()
        if each is model:
            torch.testing.assert_close(READERS[reader](y), before)
            continue
        with pytest.raises(RuntimeError, match="not computed before the weight"):
            READERS[reader](y)


@pytest.mark.parametrize("reader", READERS)
def test_logits_behind_a_backward_are_right(reader: str) -> None:
    wanted, found = (READERS[reader](_outputs(each).logits) for each in _pair())
    torch.testing.assert_close(found, wanted)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
def test_logits_of_a_frozen_head_outlive_a_step() -> None:
    read = []
    for each in _pair(adapted=True):
        outputs = _outputs(each)
        OPTIMIZERS["AdamW, fused"](each.parameters()).step()
        read.append(outputs.logits.detach().clone())
    torch.testing.assert_close(*read)


def test_bits_are_summed_where_somebody_holds_the_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    sums: list[Tensor] = []
    own = trained_weights._sum_of_bits
    monkeypatch.setattr(trained_weights, "_sum_of_bits", lambda t: sums.append(t) or own(t))
    _, patched = _pair()
    patched(**BATCH).loss.backward()
    assert not sums
    outputs = _outputs(patched)
    assert len(sums) == 1 and sums[0].data_ptr() == patched.lm_head.weight.data_ptr()
    assert outputs.logits.argmax(-1).shape == IDS.shape


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_every_single_number_counts(dtype: torch.dtype) -> None:
    for size in ((33, 31), (16, 8)):
        weight = torch.randn(size, dtype=dtype)
        first = trained_weights._sum_of_bits(weight)
        for place in range(weight.numel()):
            changed = weight.clone().flatten()
            changed[place] += 1
            assert not torch.equal(trained_weights._sum_of_bits(changed.view(size)), first)


def test_a_gradient_is_no_array() -> None:
    for each in _pair():
        with pytest.raises(RuntimeError, match="requires grad"):
            numpy.asarray(each(**BATCH).logits)
