"""Data of the training runs, found on any machine: Python sources of installed packages, and digits."""

from __future__ import annotations

import dataclasses
import glob
import hashlib
import importlib.util
import random
import sysconfig
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from truth_pairs import Pairs

BYTES = 8_000_000  # of one corpus to train on; a tenth of it is held out
PACKAGE_BYTES = 1_500_000
PACKAGES = ("torch", "transformers", "sympy", "networkx", "scipy", "timm", "peft", "sklearn")
ADAPTED = "sympy"  # torch needs it, so that it is there: mathematics, unlike the standard library
CANVAS = 12  # pixels a side, on which a digit of 8 x 8 is moved and turned

Batch = dict[str, Tensor]
Batches = Callable[[int], Batch]  # by the number of the step


@dataclasses.dataclass(frozen=True)
class Split:
    """What is trained on, and what is held out: bytes ``[n]`` uint8, or images ``[n, 8, 8]`` float32."""

    train: Tensor
    held_out: Tensor

    def to(self, device: str) -> Split:
        return Split(self.train.to(device), self.held_out.to(device))


@dataclasses.dataclass(frozen=True)
class Data:
    """All corpora, and where they come from."""

    python: Split
    adapted: Split
    packages: dict[str, Split]
    digits: Split
    digit_labels: Split
    digits_from: str
    pairs: Pairs | None = None  # with a fingerprint of its own

    @property
    def fingerprint(self) -> str:
        """Tells data sets apart: runs on different data are no pairs."""
        digest = hashlib.sha256()
        splits = (self.python, self.adapted, *self.packages.values(), self.digits)
        for split in splits:
            for part in (split.train, split.held_out):
                digest.update(part.numpy().tobytes())
        return digest.hexdigest()[:16]

    def to(self, device: str) -> Data:
        moved: dict[str, Any] = {
            name: value.to(device) for name, value in vars(self).items() if isinstance(value, Split)
        }
        packages = {name: split.to(device) for name, split in self.packages.items()}
        pairs = None if self.pairs is None else self.pairs.to(device)
        return dataclasses.replace(self, packages=packages, pairs=pairs, **moved)


def find_data(byte_limit: int = BYTES) -> Data:
    """Read it all from what is installed.

    Raises:
        FileNotFoundError: sympy, or all but three of the packages, are not installed.
    """
    folders = package_folders()
    if ADAPTED not in folders or len(folders) < 4:
        raise FileNotFoundError(
            f"the data are sources of installed packages: {ADAPTED} and three more of "
            f"{', '.join(PACKAGES)} are needed, there are {', '.join(folders) or 'none'}"
        )
    images, labels, source = _digits()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    images, labels = images[order], labels[order]
    count = len(images) * 2 // 3
    limit = min(PACKAGE_BYTES, byte_limit)
    return Data(
        python=_sources(library_folder(), byte_limit),
        adapted=_sources(folders[ADAPTED], byte_limit),
        packages={name: _sources(folder, limit) for name, folder in folders.items()},
        digits=Split(images[:count], images[count:]),
        digit_labels=Split(labels[:count], labels[count:]),
        digits_from=source,
    )


def library_folder() -> Path:
    """Of Python's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def package_folders() -> dict[str, Path]:
    """Of the packages that are installed."""
    return {name: folder for name in PACKAGES if (folder := _folder(name)) is not None}


def _folder(package: str) -> Path | None:
    found = importlib.util.find_spec(package)
    places = None if found is None else found.submodule_search_locations
    return Path(next(iter(places))) if places else None


def _sources(folder: Path, limit: int) -> Split:
    """Python files of a folder in a fixed random order; every tenth is held out."""
    found = glob.glob("**/*.py", root_dir=folder, recursive=True)
    names = sorted(name for name in found if "site-packages" not in Path(name).parts)
    random.Random(0).shuffle(names)
    parts = (names[9::10], limit // 10), ([n for i, n in enumerate(names) if i % 10 != 9], limit)
    held_out, train = (_joined((folder / name for name in files), most) for files, most in parts)
    return Split(train, held_out)


def _joined(files: Iterable[Path], limit: int) -> Tensor:
    text = bytearray()
    for file in files:
        text += file.read_bytes()
        if len(text) >= limit:
            break
    return torch.from_numpy(np.frombuffer(bytes(text[:limit]), dtype=np.uint8).copy())


def _digits() -> tuple[Tensor, Tensor, str]:
    """Images ``[n, 8, 8]`` in 0..1, labels ``[n]``, and their source."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        return _drawn_digits()
    images, labels = load_digits(return_X_y=True)
    images = torch.tensor(images / 16, dtype=torch.float32).view(-1, 8, 8)
    return images, torch.tensor(labels), "handwritten (scikit-learn's load_digits)"


