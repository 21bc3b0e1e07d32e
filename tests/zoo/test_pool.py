"""A model that is slow, large or kills its process costs the zoo that model alone; results survive a kill."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from zoo import store
from zoo.pool import Limits, run_all
from zoo.result import Result


def pretended(name: str) -> Result:
    """In place of the zoo's judge; each name does what it says."""
    if name == "busy":
        while True:
            pass
    if name == "sleeps":
        time.sleep(600)
    if name == "large":
        bytearray(2**31)
    if name == "dies":
        os._exit(9)
    if name == "raises":
        raise ValueError("some bug")
    return Result(name, "judged")


@pytest.mark.slow
def test_each_ends_on_its_own() -> None:
    names = ["fine", "busy", "large", "dies", "raises", "last"]
    limits = Limits(seconds=2, memory=2**30)
    found = {result.name: result for result in run_all(pretended, names, 2, limits=limits)}
    assert {name: result.status for name, result in found.items()} == {
        "fine": "judged",
        "busy": "slow",
        "large": "too large",
        "dies": "ended",
        "raises": "zoo failed",
        "last": "judged",
    }
    assert "2 s" in found["busy"].reason
    assert "exit code 9" in found["dies"].reason
    assert "some bug" in found["raises"].reason


@pytest.mark.slow
def test_time_limit_ends_the_run() -> None:
    assert len(list(run_all(pretended, ["fine"], 1))) == 1  # the server has started
    started = time.monotonic()
    assert [result.name for result in run_all(pretended, ["fine", "sleeps"], 1, 2)] == ["fine"]
    assert time.monotonic() - started < 60


def test_results_survive_a_kill(tmp_path: Path) -> None:
    for name in ("llama", "bert", "timm/test_vit"):
        store.add(Result(name, "slow"), tmp_path)
    store.add(Result("llama", "judged", left_alone={"a reason": 2}), tmp_path)
    with (tmp_path / "transformers.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"name": "gpt2", "sta')  # killed while writing
    for _ in range(2):
        found = store.load("transformers", tmp_path)
        assert {name: result.status for name, result in found.items()} == {
            "bert": "slow",
            "llama": "judged",
        }
        assert found["llama"].left_alone == {"a reason": 2}
        store.tidy(tmp_path)
    lines = (tmp_path / "transformers.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 2
    assert list(store.load("timm", tmp_path)) == ["timm/test_vit"]


@pytest.fixture(autouse=True)
def _quick_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """No models: the server starts faster, and nothing here needs them."""
    monkeypatch.setattr("zoo.pool._PRELOADED", ["tests.zoo.test_pool"])
