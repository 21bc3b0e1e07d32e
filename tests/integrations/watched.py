"""A training that somebody's command runs, and what the callback of ``scripts/watch.py`` left of it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch

from lowmem_patch.demo import LLAMA_FOLDER, load_demo_llama
from tests.support.step import Step

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(__file__).parent / "scripts"
STEPS, LAYERS = 3, 4
_TIMEOUT = 280
_ROUNDING = 1e-4  # of float32 in three steps


def save_base(folder: Path) -> Path:
    """The bundled LLaMA in float32, in a folder of its own."""
    load_demo_llama().save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(LLAMA_FOLDER / name, folder)
    return folder


def save_chats(path: Path, count: int = 16) -> Path:
    """Conversations, one a line."""
    rows = [
        [
            {"role": "user", "content": f"Add {i} and {i + 1}."},
            {"role": "assistant", "content": f"It is {2 * i + 1}."},
        ]
        for i in range(count)
    ]
    path.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    return path


def launched(*command: str | Path, **environment: str) -> str:
    """What a module of Python, run in a process of its own, writes."""
    done = subprocess.run(
        [sys.executable, "-m", *map(str, command)],
        capture_output=True, text=True, timeout=_TIMEOUT, cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environment},
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done.stdout + done.stderr


def assert_repeats(own: Step, truth: Step) -> None:
    """The unpatched training in float32 is the one in float64: two that differ would prove nothing."""
    torch.testing.assert_close(own.outputs[0], truth.outputs[0], rtol=_ROUNDING, atol=0)


def result_of(path: Path) -> Step:
    """Losses, changes of the adapters, and bytes of a batch."""
    result = torch.load(path)
    moved = result["moved"]
    assert moved and all("lora_" in name for name in moved)
    losses = torch.tensor(result["losses"], dtype=torch.float64)
    assert len(losses) == STEPS
    return Step([losses], moved, saved=result["saved"])
