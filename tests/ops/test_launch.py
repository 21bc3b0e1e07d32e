"""Launches on a GPU: directly, and through Triton's own launcher where a profiler wants to be told."""

from __future__ import annotations

from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")

from lowmem_patch import kernels, reference  # noqa: E402  # needs Triton

pytestmark = pytest.mark.gpu


def test_a_profiler_sees_launches_and_the_results_stay() -> None:
    hooks = getattr(getattr(triton, "knobs", None), "runtime", None)
    if hooks is None or not hasattr(hooks.launch_enter_hook, "add"):
        pytest.skip("this Triton has one hook, and not a chain of them")
    x = torch.randn(64, 256, device="cuda")
    wanted = reference.activate(x, "gelu")
    for _ in range(3):  # compiled, then reused
        kernels.activation_forward(x, None, "gelu")
    seen: list[str] = []

    def enter(metadata: Any) -> None:
        seen.append(metadata.get()["name"])

    hooks.launch_enter_hook.add(enter)
    try:
        watched = kernels.activation_forward(x, None, "gelu")
    finally:
        hooks.launch_enter_hook.remove(enter)
    assert len(seen) == 1 and "forward_kernel" in seen[0]
    again = kernels.activation_forward(x, None, "gelu")
    assert len(seen) == 1
    assert torch.equal(watched, again)
    torch.testing.assert_close(again, wanted)