def _drawn_digits() -> tuple[Tensor, Tensor, str]:
    """Without scikit-learn: the digits of Pillow's font at many sizes and places."""
    from PIL import Image, ImageDraw, ImageFont

    images, labels = [], []
    for label in range(10):
        for number in range(180):
            size, left, top = 20 + number % 5 * 2, number // 5 % 6 * 2, number // 30 % 6 - 4
            canvas = Image.new("L", (32, 32))
            font = ImageFont.load_default(size)
            ImageDraw.Draw(canvas).text((left + 4, top + 2), str(label), fill=255, font=font)
            images.append(np.asarray(canvas.resize((8, 8), Image.Resampling.BOX)))
            labels.append(label)
    drawn = torch.tensor(np.stack(images) / 255, dtype=torch.float32)
    return drawn, torch.tensor(labels), "drawn with Pillow's font (no scikit-learn)"


def text_batches(corpus: Tensor, steps: int, shape: tuple[int, int], seed: int) -> Batches:
    """Windows of a corpus ``[rows, length]``, which are their own labels."""
    rows, length = shape
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(corpus) - length, (steps, rows, 1), generator=generator)
    places, window = starts.to(corpus.device), torch.arange(length, device=corpus.device)

    def batch(step: int) -> Batch:
        ids = corpus[places[step] + window].long()
        return {"input_ids": ids, "labels": ids}

    return batch


def package_batches(
    corpora: list[Tensor], steps: int, shape: tuple[int, int], seed: int
) -> Batches:
    """Windows of all packages in turn; the label is the number of the package."""
    rows, length = shape
    joined = torch.cat(corpora)
    sizes = torch.tensor([len(corpus) for corpus in corpora])
    generator = torch.Generator().manual_seed(seed)
    labels = (torch.arange(rows) % len(corpora)).expand(steps, rows)
    part = torch.rand(steps, rows, generator=generator, dtype=torch.float64)
    starts = (sizes.cumsum(0) - sizes)[labels] + (part * (sizes[labels] - length)).long()
    places, targets = starts[..., None].to(joined.device), labels.to(joined.device)
    window = torch.arange(length, device=joined.device)

    def batch(step: int) -> Batch:
        return {"input_ids": joined[places[step] + window].long(), "labels": targets[step]}

    return batch


def digit_batches(images: Tensor, labels: Tensor, steps: int, rows: int, seed: int) -> Batches:
    """Digits, each turned, scaled, moved and with noise, ``[rows, 1, 12, 12]``."""
    device = images.device
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randint(len(images), (steps, rows), generator=generator)
    angle, scale, right, down = (
        torch.empty(steps, rows).uniform_(low, high, generator=generator)
        for low, high in ((-0.2, 0.2), (1.2, 1.7), (-0.25, 0.25), (-0.25, 0.25))
    )
    cos, sin = scale * angle.cos(), scale * angle.sin()
    moves = torch.stack((cos, -sin, right, sin, cos, down), -1).unflatten(-1, (2, 3))
    chosen, moves = chosen.to(device), moves.to(device)
    noise = torch.randn(1024, CANVAS, CANVAS, generator=generator).to(device) * 0.1

    def batch(step: int) -> Batch:
        pick = chosen[step]
        grid = F.affine_grid(moves[step], [rows, 1, CANVAS, CANVAS], align_corners=False)
        x = F.grid_sample(images[pick][:, None], grid, align_corners=False)
        x += noise[(pick + step) % len(noise)][:, None]
        return {"x": 3 * x - 0.6, "labels": labels[pick]}  # mean about 0, deviation about 1

    return batch
