"""The pictures of the documents: drawn from the committed results, and legible."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from lowmem_patch import plot
from lowmem_patch.plot import Point

ROOT = Path(__file__).parent.parent

pytest.importorskip("adjustText")


@pytest.fixture
def picture(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))  # as for a script of that folder
    spec = importlib.util.spec_from_file_location("picture", ROOT / "benchmarks" / "picture.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_committed_results_can_be_drawn(tmp_path: Path, picture: Any) -> None:
    picture.main(tmp_path)
    drawn = {path.relative_to(tmp_path) for path in tmp_path.rglob("*.png")}
    assert drawn == {path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.png")}


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every figure that is made."""
    import matplotlib.figure

    made: list[Any] = []

    class Kept(matplotlib.figure.Figure):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            made.append(self)

    monkeypatch.setattr(matplotlib.figure, "Figure", Kept)
    return made


def test_labels_cover_neither_each_other_nor_the_border(tmp_path: Path, figures: list[Any]) -> None:
    points = [Point(f"variant {n}", 10 + 0.3 * n, 100 + n % 2) for n in range(4)]
    points.append(Point("far away", 1, 1))
    plot.plot_tradeoff(points, tmp_path / "x.png", "t", memory="m", rate="r")
    (axes,) = figures[0].axes
    boxes = [text.get_window_extent() for text in axes.texts]
    assert {text.get_text() for text in axes.texts} == {point.label for point in points}
    border = axes.get_window_extent()
    for number, box in enumerate(boxes):
        assert not box.count_overlaps(boxes[:number])
        assert border.contains(*box.min) and border.contains(*box.max)


def test_points_on_each_other_share_a_label(tmp_path: Path, figures: list[Any]) -> None:
    points = [Point("a", 100, 50), Point("b", 100.5, 50.5), Point("c", 100, 40), Point("d", 90, 45)]
    plot.plot_tradeoff(points, tmp_path / "x.png", "t", memory="m", rate="r")
    assert {text.get_text() for text in figures[0].axes[0].texts} == {"a, b", "c", "d"}


def test_shares_are_percents_of_the_whole(tmp_path: Path, figures: list[Any], picture: Any) -> None:
    rows = {"one block": {"unpatched": 2**22, "auto": 2**20}}
    picture.plot_variants(rows, tmp_path / "x.png", "t", whole="unpatched")
    (axes,) = figures[0].axes
    assert [text.get_text() for text in axes.texts] == [" 25"]
    assert axes.get_yticklabels()[0].get_text() == "one block\n(4 MiB unpatched)"


def test_kinds_add_up_to_a_variants_bytes(tmp_path: Path, figures: list[Any], picture: Any) -> None:
    cases = {
        "one block": {"unpatched": {"norms": 2**24, "activations": 2**24}, "auto": {"norms": 2**24}}
    }
    picture.plot_variant_kinds(cases, tmp_path / "x.png", "t")
    (axes,) = figures[0].axes
    assert [text.get_text() for text in axes.texts] == [" 32.0", " 16.0"]
    assert "MiB" in axes.get_xlabel()
    assert [text.get_text() for text in figures[0].legends[0].texts] == ["norms", "activations"]
