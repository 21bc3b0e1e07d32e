"""Pairs of docstrings and functions for ``benchmarks/truth.py``, and the model that tells them apart."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
MODULES = ("truth_pairs", "truth_tasks", "truth_data")


class Modules(NamedTuple):
    """The modules under test."""

    pairs: Any
    tasks: Any


@pytest.fixture(scope="module")
def truth() -> Iterator[Modules]:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        yield Modules(*map(importlib.import_module, MODULES[:2]))
    finally:
        sys.path.remove(str(BENCHMARKS))
        for name in MODULES:
            del sys.modules[name]


SOURCE = '''
class Shape:
    @property
    def area(self):
        """The area.

        Of the whole shape.
        """
        # squares
        return self.side**2

def plain(a,
          b):
    "One line."
    def inner():
        """Of no own."""
        return a
    return inner

def no_docstring(): return 1

async def only_docstring():
    """Nothing else."""
'''


def test_docstrings_are_taken_out_of_their_functions(truth: Modules) -> None:
    found = dict(truth.pairs.documented_functions(SOURCE.encode()))
    assert set(found) == {"The area.", "One line."}
    assert (
        found["The area."] == "    def area(self):\n        # squares\n        return self.side**2"
    )
    assert found["One line."].startswith("def plain(a,\n          b):\n    def inner():")
    assert not list(truth.pairs.documented_functions(b"no python :"))


class Characters:
    """A tokenizer of the first characters."""

    def encode_batch(self, texts: list[str]) -> list[Any]:
        return [SimpleNamespace(ids=[*text[:40].ljust(40).encode()]) for text in texts]


def test_texts_that_were_seen_are_no_pairs(truth: Modules, tmp_path: Path) -> None:
    def write(name: str, numbers: range) -> Path:
        file: Path = tmp_path / name
        texts = (f'def f{n}():\n    """Number {n}."""\n    return {n}\n' for n in numbers)
        file.write_text("".join(texts))
        return file

    seen: set[str] = set()
    first, few = write("first.py", range(5)), write("few.py", range(10, 13))
    train = truth.pairs._pair_set([few, first], 100, Characters(), seen)
    assert train.files == [1] * 5, "three functions make no row"
    assert bytes(train.docstrings[4].tolist()).decode().strip() == "Number 4."
    held_out = truth.pairs._pair_set([write("other.py", range(3, 9))], 100, Characters(), seen)
    assert len(held_out.files) == 4, "two were trained on"


def test_a_row_has_its_own_function_and_others_of_the_file(truth: Modules) -> None:
    docstrings = torch.tensor([[number, number, 0] for number in range(1, 10)])
    pairs = truth.pairs.PairSet(docstrings, docstrings + 100, [0] * 4 + [1] * 5)
    batch = truth.pairs.pair_batches(pairs, 1, 64, 0)(0)
    assert batch["input_ids"].shape == batch["attention_mask"].shape == (64, 5, 3)
    assert batch["attention_mask"][0, 0].tolist() == [1, 1, 0]
    assert set(batch["labels"].tolist()) == {0, 1, 2, 3}
    for ids, label in zip(batch["input_ids"][..., 0].tolist(), batch["labels"], strict=True):
        own, choices = ids[0], [one - 100 for one in ids[1:]]
        assert choices[label] == own and len({*choices}) == 4
        assert len({one > 4 for one in choices}) == 1, "of one file"


def test_halves_of_a_batch_have_the_gradients_of_the_whole(truth: Modules) -> None:
    class Embedded(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = torch.nn.Embedding(200, 8, dtype=torch.float64)

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
            return SimpleNamespace(last_hidden_state=self.embedding(input_ids))

    torch.manual_seed(0)
    docstrings = torch.randint(1, 100, (8, 3))
    pairs = truth.pairs.PairSet(docstrings, docstrings + 100, [0] * 8)
    batch = truth.pairs.pair_batches(pairs, 1, 4, 0)(0)
    model = truth.pairs.Retriever(Embedded())
    gradients = []
    for parts in ([batch], truth.tasks._halves(batch)):
        model.zero_grad()
        for part in parts:
            (model(**part)["loss"] / len(parts)).backward()
        gradients.append(model.encoder.embedding.weight.grad.clone())
    # sums of float32 cosines in another order
    assert torch.allclose(*gradients, rtol=0, atol=2**-20 * float(gradients[0].abs().max()))
    assert gradients[0].abs().max() > 0


def test_a_folder_of_weights_that_lacks_files_is_named(truth: Modules, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors, tokenizer\.json not found"):
        truth.pairs.find_weights(tmp_path)
