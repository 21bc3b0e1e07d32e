"""transformers' Trainer with the callback: the same training, fewer bytes, and a report."""

from __future__ import annotations

import copy
import json
import logging
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import peft
import pytest
import torch
import transformers
from torch import nn
from transformers import LlamaForCausalLM, Trainer

from lowmem_patch import patch_model, patch_report, saved_bytes
from lowmem_patch.errors import ConfigError, TraceError
from lowmem_patch.integrations import LowmemTrainerCallback
from lowmem_patch.planning.report import find_records
from tests.integrations.trainings import (
    STEPS,
    arguments,
    assert_same_training,
    token_rows,
    trained_by,
    truth_by,
)
from tests.support.models import llama
from tests.support.step import AUTOCAST, FP32
from tests.support.versions import before

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*is_gradient_checkpointing.*:FutureWarning",  # PEFT's own
    "ignore:None of the inputs have requires_grad:UserWarning",
    # named so in all versions of transformers; 5.23 has a second name for it
    "ignore:.gradient_checkpointing.*is deprecated:FutureWarning",
)
Make = Callable[..., Trainer]


def adapted(model: Any) -> Any:
    torch.manual_seed(1)
    config = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights="gaussian")
    model = peft.get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.uniform_(-0.1, 0.1)
    return model.train()


@pytest.fixture(autouse=True)
def usual_logs() -> Iterator[None]:
    """As a program finds them, whatever a command that ran here before has silenced."""
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_warning()
    yield
    transformers.logging.set_verbosity(before)


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """A trainer of the tiny LLaMA; with a preset, with the callback."""

    def build(
        preset: Any = None, *, lora: bool = False, model: Any = None, **changes: Any
    ) -> Trainer:
        if model is None:
            model = adapted(llama()) if lora else llama()
        callbacks = [] if preset is None else [LowmemTrainerCallback(preset)]
        return Trainer(
            model, arguments(tmp_path, **changes), train_dataset=token_rows(), callbacks=callbacks
        )

    return build


@pytest.mark.parametrize("changes", [{}, {"bf16": True}, {"gradient_accumulation_steps": 2}])
@pytest.mark.parametrize("lora", [False, True])
def test_exact_trains_as_the_unpatched_model(make: Make, lora: bool, changes: Any) -> None:
    own = trained_by(lambda: make(lora=lora, **changes))
    found = trained_by(lambda: make("exact", lora=lora, **changes))
    steps = {**changes, "bf16": False}
    mode = AUTOCAST if changes.get("bf16") else FP32
    assert_same_training(found, own, truth_by(lambda: make(lora=lora, **steps)), mode)
    assert found.saved < own.saved


@pytest.mark.parametrize("lora", [False, True])
def test_saves_what_a_patch_by_hand_saves(make: Make, lora: bool) -> None:
    by_hand = adapted(llama()) if lora else llama()
    patch_model(by_hand, "exact")
    expected = trained_by(lambda: make(model=by_hand)).saved
    assert trained_by(lambda: make("exact", lora=lora)).saved == expected


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("lora", [False, True])
def test_gradient_checkpointing_is_composed_with(make: Make, lora: bool, reentrant: bool) -> None:
    changes = {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": reentrant},
    }
    own = trained_by(lambda: make(lora=lora, **changes))
    found = trained_by(lambda: make("exact", lora=lora, **changes))
    assert_same_training(found, own, truth_by(lambda: make(lora=lora)))
    assert found.saved <= own.saved


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:.*should not be instantiated:DeprecationWarning"
)  # dynamo's own
def test_torch_compile_is_composed_with(make: Make) -> None:
    changes = {"torch_compile": True, "torch_compile_backend": "aot_eager"}
    torch._dynamo.reset()
    found = trained_by(lambda: make("exact", **changes))
    assert_same_training(found, trained_by(lambda: make()), truth_by(lambda: make()))


def test_the_log_says_what_was_done(make: Make) -> None:
    handler = Listening()
    logger = logging.getLogger("transformers.lowmem_patch")
    logger.addHandler(handler)
    trainer = make("auto", gradient_checkpointing=True)
    logger.removeHandler(handler)
    report = patch_report(trainer.model)
    (text,) = handler.texts
    assert "LlamaForCausalLM, preset auto: 7 of 7 sites patched" in text
    assert f"{report.saved_before:,} -> {report.saved_after:,}" in text
    assert "bytes are those of that example; give seq" in text
    assert "gradient_checkpointing=True keeps a block's input alone" in text


