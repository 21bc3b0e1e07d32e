"""The plan of a model of many equal blocks, from the plans of the same model with three and with four."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from torch import nn

from lowmem_patch.config import PatchConfig
from lowmem_patch.memory.blocks import DEPTHS, repeated_blocks, shortened
from lowmem_patch.planning.plan import Plan
from lowmem_patch.planning.planner import plan_model, trace_whole
from lowmem_patch.planning.report import PatchReport
from lowmem_patch.tracing.inputs import ExampleInputs
from lowmem_patch.tracing.shadow import Shadow, make_shadow

T = TypeVar("T")
_NUMBER = re.compile(r"\d+(?:,\d{3})*")


@dataclasses.dataclass(frozen=True)
class Plans:
    """What a patch would do to a model.

    Attributes:
        report: of the whole model.
        blocks: the path of its repeated blocks, where the plans are of a few of them; or None.
        plans: by the number of blocks; of the whole model by None.
        shadows: the patched copies from which the report was counted, by the same.
    """

    report: PatchReport
    blocks: str | None
    plans: Mapping[int | None, Plan]
    shadows: Mapping[int | None, Shadow]


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
    return Plans(planned.report, None, {None: planned.plan}, {None: planned.shadow})


def _few(model: nn.Module, config: PatchConfig, inputs: ExampleInputs, name: str) -> Plans | None:
    """None where the blocks save different amounts, or a report names what cannot be counted on."""
    least, few, more = DEPTHS
    plans: dict[int | None, Plan] = {}
    shadows: dict[int | None, Shadow] = {}
    reports: dict[int, PatchReport] = {}
    with shortened(model, name, least):
        saved = trace_whole(make_shadow(model, inputs), structure=False).saved
    for depth in (few, more):
        with shortened(model, name, depth):
            planned = plan_model(model, config, inputs)
        reports[depth], plans[depth] = planned.report, planned.plan
        shadows[depth] = planned.shadow
    if reports[more].saved_before - reports[few].saved_before != (
        reports[few].saved_before - saved.activations
    ):
        return None
    count = sum(1 for _ in model.get_submodule(name).children())
    report = _extended(reports[few], reports[more], name, count)
    if report is None:
        return None
    return Plans(report, name, plans, shadows)


def _extended(few: PatchReport, more: PatchReport, name: str, count: int) -> PatchReport | None:
    """The report of ``count`` blocks, from those of three blocks and of four."""
    blocks = count - DEPTHS[1]

    def line(first: int, second: int) -> int:
        return first + blocks * (second - first)

    def lines(first: Mapping[str, int], second: Mapping[str, int]) -> dict[str, int]:
        return {key: line(first.get(key, 0), size) for key, size in second.items()}

    notes = [_line_of_text(*pair, blocks) for pair in zip(few.notes, more.notes, strict=False)]
    texts = [note for note in notes if note is not None]
    if len(texts) < max(len(few.notes), len(more.notes)):
        return None
    repeated = _Repeated(name, count)
    outside = {key: line(before, after) for key, before, after in _outside(few, more, repeated)}
    after = {key: line(*sizes) for key, *sizes in _outside(few, more, repeated, after=True)}
    floors = lines(few.floor_blocks, more.floor_blocks)
    return dataclasses.replace(
        more,
        sites=repeated.all(more.sites, lambda site: site.name),
        saved_before=line(few.saved_before, more.saved_before),
        saved_after=line(few.saved_after, more.saved_after),
        weight_copies_before=line(few.weight_copies_before, more.weight_copies_before),
        weight_copies_after=line(few.weight_copies_after, more.weight_copies_after),
        blocks=tuple(
            (block, outside.get(block, size), after.get(block, size_after))
            for block, size, size_after in repeated.all(more.blocks, lambda row: row[0])
        ),
        notes=tuple(texts),
        floor=line(few.floor, more.floor),
        floor_blocks={
            block: floors[block] if repeated.number(block) is None else size
            for block, size in repeated.all(more.floor_blocks.items(), lambda row: row[0])
        },
        kinds=dataclasses.replace(
            more.kinds,
            before=lines(few.kinds.before, more.kinds.before),
            after=lines(few.kinds.after, more.kinds.after),
            floor=lines(few.kinds.floor, more.kinds.floor),
        ),
    )


def _outside(
    few: PatchReport, more: PatchReport, repeated: _Repeated, *, after: bool = False
) -> list[tuple[str, int, int]]:
    """Bytes outside of the repeated blocks, with three of them and with four."""
    column = 2 if after else 1
    known: dict[str, int] = {row[0]: int(row[column]) for row in few.blocks}
    rows = [row for row in more.blocks if repeated.number(row[0]) is None]
    return [(row[0], known.get(row[0], 0), int(row[column])) for row in rows]


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
        """Of the block that a module is, or lies in."""
        found = self.path.match(name)
        return int(found.group(2)) if found else None

    def all(self, rows: Iterable[T], name_of: Any) -> tuple[T, ...]:
        third, last = DEPTHS[2] - 2, DEPTHS[2] - 1
        result: list[T] = []
        given = list(rows)
        middle = [row for row in given if self.number(name_of(row)) == third]
        for row in given:
            number = self.number(name_of(row))
            if number == third:
                if row is middle[0]:
                    for shift in range(self.count - DEPTHS[2] + 1):
                        result += [self._moved(each, shift) for each in middle]
            else:
                result.append(self._moved(row, self.count - DEPTHS[2] if number == last else 0))
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
            fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
            return dataclasses.replace(value, **self._moved_fields(fields, shift))
        return value

    def _moved_fields(self, fields: dict[str, Any], shift: int) -> dict[str, Any]:
        return {key: self._moved(each, shift) for key, each in fields.items()}
