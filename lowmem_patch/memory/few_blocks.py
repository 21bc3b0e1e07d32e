"""The plan of a model of many equal blocks, from the plans of the same model with three and with four."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from torch import nn

from lowmem_patch.config import PatchConfig
from lowmem_patch.memory.blocks import repeated_blocks, shortened
from lowmem_patch.memory.timeline import FewRuns
from lowmem_patch.planning.planner import Planned, plan_model, trace_whole
from lowmem_patch.planning.report import PatchReport
from lowmem_patch.tracing.inputs import ExampleInputs
from lowmem_patch.tracing.shadow import make_shadow

T = TypeVar("T")
_DEPTH = 4  # what the third block saves is compared with what the fourth saves
_NUMBER = re.compile(r"\d+(?:,\d{3})*")


@dataclasses.dataclass(frozen=True)
class Plans:
    """What a patch would do to a model.

    Attributes:
        report: of the whole model.
        planned: of the whole model, or of few of its blocks.
        few: how few of them; or None.
    """

    report: PatchReport
    planned: Planned
    few: FewRuns | None


def make_plans(model: nn.Module, config: PatchConfig, inputs: ExampleInputs) -> Plans:
    """Plan few of the blocks where a model has many equal ones, and the whole model elsewhere.

    Raises:
        TraceError: the model cannot be run on the inputs.
    """
    name = repeated_blocks(model)
    if name is not None:
        found = _few(model, config, inputs, name)
        if found is not None:
            return found
    planned = plan_model(model, config, inputs)
    return Plans(planned.report, planned, None)


def _few(model: nn.Module, config: PatchConfig, inputs: ExampleInputs, name: str) -> Plans | None:
    """None where the blocks save different amounts, or a report names what cannot be counted on."""
    with shortened(model, name, _DEPTH - 2):
        saved = trace_whole(make_shadow(model, inputs), structure=False).saved
    planned = []
    for depth in (_DEPTH - 1, _DEPTH):
        with shortened(model, name, depth):
            planned.append(plan_model(model, config, inputs))
    few, more = (one.report for one in planned)
    if more.saved_before - few.saved_before != few.saved_before - saved.activations:
        return None
    count = len(model.get_submodule(name)._modules)
    report = _extended(few, more, name, count)
    if report is None:
        return None
    return Plans(report, planned[-1], FewRuns(name, 0, _DEPTH, count - _DEPTH))


def _extended(few: PatchReport, more: PatchReport, name: str, count: int) -> PatchReport | None:
    """The report of ``count`` blocks, from those of three blocks and of four."""
    blocks = count - _DEPTH + 1
    notes = [_line_of_text(*pair, blocks) for pair in zip(few.notes, more.notes, strict=False)]
    texts = [note for note in notes if note is not None]
    if len(texts) < max(len(few.notes), len(more.notes)):
        return None
    repeated = _Repeated(name, count)

    def rows(few: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
        """Those of repeated blocks stay as they are, and others grow."""
        grown = _grown(few, more, blocks)
        return {
            block: grown[block] if repeated.number(block) is None else size
            for block, size in repeated.all(more.items(), lambda row: row[0])
        }

    sizes = ({block: pair for block, *pair in one.blocks} for one in (few, more))
    sums = (
        "saved_before", "saved_after", "weight_copies_before", "weight_copies_after", "floor", "kinds",
    )  # fmt: skip
    return dataclasses.replace(
        more,
        **{name: _grown(getattr(few, name), getattr(more, name), blocks) for name in sums},
        sites=repeated.all(more.sites, lambda site: site.name),
        blocks=tuple((block, *pair) for block, pair in rows(*sizes).items()),
        notes=tuple(texts),
        floor_blocks=rows(few.floor_blocks, more.floor_blocks),
    )


def _grown(few: Any, more: Any, blocks: int) -> Any:
    """Numbers that grow by an equal amount with each block, also in mappings, lists and dataclasses: those of
    ``blocks`` more than ``few`` has (0 of none), which ``more`` has one more than."""
    if isinstance(more, Mapping):
        return {key: _grown(few.get(key, 0), value, blocks) for key, value in more.items()}
    if isinstance(more, list):
        pairs = zip(few or [0] * len(more), more, strict=True)
        return [_grown(*pair, blocks) for pair in pairs]
    if dataclasses.is_dataclass(more) and not isinstance(more, type):
        return type(more)(**_grown(vars(few), vars(more), blocks))
    return few + blocks * (more - few)


def _line_of_text(few: str, more: str, blocks: int) -> str | None:
    """A sentence whose numbers grow with the blocks; None where the words do as well."""
    if _NUMBER.sub("", few) != _NUMBER.sub("", more):
        return None
    pairs = zip(_NUMBER.findall(few), _NUMBER.findall(more), strict=True)
    numbers = iter([_line_of_number(first, second, blocks) for first, second in pairs])
    return _NUMBER.sub(lambda _: next(numbers), more)


def _line_of_number(few: str, more: str, blocks: int) -> str:
    """Written as the two are, such as 1,000."""
    if few == more:
        return more
    first, second = (int(text.replace(",", "")) for text in (few, more))
    number = first + blocks * (second - first)
    return f"{number:,}" if "," in more else str(number)


class _Repeated:
    """Rows of four blocks become rows of ``count``: the third block stands for all but the first two and
    the last."""

    def __init__(self, name: str, count: int) -> None:
        self.count = count
        self.path = re.compile(rf"(?<![\w.])({re.escape(name)}\.)(\d+)(?![\w])")

    def number(self, name: str) -> int | None:
        """The number of the block that a module is, or lies in."""
        found = self.path.match(name)
        return int(found.group(2)) if found else None

    def all(self, rows: Iterable[T], name_of: Any) -> tuple[T, ...]:
        result: list[T] = []
        numbered = [(self.number(name_of(row)), row) for row in rows]
        third = [row for number, row in numbered if number == _DEPTH - 2]
        more = self.count - _DEPTH
        for number, row in numbered:
            if number != _DEPTH - 2:
                result.append(self._moved(row, more if number == _DEPTH - 1 else 0))
            elif row is third[0]:
                result += [self._moved(each, shift) for shift in range(more + 1) for each in third]
        return tuple(result)

    def _moved(self, value: Any, shift: int) -> Any:
        """The same of a later block: names in it move by ``shift`` blocks."""
        if not shift:
            return value
        if isinstance(value, str):
            return self.path.sub(lambda m: f"{m.group(1)}{int(m.group(2)) + shift}", value)
        if isinstance(value, tuple):
            return tuple(self._moved(each, shift) for each in value)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            names = [field.name for field in dataclasses.fields(value)]
            moved = {name: self._moved(getattr(value, name), shift) for name in names}
            return dataclasses.replace(value, **moved)
        return value
