"""What the zoo finds, as plain data."""

from __future__ import annotations

import collections
import dataclasses
import re
from typing import Any

from lowmem_patch import PatchReport
from zoo.dataflow import Dataflow

TEXT_ALONE = "text alone"  # in the feed of a model that makes features of images or sounds as well

# names of modules and numbers differ from site to site; the reason is the rest
_NAMES = re.compile(r"[\w-]+(?:\.[\w-]+)+|\b\d[\d.e+-]*\b")


@dataclasses.dataclass
class PresetResult:
    """One preset on one model. ``errors`` holds (ours, the unpatched model's own) by kind, and
    ``undecided`` how many tensors of how many could not be judged."""

    verdict: str = "right"
    problems: list[str] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)
    strategies: dict[str, int] = dataclasses.field(default_factory=dict)
    errors: dict[str, tuple[float, float]] = dataclasses.field(default_factory=dict)
    undecided: dict[str, tuple[int, int]] = dataclasses.field(default_factory=dict)
    saved_before: int = 0
    saved_after: int = 0

    def wrong(self, problem: str) -> None:
        self.verdict = "wrong"
        self.problems.append(problem)

    def count(self, report: PatchReport) -> None:
        self.strategies = dict(collections.Counter(site.strategy for site in report.sites))
        self.notes.extend(note[:160] for note in report.notes)

    @property
    def jumps(self) -> list[str]:
        """The notes on outputs and gradients of the unpatched model that jump under one rounding."""
        return [note for note in self.notes if "moves by" in note]


def _filled(row: PresetResult) -> dict[str, Any]:
    empty = PresetResult()
    return {key: value for key, value in vars(row).items() if value != getattr(empty, key)}


@dataclasses.dataclass
class Result:
    """One architecture. ``status``: judged, judged in part, no reference, no model of its own, not
    built, not run, slow, too large, ended (its process was), zoo failed."""

    name: str
    status: str
    reason: str = ""
    parameters: int = 0
    shrink: str = ""
    feed: str = ""
    inputs: str = ""
    sites: int = 0
    patched: int = 0
    eligible: bool = False
    linear_norms: int = 0
    linear_norms_patched: int = 0
    left_alone: dict[str, int] = dataclasses.field(default_factory=dict)
    presets: dict[str, PresetResult] = dataclasses.field(default_factory=dict)
    above_floor: float = 0.0  # saved bytes of a step with its loss, as a multiple of the floor
    seconds: float = 0.0

    def describe(self, report: PatchReport, flow: Dataflow) -> None:
        """The sites under ``auto``: how many are patched, and why the others are not."""
        self.sites, self.patched = len(report.sites), len(report.patched)
        self.eligible = flow.eligible
        patched = {site.name for site in report.patched}
        self.linear_norms = len(flow.linear_norms)
        self.linear_norms_patched = sum(name in patched for name in flow.linear_norms)
        reasons: collections.Counter[str] = collections.Counter()
        for site in report.left_alone:
            reader = " (read by Linears)" if site.name in flow.linear_norms else ""
            reasons[f"{site.kind}{reader}: {_NAMES.sub('…', site.reason)}"] += 1
        self.left_alone = dict(reasons.most_common())

    def settle(self, jump: float) -> None:
        """The status, once every preset is judged; a tensor that moves by ``jump`` cannot be."""
        undecided = [
            f"{jumps} of {tensors} tensors of {what}"
            for preset in self.presets.values()
            for what, (jumps, tensors) in preset.undecided.items()
        ]
        if undecided:
            self.status = "judged in part"
            moved = f"moves {undecided[0]} of the unpatched model by more than {100 * jump:g} %"
            self.reason = f"one rounding {moved}"

    @property
    def wrong(self) -> list[str]:
        return [f"{name}: {p}" for name, preset in self.presets.items() for p in preset.problems]

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def verdicts(self) -> dict[str, Any]:
        """As :meth:`to_dict`, without what float32 tells as well: sites, feeds, the plan's notes."""
        presets = {}
        for name, preset in self.presets.items():
            errors = {
                k: tuple(float(f"{e:.1e}") for e in pair) for k, pair in preset.errors.items()
            }
            row = dataclasses.replace(preset, errors=errors, strategies={}, notes=preset.jumps)
            presets[name] = _filled(row)
        kept = {"name": self.name, "status": self.status, "seconds": self.seconds}
        return {**kept, "presets": presets, **({"reason": self.reason} if self.reason else {})}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Result:
        presets = {name: PresetResult(**preset) for name, preset in data["presets"].items()}
        return cls(**{**data, "presets": presets})