class Listening(logging.Handler):
    """Remembers what the trainer's default verbosity lets through."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def test_a_report_lies_beside_the_checkpoints(make: Make, tmp_path: Path) -> None:
    trainer = make("exact", save_strategy="steps", save_steps=2)
    trainer.train()
    data = json.loads((tmp_path / "lowmem_patch.json").read_text())
    assert (tmp_path / "checkpoint-2").is_dir()
    (model,) = data["models"]
    report = patch_report(trainer.model)
    assert (model["saved_before"], model["saved_after"]) == (
        report.saved_before,
        report.saved_after,
    )
    assert len(model["sites"]) == len(report.sites) and data["versions"]["torch"]


def test_the_bytes_of_the_report_are_those_of_a_forward(make: Make) -> None:
    trainer = make("exact")
    tokens = torch.zeros(2, 16, dtype=torch.long) + 5  # as example inputs are
    with saved_bytes(trainer.model) as saved:
        trainer.model(input_ids=tokens)
    assert saved.activations == patch_report(trainer.model).saved_after


@pytest.mark.parametrize("lora", [False, True])
def test_resumes_from_a_checkpoint_of_either_kind(make: Make, tmp_path: Path, lora: bool) -> None:
    if lora and before("peft", "0.19"):
        pytest.skip("transformers resumes no adapter with PEFT 0.18.1")
    saves = {"save_strategy": "steps", "save_steps": 2, "lora": lora}
    straight = trained_by(lambda: make("exact", **saves))
    checkpoint = str(tmp_path / "checkpoint-2")
    resumed = {}
    for preset in ("exact", None):
        trainer = make(preset, lora=lora)
        trainer.train(resume_from_checkpoint=checkpoint)
        resumed[preset] = trainer
    last = straight.outputs[0][-1]
    for trainer in resumed.values():
        loss = next(h["loss"] for h in reversed(trainer.state.log_history) if "loss" in h)
        assert loss == pytest.approx(float(last), rel=1e-4)
        assert trainer.state.global_step == STEPS
    # the patched and the unpatched one have gone the same way
    ours, theirs = (resumed[preset].model.state_dict() for preset in ("exact", None))
    assert list(ours) == list(theirs)
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], rtol=1e-4, atol=1e-6)


def test_a_saved_model_is_a_stock_model(make: Make, tmp_path: Path) -> None:
    trainer = make("auto")
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    stock = LlamaForCausalLM.from_pretrained(tmp_path / "saved")
    assert not find_records(stock)
    for name, value in trainer.model.state_dict().items():
        assert torch.equal(stock.state_dict()[name], value), name


def test_a_model_made_anew_by_model_init_is_patched(tmp_path: Path) -> None:
    callback = LowmemTrainerCallback("exact")
    made: list[Any] = []

    def model_init() -> Any:
        made.append(llama())
        return made[-1]

    trainer = Trainer(
        model_init=model_init,
        args=arguments(tmp_path),
        train_dataset=token_rows(),
        callbacks=[callback],
    )
    trainer.train()
    assert len(made) == 2 and trainer.model is made[-1]
    assert patch_report(trainer.model).patched


def test_a_callback_works_for_a_second_trainer(make: Make) -> None:
    trainer = make("exact")
    again = make("exact", model=trainer.model)
    assert again.model is trainer.model and len(find_records(again.model)) == 1


@pytest.mark.parametrize(
    ("preset", "error"), [("nonsense", "unknown preset"), ({"norm": "keep"}, "unknown key norm")]
)
def test_a_mistake_is_said_before_a_trainer_is_there(preset: Any, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        LowmemTrainerCallback(preset)


def test_an_unknown_model_needs_example_inputs(tmp_path: Path) -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.up, self.act, self.down = (
                nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 1),
            )  # fmt: skip

        def forward(self, x: torch.Tensor) -> Any:
            return {"loss": self.down(self.act(self.up(self.norm(x)))).square().mean()}

    rows = [{"x": torch.randn(8)} for _ in range(8)]
    with pytest.raises(TraceError, match="example_inputs="):
        Trainer(
            Own(),
            arguments(tmp_path),
            train_dataset=rows,
            callbacks=[LowmemTrainerCallback("exact")],
        )
    callback = LowmemTrainerCallback("exact", example_inputs={"x": torch.randn(2, 8)})
    trainer = Trainer(Own(), arguments(tmp_path), train_dataset=rows, callbacks=[callback])
    trainer.train()
    assert patch_report(trainer.model).patched


def budget(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The calls of ``patch_model``, which in them does nothing of a budget."""
    from lowmem_patch.integrations import patching

    calls: list[dict[str, Any]] = []

    def patch(model: Any, config: Any, *, example_inputs: Any = None, **more: Any) -> Any:
        calls.append({"inputs": str(example_inputs), **more})
        return patch_model(model, config)

    monkeypatch.setattr(patching, "patch_model", patch)
    return calls


