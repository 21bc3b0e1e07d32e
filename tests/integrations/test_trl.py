"""TRL's trainers with the callback: SFT, DPO, GRPO, Reward and KTO train the same in fewer bytes."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForSequenceClassification, PreTrainedTokenizerFast

from lowmem_patch import patch_report
from lowmem_patch.errors import ConfigError
from lowmem_patch.integrations import LowmemTrainerCallback
from tests.integrations.trainings import (
    STEPS,
    assert_same_training,
    losses_of,
    weights_of,
    whole_step,
)
from tests.support.models import llama, randomise
from tests.support.step import StayInFloat64, Step, cast

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
peft = pytest.importorskip("peft")

pytestmark = [
    # theirs: deprecations between trl, datasets, pyarrow and transformers
    pytest.mark.filterwarnings("ignore"),
]
WORDS = [f"w{i}" for i in range(56)]
TEXT = " ".join(WORDS[:12])
TRAINERS = ("SFT", "DPO", "GRPO", "Reward", "KTO")


@pytest.fixture
def tokenizer() -> Any:
    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3}
    vocabulary |= {word: i + len(vocabulary) for i, word in enumerate(WORDS)}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
    )


def rows(kind: str) -> Any:
    def words(start: int, count: int) -> str:
        return " ".join(WORDS[(start + i) % len(WORDS)] for i in range(count))

    made: list[dict[str, Any]] = []
    for i in range(16):
        prompt, good, bad = words(i, 5), words(3 * i + 1, 6), words(5 * i + 2, 6)
        made.append(
            {
                "SFT": {"text": f"{prompt} {good}"},
                "DPO": {"prompt": prompt, "chosen": f" {good}", "rejected": f" {bad}"},
                "GRPO": {"prompt": prompt},
                "Reward": {"chosen": f"{prompt} {good}", "rejected": f"{prompt} {bad}"},
                "KTO": {"prompt": prompt, "completion": f" {good}", "label": i % 2 == 0},
            }[kind]
        )
    return datasets.Dataset.from_list(made)


def model_of(kind: str) -> Any:
    if kind != "Reward":
        return llama()
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_labels=1, pad_token_id=0,
    )  # fmt: skip
    return randomise(LlamaForSequenceClassification(config)).train()


def reward(completions: list[str], **_: Any) -> list[float]:
    return [float(len(set(text.split()))) + 0.1 * len(text) for text in completions]


def trainer_of(
    kind: str,
    folder: Path,
    tokenizer: Any,
    preset: Any = None,
    *,
    lora: bool = False,
    **changes: Any,
) -> Any:
    torch.manual_seed(0)
    settings: dict[str, Any] = {
        "output_dir": str(folder), "max_steps": STEPS, "per_device_train_batch_size": 2, "optim": "sgd",
        "learning_rate": 0.05, "lr_scheduler_type": "constant", "report_to": [], "use_cpu": True,
        "bf16": False, "logging_steps": 1, "disable_tqdm": True, "save_strategy": "no",
        "gradient_checkpointing": False, "max_grad_norm": 0.0,
    }  # fmt: skip
    arguments: dict[str, Any] = {"train_dataset": rows(kind), "processing_class": tokenizer}
    if kind == "GRPO":
        settings |= {"num_generations": 2, "max_completion_length": 6}
        arguments["reward_funcs"] = reward
    config = getattr(trl, f"{kind}Config")(**{**settings, **changes})
    if lora:
        arguments["peft_config"] = peft.LoraConfig(
            r=4, target_modules="all-linear", init_lora_weights="gaussian"
        )
    elif kind in ("DPO", "KTO"):
        arguments["ref_model"] = model_of(kind)
    callbacks = [] if preset is None else [LowmemTrainerCallback(preset)]
    trainer = getattr(trl, f"{kind}Trainer")
    return trainer(model=model_of(kind), args=config, callbacks=callbacks, **arguments)


class AllInFloat64(StayInFloat64):
    """As well for the float32 sums that TRL's own loss asks for."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("dtype") is torch.float32:
            kwargs["dtype"] = torch.float64
        return super().__torch_dispatch__(func, types, args, kwargs)


class SavedInSteps:
    """The largest bytes that autograd holds at the end of a loss, by unique storage."""

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.most = trainer, 0

    def __enter__(self) -> SavedInSteps:
        compute = self.trainer.compute_loss

        def compute_loss(*args: Any, **kwargs: Any) -> Any:
            kept: dict[int, Any] = {}
            weights = {
                t.untyped_storage().data_ptr()
                for m in (self.trainer.model,)
                for t in (*m.parameters(), *m.buffers())
            }

            def pack(tensor: torch.Tensor) -> torch.Tensor:
                kept[tensor.untyped_storage().data_ptr()] = tensor
                return tensor

            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                result = compute(*args, **kwargs)
            held = [t.untyped_storage().nbytes() for key, t in kept.items() if key not in weights]
            self.most = max(self.most, sum(held))
            return result

        self.trainer.compute_loss = compute_loss
        return self

    def __exit__(self, *error: object) -> None:
        del self.trainer.compute_loss


