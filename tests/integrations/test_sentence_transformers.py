"""sentence-transformers: the inner model is found, and its own trainer trains the same in fewer bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from lowmem_patch import patch_model, patch_report, plan_patch, saved_bytes, unpatch_model
from lowmem_patch.errors import TraceError
from lowmem_patch.integrations import LowmemTrainerCallback
from lowmem_patch.planning.report import find_records
from tests.integrations.trainings import (
    STEPS,
    assert_same_training,
    losses_of,
    weights_of,
    whole_step,
)
from tests.support.models import randomise
from tests.support.step import StayInFloat64, Step, cast

st = pytest.importorskip("sentence_transformers")
datasets = pytest.importorskip("datasets")
modules = pytest.importorskip("sentence_transformers.sentence_transformer.modules")
losses = pytest.importorskip("sentence_transformers.sentence_transformer.losses")

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs: deprecations between the libraries
WORDS = [f"w{i}" for i in range(56)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny BERT with a tokenizer, as a checkpoint."""
    vocabulary = {"[PAD]": 0, "[CLS]": 1, "[SEP]": 2, "[UNK]": 3}
    vocabulary |= {word: i + len(vocabulary) for i, word in enumerate(WORDS)}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
    )
    torch.manual_seed(1)
    config = BertConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, max_position_embeddings=32,
    )  # fmt: skip
    randomise(BertModel(config)).save_pretrained(tmp_path / "bert")
    tokenizer.save_pretrained(tmp_path / "bert")
    return tmp_path / "bert"


def sentences_model(folder: Path) -> Any:
    transformer = modules.Transformer(str(folder))
    pooling = modules.Pooling(transformer.get_embedding_dimension())
    return st.SentenceTransformer(modules=[transformer, pooling], device="cpu").train()


def trainer_of(folder: Path, preset: Any = None) -> Any:
    torch.manual_seed(0)
    model = sentences_model(folder)
    rows = [
        {"anchor": " ".join(WORDS[i : i + 5]), "positive": " ".join(WORDS[i + 1 : i + 7])}
        for i in range(16)
    ]
    arguments = st.SentenceTransformerTrainingArguments(
        str(folder.parent / "out"), max_steps=STEPS, per_device_train_batch_size=4, optim="sgd",
        learning_rate=0.05, lr_scheduler_type="constant", report_to=[], use_cpu=True, save_strategy="no",
        disable_tqdm=True, logging_steps=1, max_grad_norm=0.0,
    )  # fmt: skip
    return st.SentenceTransformerTrainer(
        model, arguments, train_dataset=datasets.Dataset.from_list(rows),
        loss=losses.MultipleNegativesRankingLoss(model),
        callbacks=[LowmemTrainerCallback(preset)] if preset else [],
    )  # fmt: skip


def trained(trainer: Any, *, double: bool = False) -> Step:
    model = cast(trainer.model, torch.float64) if double else trainer.model
    before = weights_of(model)
    if double:
        with StayInFloat64(), losses_of(trainer) as found:
            trainer.train()
    else:
        with losses_of(trainer) as found:
            trainer.train()
    return whole_step(before, model, found)


def test_exact_trains_as_the_unpatched_model(folder: Path) -> None:
    own = trained(trainer_of(folder))
    truth = trained(trainer_of(folder), double=True)
    trainer = trainer_of(folder, "exact")
    assert_same_training(trained(trainer), own, truth)
    assert (folder.parent / "out" / "lowmem_patch.json").exists()


def features(model: Any) -> Any:
    return dict(model.tokenize([" ".join(WORDS[:8]), " ".join(WORDS[3:9])]))


def test_patch_model_finds_the_inner_model(folder: Path) -> None:
    model = sentences_model(folder)
    plan = plan_patch(model, "exact")
    assert plan.model == "BertModel" and not find_records(model)
    with saved_bytes(model) as before:
        expected = model(features(model))["sentence_embedding"]
    assert patch_model(model, "exact") is model
    assert patch_model(model, "exact") is model, "once patched, it is as asked"
    ((holder, _),) = find_records(model)
    assert holder is model[0].auto_model and patch_report(model).patched
    with saved_bytes(model) as after:
        found = model(features(model))["sentence_embedding"]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    by_hand = sentences_model(folder)
    patch_model(by_hand[0].auto_model, "exact")
    with saved_bytes(by_hand) as same:
        by_hand(features(by_hand))
    assert after.activations == same.activations < before.activations
    unpatch_model(model)
    assert not find_records(model)


def test_a_saved_model_is_a_stock_model(folder: Path, tmp_path: Path) -> None:
    trainer = trainer_of(folder, "exact")
    trainer.train()
    trainer.model.save(str(tmp_path / "saved"))
    stock = st.SentenceTransformer(str(tmp_path / "saved"), device="cpu")
    texts = [" ".join(WORDS[:8])]
    ours, theirs = (torch.tensor(m.encode(texts)) for m in (trainer.model, stock))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_two_models_that_train_are_named(folder: Path) -> None:
    pair = torch.nn.ModuleDict(
        {"query": sentences_model(folder), "document": sentences_model(folder)}
    )
    with pytest.raises(TraceError, match=r"holds 2 models that train \(query\..*, document\."):
        patch_model(pair)
    pair["document"].requires_grad_(False)
    patch_model(pair, "exact")
    assert find_records(pair["query"]) and not find_records(pair["document"])