def test_a_budget_is_passed_on_with_the_sizes_of_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = budget(monkeypatch)
    callback = LowmemTrainerCallback("exact", fit="24GiB", sequence_length=33)
    args = arguments(tmp_path, per_device_train_batch_size=3, gradient_accumulation_steps=2)
    Trainer(llama(), args, callbacks=[callback])
    step = {"inputs": "input_ids 3x33", "accumulation": 2, "optimizer": "sgd"}
    assert calls == [{**step, "fit": "24GiB"}]
    Trainer(llama(), arguments(tmp_path), callbacks=[LowmemTrainerCallback("exact")])
    assert calls[1:] == [{"inputs": "None"}]
    callback = LowmemTrainerCallback("exact", sequence_length=33)  # for the report alone
    Trainer(llama(), args, callbacks=[callback])
    assert calls[2:] == [{"inputs": "input_ids 3x33"}]


@pytest.mark.parametrize("length", ["48", -3, 0, True])
def test_a_length_that_is_none_is_refused_before_a_trainer_is_there(length: Any) -> None:
    with pytest.raises(ConfigError, match=f"^sequence_length {length!r} is no number of tokens"):
        LowmemTrainerCallback("exact", sequence_length=length)


def test_the_log_says_what_a_budget_chose(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    callback = LowmemTrainerCallback("exact", fit="1GiB", sequence_length=9)
    Trainer(llama(), arguments(tmp_path), callbacks=[callback])
    assert "fit 1GiB: predicted peak" in caplog.text and "patched" in caplog.text
    assert "bytes are those of that example" not in caplog.text


def test_a_budget_needs_the_length_of_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    budget(monkeypatch)
    with pytest.raises(ConfigError, match="does not tell: give sequence_length=, or"):
        Trainer(llama(), arguments(tmp_path), callbacks=[LowmemTrainerCallback(fit="24GiB")])


def test_a_budget_beside_gradient_checkpointing_is_refused(tmp_path: Path) -> None:
    model = llama()
    args = arguments(tmp_path, gradient_checkpointing=True)
    with pytest.raises(ConfigError, match="set gradient_checkpointing=False"):
        Trainer(model, args, callbacks=[LowmemTrainerCallback(fit="24GiB", sequence_length=9)])
    assert not find_records(model)


class FakeLiger(types.ModuleType):
    """What of Liger is asked for: its switches by model type."""

    @staticmethod
    def for_llama(
        rope: bool = True,
        cross_entropy: bool = False,
        fused_linear_cross_entropy: bool = True,
        rms_norm: bool = True,
        swiglu: bool = True,
        model: Any = None,
    ) -> None:
        """Apply nothing."""

    MODEL_TYPE_TO_APPLY_LIGER_FN: ClassVar = {"llama": for_llama}


@pytest.fixture
def liger(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    for name in (
        "liger_kernel",
        "liger_kernel.transformers",
        "liger_kernel.transformers.monkey_patch",
    ):
        monkeypatch.setitem(sys.modules, name, FakeLiger(name))


@pytest.mark.usefixtures("liger")
@pytest.mark.parametrize("lora", [False, True])
def test_liger_over_the_patch_is_refused_with_what_to_set(make: Make, lora: bool) -> None:
    model = adapted(llama()) if lora else llama()
    with pytest.raises(ConfigError) as refused:
        make("exact", model=model, use_liger_kernel=True)
    text = str(refused.value)
    assert "use_liger_kernel=True sets Liger's rope, rms_norm, swiglu over" in text
    assert '{"rope": False, "rms_norm": False, "swiglu": False}' in text
    assert not find_records(model)


@pytest.mark.usefixtures("liger")
def test_the_loss_of_liger_is_composed_with(make: Make) -> None:
    off = {"rope": False, "rms_norm": False, "swiglu": False}
    trainer = make("exact", use_liger_kernel=True, liger_kernel_config=off)
    assert find_records(trainer.model)


@pytest.mark.usefixtures("liger")
def test_liger_that_does_not_know_the_model_is_no_matter(make: Make) -> None:
    model = llama()
    model.config.model_type = "unheard-of"
    assert find_records(make("exact", model=model, use_liger_kernel=True).model)


def test_unsloth_is_refused(make: Make) -> None:
    model = llama()

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return x

    forward.__module__ = "unsloth.models.llama"
    mlp = model.model.layers[0].mlp
    mlp.__dict__["forward"] = types.MethodType(forward, mlp)
    with pytest.raises(ConfigError, match=r"unsloth computes model.layers.0.mlp"):
        make("exact", model=model)
    assert not find_records(model)


def test_weights_that_zero_took_apart_are_refused(make: Make) -> None:
    model = copy.deepcopy(llama())
    next(model.parameters()).ds_id = 0
    with pytest.raises(ConfigError, match="use ZeRO-2 or FSDP2"):
        make("exact", model=model)