def trained(trainer: Any, *, double: bool = False) -> Step:
    model = trainer.model
    if double:
        for held in (model, getattr(trainer, "ref_model", None)):
            if held is not None:
                cast(held, torch.float64)
    before = weights_of(model)
    torch.manual_seed(3)
    with contextlib.ExitStack() as stack:
        if double:
            stack.enter_context(AllInFloat64())
        saved = stack.enter_context(SavedInSteps(trainer))
        losses = stack.enter_context(losses_of(trainer))
        trainer.train()
    return whole_step(before, model, losses)._replace(saved=saved.most)


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("kind", TRAINERS)
def test_exact_trains_as_the_unpatched_model(
    kind: str, lora: bool, tmp_path: Path, tokenizer: Any
) -> None:
    own = trained(trainer_of(kind, tmp_path, tokenizer, lora=lora))
    truth = trained(trainer_of(kind, tmp_path, tokenizer, lora=lora), double=True)
    trainer = trainer_of(kind, tmp_path, tokenizer, "exact", lora=lora)
    found = trained(trainer)
    assert_same_training(found, own, truth)
    assert found.saved < own.saved
    report = patch_report(trainer.model)
    assert len(report.patched) == len(report.sites)
    assert (tmp_path / "lowmem_patch.json").exists()


@pytest.mark.parametrize("kwargs", [None, {"use_reentrant": True}, {"selective": True}])
def test_checkpointing_which_trl_turns_on_is_composed_with(
    tmp_path: Path, tokenizer: Any, kwargs: Any
) -> None:
    changes = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": kwargs}
    own = trained(trainer_of("SFT", tmp_path, tokenizer, **changes))
    found = trained(trainer_of("SFT", tmp_path, tokenizer, "exact", **changes))
    truth = trained(trainer_of("SFT", tmp_path, tokenizer), double=True)
    assert_same_training(found, own, truth)
    assert found.saved <= own.saved


@pytest.mark.gpu  # TRL sends activations from a GPU alone
def test_activation_offloading_is_composed_with(tmp_path: Path, tokenizer: Any) -> None:
    changes = {"activation_offloading": True, "use_cpu": False}
    own = trained(trainer_of("SFT", tmp_path, tokenizer, **changes))
    found = trained(trainer_of("SFT", tmp_path, tokenizer, "exact", **changes))
    assert_same_training(found, own, trained(trainer_of("SFT", tmp_path, tokenizer), double=True))


@pytest.mark.parametrize("name", ["activation_offloading", "gradient_checkpointing"])
def test_what_a_budget_decides_is_refused_beside_it(
    tmp_path: Path, tokenizer: Any, name: str
) -> None:
    config = trl.SFTConfig(
        str(tmp_path), use_cpu=True, bf16=False, **{"gradient_checkpointing": False, name: True}
    )
    with pytest.raises(ConfigError, match=f"set {name}=False, or leave fit out"):
        trl.SFTTrainer(
            model_of("SFT"), config, train_dataset=rows("SFT"), processing_class=tokenizer,
            callbacks=[LowmemTrainerCallback(fit="24GiB")],
        )  # fmt: skip


def test_liger_is_refused_in_trl_too(tmp_path: Path, tokenizer: Any) -> None:
    pytest.importorskip("liger_kernel")
    with pytest.raises(ConfigError, match="sets Liger's rope, rms_norm, swiglu over"):
        trainer_of("SFT", tmp_path, tokenizer, "exact", use_liger_kernel=True)


def test_a_model_that_trl_loads_itself_and_its_adapter(tmp_path: Path, tokenizer: Any) -> None:
    llama().save_pretrained(tmp_path / "base")
    config = trl.SFTConfig(
        str(tmp_path / "out"), max_steps=STEPS, per_device_train_batch_size=2, use_cpu=True, bf16=False,
        report_to=[], save_steps=2, disable_tqdm=True, gradient_checkpointing=False,
        model_init_kwargs={"dtype": "float32"},
    )  # fmt: skip

    def make(preset: Any) -> Any:
        torch.manual_seed(0)
        return trl.SFTTrainer(
            str(tmp_path / "base"), config, train_dataset=rows("SFT"), processing_class=tokenizer,
            peft_config=peft.LoraConfig(r=4, target_modules="all-linear"),
            callbacks=[LowmemTrainerCallback(preset)] if preset else [],
        )  # fmt: skip

    trainer = make("exact")
    assert any("adapter" in note or "LoRA" in note for note in patch_report(trainer.model).notes)
    trainer.train()
    trainer.save_model(str(tmp_path / "adapter"))
    stock = peft.PeftModel.from_pretrained(llama(), tmp_path / "adapter")
    tokens = {"input_ids": torch.arange(4, 12)[None]}
    with torch.no_grad():
        ours, theirs = (m.eval()(**tokens).logits for m in (trainer.model, stock))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    # an unpatched run goes on from the patched one's checkpoint, and comes to the same
    resumed = make(None)
    resumed.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
    for (name, ours), theirs in zip(
        trainer.model.named_parameters(), resumed.model.parameters(), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5, msg=name)
