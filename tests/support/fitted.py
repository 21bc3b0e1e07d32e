"""Models that are fitted to a budget, and what a step of them takes."""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import timm
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    BertConfig,
    BertModel,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTModel,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

from lowmem_patch import api, patch_model, patch_report
from lowmem_patch.config import PatchConfig
from lowmem_patch.memory import Training
from lowmem_patch.memory.sharding import states_on_one
from lowmem_patch.memory.step import run_step
from lowmem_patch.nn.checkpointing import is_checkpointed
from lowmem_patch.nn.own import given_forward
from lowmem_patch.planning import fit_model
from lowmem_patch.planning.fit import Fitting
from lowmem_patch.planning.fit_report import FitReport
from lowmem_patch.planning.planner import Planned, plan_model
from lowmem_patch.strategies.protocol import Facts
from lowmem_patch.tracing.inputs import as_example_inputs
from lowmem_patch.tracing.quantised import held_beside
from lowmem_patch.tracing.shadow import Shadow
from tests.support.live import LiveBytes
from tests.support.models import llama_of
from tests.support.quantised import qlora
from tests.support.step import warned
from tests.support.versions import before

GIB = 2**30


def tokens(rows_: int = 4, length: int = 48) -> Any:
    return torch.randint(3, 60, (rows_, length), generator=torch.Generator().manual_seed(5))


def llama_lora() -> Any:
    config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, lora_dropout=0.1)
    return get_peft_model(llama_of(num_hidden_layers=3), config)


def vit() -> Any:
    config = ViTConfig(
        hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=64, image_size=32,
        patch_size=4, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return ViTModel(config, add_pooling_layer=False)


def swin() -> Any:
    return timm.create_model(
        "swin_tiny_patch4_window7_224", img_size=64, window_size=4, embed_dim=16, depths=(2, 3),
        num_heads=(2, 2), num_classes=5, drop_path_rate=0.1,
    )  # fmt: skip


def bert() -> Any:
    config = BertConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
    )
    return BertModel(config, add_pooling_layer=False)


def t5() -> Any:
    config = T5Config(
        vocab_size=64,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
    )
    return T5ForConditionalGeneration(config)


def whisper() -> Any:
    if before("transformers", "5.7"):
        pytest.skip("transformers 5.6's Whisper runs on data alone: a BudgetError says so")
    config = WhisperConfig(
        vocab_size=64, d_model=32, encoder_layers=2, decoder_layers=3, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, num_mel_bins=8, dropout=0.1,
        max_source_positions=32, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    return WhisperForConditionalGeneration(config)


def numbers(*shape: int) -> Any:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(6))


MODELS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "llama": (lambda: llama_of(num_hidden_layers=4), lambda: {"input_ids": tokens()}),
    "llama-lora": (llama_lora, lambda: {"input_ids": tokens()}),
    "llama-qlora-4bit": (
        lambda: qlora("4bit", num_hidden_layers=3),
        lambda: {"input_ids": tokens()},
    ),
    "llama-qlora-8bit": (
        lambda: qlora("8bit", num_hidden_layers=2),
        lambda: {"input_ids": tokens()},
    ),
    "llama-qlora-wrapper": (
        lambda: qlora("wrapper", num_hidden_layers=2),
        lambda: {"input_ids": tokens()},
    ),
    "vit": (vit, lambda: {"pixel_values": numbers(4, 3, 32, 32)}),
    "swin": (swin, lambda: numbers(4, 3, 64, 64)),
    "bert": (bert, lambda: {"input_ids": tokens()}),
    "t5": (t5, lambda: {"input_ids": tokens(), "decoder_input_ids": tokens(4, 32)}),
    "whisper": (
        whisper,
        lambda: {"input_features": numbers(2, 8, 64), "decoder_input_ids": tokens(2, 16)},
    ),
}


def made(name: str) -> tuple[Any, Any]:
    torch.manual_seed(0)
    return MODELS[name][0]().train(), MODELS[name][1]()


def measured_peak(model: Any, inputs: Any) -> int:
    """Bytes at the peak of a real step, counted storage by storage; model states and host memory are not."""
    inputs = as_example_inputs(inputs)
    with warned():
        run_step(model, inputs)  # looks at gammas, and fills the buffers of the host
    model.zero_grad(set_to_none=True)
    with LiveBytes() as live:
        live.ignore(*model.parameters(), *model.buffers(), *held_beside(model))
        live.ignore(*host_memory(model))
        live.count(*inputs.args, *inputs.kwargs.values())
        run_step(model, inputs)
        return live.peak


def host_memory(model: Any) -> list[torch.Tensor]:
    """Its buffers that wait for the next step."""
    blocks: list[Any] = [module for module in model.modules() if is_checkpointed(module)]
    hosts = [given_forward(block).args[1].host for block in blocks]
    free = [waiting for host in hosts if host is not None for waiting in host.free.values()]
    return [buffer for buffers in free for buffer in buffers]


def least_of(error: str) -> int:
    found = re.search(r"least budget is [^(]*\((\d+) bytes\)", error)
    assert found is not None, error
    return int(found[1])


def fitted(model: Any, inputs: Any, budget: int, config: str = "auto") -> tuple[Any, FitReport]:
    model = copy.deepcopy(model)
    with warned():
        patch_model(model, config, example_inputs=inputs, fit=budget)
    report = patch_report(model).fit
    assert report is not None and report.predicted <= budget == report.budget
    return model, report


def assert_predicted(report: FitReport, model: Any, inputs: Any, more: int = 0) -> None:
    """Never below what is measured, and at most 3 % above, and ``more`` bytes."""
    measured = measured_peak(model, inputs)
    predicted = report.predicted - report.parameters - report.optimizer_state
    assert measured <= predicted <= 1.03 * measured + more, (report.levels, predicted, measured)


class Known:
    """What was planned in `planned_once`, by what it was planned from."""

    def __init__(self) -> None:
        self.plans: list[tuple[Any, Planned]] = []
        self.fittings: list[tuple[Any, Fitting]] = []


@contextlib.contextmanager
def planned_once(known: Known | None = None) -> Iterator[None]:
    """In here a model, which nothing else may change, is planned once for all budgets: a plan is data about
    the trace, the same for each copy, and a budget chooses from the same steps on fake tensors.

    Args:
        known: of several such contexts, in which equal models are planned once.
    """
    known = Known() if known is None else known
    plans, fittings = known.plans, known.fittings

    def kept(found: list[tuple[Any, Any]], key: Any, make: Callable[[], Any]) -> Any:
        for earlier, value in found:
            if earlier == key:
                return value
        found.append((key, make()))
        return found[-1][1]

    def plan(model: Any, config: PatchConfig, inputs: Any) -> Planned:
        trained = [(name, p.shape, p.requires_grad) for name, p in model.named_parameters()]
        key = (config, str(as_example_inputs(inputs)), trained, model.training)
        made: Planned = kept(plans, key, lambda: plan_model(model, config, inputs))
        return made

    def fitting(
        model: Any, shadow: Shadow, facts: Facts, training: Training, **how: Any
    ) -> Fitting:
        key = id(shadow), states_on_one(model, training), training
        made: Fitting = kept(fittings, key, lambda: Fitting(model, shadow, facts, training, **how))
        return made

    with (
        mock.patch.object(api, "plan_model", plan),
        mock.patch.object(fit_model, "Fitting", fitting),
    ):
        yield
