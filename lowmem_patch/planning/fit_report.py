"""Plain data: how a training step was made to fit in a budget."""

from __future__ import annotations

import dataclasses
from collections import Counter

from lowmem_patch.planning.names import size_text


def _ranges(sites: list[str]) -> str:
    """``layers.0, layers.1, layers.2`` -> ``layers.0 to 2``."""
    runs: list[list[str]] = []
    for site in sites:
        stem, _, number = site.rpartition(".")
        last, _, before = runs[-1][-1].rpartition(".") if runs else ("", "", "")
        if stem == last and number.isdecimal() and before == str(int(number) - 1):
            runs[-1].append(site)
        else:
            runs.append([site])
    return ", ".join(
        run[0] if len(run) == 1 else f"{run[0]} to {run[-1].rpartition('.')[2]}" for run in runs
    )


LEVEL_REASONS = {
    "patched": "it is not recomputed: the budget has room for what it saves",
    "offloaded": "it is not recomputed: what it saves is offloaded to host memory",
    "attention": "its input and attention's output are saved, the rest is recomputed",
    "checkpointed": "its input is saved, and it is recomputed",
    "host": "its input is offloaded to host memory, and it is recomputed",
    "segment": "its input is recomputed from its segment's, and so is the block",
    "halves": "its input is recomputed by halves of its segment, and so is the block",
}


@dataclasses.dataclass(frozen=True)
class FittedBlock:
    """One block.

    Attributes:
        site: its path.
        level: of ``lowmem_patch.strategies.checkpointing.LEVELS``.
        reason: why.
        patched, held: bytes that it holds until backward as patched, and at this level.
        seconds: that the level takes more in each step.
    """

    site: str
    level: str
    reason: str
    patched: int
    held: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class FitReport:
    """The choice for each block, and what it leads to. Bytes of one GPU, seconds of one step.

    Attributes:
        asked: the budget as it was asked for.
        budget: bytes of it.
        reserve: bytes of it that are left for the allocator's fragmentation.
        predicted: the most bytes that are allocated in a step, model states included.
        reserved: on a GPU, what its allocator takes for that; the rest is free, in pieces.
        moment: when that is.
        parameters, optimizer_state, gradients: bytes of the model states, gradients at the end of the
            backward.
        workspace: on a GPU, of cuBLAS.
        rounding: what its allocator rounds up at the peak.
        margin: what it may round up more, by what was allocated before the training.
        held: activations that are alive when the forward ends.
        optimizer: its name.
        accumulates: gradients of earlier batches are held from the beginning of the step.
        device: whose times they are.
        extra_seconds: predicted, that the levels cost in a step.
        step_seconds: predicted, of forward and backward of the blocks as patched.
        on_host: bytes of host memory.
        inputs: for which batch and length.
        blocks: in the order of the forward.
        notes: sentences.
    """

    asked: str
    budget: int
    reserve: int
    predicted: int
    reserved: int
    moment: str
    parameters: int
    optimizer_state: int
    gradients: int
    workspace: int
    rounding: int
    margin: int
    held: int
    optimizer: str
    accumulates: bool
    device: str
    extra_seconds: float
    step_seconds: float
    on_host: int
    inputs: str
    blocks: tuple[FittedBlock, ...]
    notes: tuple[str, ...] = ()

    @property
    def levels(self) -> dict[str, int]:
        """How many blocks have each level."""
        return dict(Counter(block.level for block in self.blocks))

    @property
    def head(self) -> tuple[str, ...]:
        """Lines of all blocks together."""
        since = " (held from the beginning)" if self.accumulates else ""
        levels = (
            ", ".join(f"{count} {level}" for level, count in self.levels.items()) or "no blocks"
        )
        share = 100 * self.extra_seconds / self.step_seconds if self.step_seconds else 0.0
        of_gpu = (
            f"  cuBLAS's workspaces {size_text(self.workspace)}, rounded up by the allocator "
            f"{size_text(self.rounding)}, margin {size_text(self.margin)} (the rounding varies with what was "
            f"allocated before); reserved {size_text(self.reserved)} (more than the budget is no "
            "harm: the allocator gives back what is not used)"
        )
        return (
            f"fit {self.asked}: predicted peak {size_text(self.predicted)} in {self.moment}, for "
            f"{self.inputs} and {self.optimizer}; {levels}",
            f"  parameters {size_text(self.parameters)}, optimizer state {size_text(self.optimizer_state)}, "
            f"gradients {size_text(self.gradients)}{since}, "
            f"activations after the forward {size_text(self.held)}"
            + (f", on the host {size_text(self.on_host)}" if self.on_host else "")
            + (f", left for fragmentation {size_text(self.reserve)}" if self.reserve else ""),
            *((of_gpu,) if self.reserved else ()),
            f"  predicted time: {1e3 * self.extra_seconds:.1f} ms more in each step ({share:.0f} % of the "
            f"blocks' {1e3 * self.step_seconds:.1f} ms, times of {self.device})",
        )

    def __str__(self) -> str:
        lines = list(self.head)
        groups: dict[tuple[str, str], list[FittedBlock]] = {}
        for block in self.blocks:
            groups.setdefault((block.level, block.reason), []).append(block)
        for (level, reason), blocks in groups.items():
            patched, held = (sum(getattr(b, key) for b in blocks) for key in ("patched", "held"))
            lines.append(
                f"  {level} ({_ranges([block.site for block in blocks])}): {size_text(patched)} -> "
                f"{size_text(held)}, {1e3 * sum(block.seconds for block in blocks):.2f} ms: {reason}"
            )
        if self.blocks:
            lines.append(
                "  each line: what these blocks hold when the forward ends, patched -> at their level, each "
                "tensor at the block that makes it; what the level adds to a step"
            )
        lines += [f"  {note}" for note in self.notes]
        return "\n".join(lines)
