"""The levels of blocks that take the least time within a limit of bytes: solved exactly, by dynamic
programming.

Each run of a block has choices. What a run holds until backward counts in every later part of the forward,
and in the backward of every later run. So a choice is bound by the bytes that the runs before it hold, and by
the copies to the host that are not made yet: for each run the pairs (bytes held, seconds) that no other pair
beats in both are kept, by how far behind the copies are.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

_SEGMENTS = ("segment", "halves")
_PARTS = 4  # of a run's forward, in which copies are counted
_LONGEST = 64  # runs of a segment whose inputs are all computed at one time
# more pairs than this are told apart by this share of the limit only
_MOST_PAIRS, _GRAINS = 4096, 1 << 14


@dataclasses.dataclass(frozen=True)
class Choice:
    """A level of one run.

    Attributes:
        level: its name.
        own: bytes that it holds until backward, without the run's input and output.
        forward, backward: the largest sums in these parts of the step, less what the runs before it hold.
        seconds: more than as patched.
        keeps_input, keeps_output: it holds these too.
        copy: seconds of its copies to the host.
        away, lag: bytes of an offloaded run, which are on the device still in so many runs behind it, and
            already in their backwards.
        window: from the middle of its forward on, until the next blocks wait for these.
    """

    level: str
    own: int
    forward: int
    backward: int
    seconds: float
    keeps_input: bool = True
    keeps_output: bool = False
    copy: float = 0.0
    away: int = 0
    lag: int = 0
    window: float = math.inf


@dataclasses.dataclass(frozen=True)
class Step:
    """One run of a block.

    Attributes:
        choices: one for each level that it may have.
        output: bytes of what it gives to the next.
        behind: the largest sum behind it, up to the next run, less what it and those before it hold.
        block: the number of its block; runs of one block have one level.
        links: it reads the very output of the run before.
        again: seconds of its forward, for a segment.
        forward: seconds of its forward, beside which copies run.
    """

    choices: tuple[Choice, ...]
    output: int
    behind: int
    block: int
    links: bool = False
    again: float = 0.0
    forward: float = 0.0


@dataclasses.dataclass(frozen=True)
class Solution:
    """The level of each run, and the seconds that they cost."""

    levels: tuple[str, ...]
    seconds: float


class _Pair(NamedTuple):
    """What the runs so far hold, without the last one's output, and the seconds that they cost: those of the
    pair ``before``, and behind them the last ones, at these levels."""

    held: int
    seconds: float
    before: _Pair | None = None
    last: tuple[str, ...] = ()


# whether the last run holds its output, copies that are not made yet, which of the last runs are offloaded
_Key = tuple[bool, int, int]
_Front = dict[_Key, list[_Pair]]


def _unbeaten(pairs: list[_Pair], limit: int) -> list[_Pair]:
    """The pairs that no other beats in bytes and seconds."""
    grain = max(1, limit // _GRAINS) if len(pairs) > _MOST_PAIRS else 1
    found: list[_Pair] = []
    for pair in sorted(pairs, key=lambda p: (-(-p.held // grain), p.seconds)):
        if found and pair.seconds >= found[-1].seconds:
            continue
        if found and -(-pair.held // grain) == -(-found[-1].held // grain):
            continue
        found.append(pair)
    return found


class _Copies:
    """Copies to the host that are not made yet, in parts of a usual run's forward, and the bytes of the last
    runs that are on the device still, or in the backward already."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self.part = sum(step.forward for step in steps) / max(1, len(steps)) / _PARTS
        self.away = [max(choice.away for choice in step.choices) for step in steps]
        self.lag = max((choice.lag for step in steps for choice in step.choices), default=0)

    def behind(self, busy: int, step: Step, choice: Choice) -> tuple[int, float]:
        """How far behind copies are after a run, and the seconds that a later run waits for its own."""
        if not busy and not choice.copy:
            return 0, 0.0
        half = step.forward / 2
        copies = max(0.0, busy * self.part - half) + choice.copy
        waits = max(0.0, copies - choice.window) if choice.copy else 0.0
        later = max(0.0, copies - waits - half)
        return (round(later / self.part) if self.part else 0), waits

    def later(self, last: int, choice: Choice) -> int:
        """Which of the last runs are offloaded, one bit each, behind one more."""
        return (last << 1 | (choice.lag > 0)) & ((1 << self.lag) - 1)

    def on_device(self, number: int, last: int) -> tuple[int, int]:
        """Bytes of offloaded runs before this one, in its forward and in its backward."""
        if not last:
            return 0, 0
        sizes = [self.away[number - 1 - bit] if last >> bit & 1 else 0 for bit in range(self.lag)]
        return sum(sizes[:-1]), sum(sizes)


def _single(
    front: _Front, steps: Sequence[Step], number: int, choice: Choice, limit: int, copies: _Copies
) -> Iterator[tuple[_Key, _Pair]]:
    """Pairs behind one run that has this level."""
    step = steps[number]
    output = steps[number - 1].output if number else 0
    for (kept, busy, last), pairs in front.items():
        later, waits = copies.behind(busy, step, choice)
        seconds = choice.seconds + waits
        more = output if kept or choice.keeps_input else 0
        ahead, back = copies.on_device(number, last)
        room = limit - max(
            choice.forward + ahead,
            choice.backward + more + back,
            step.behind + choice.own + more + ahead + choice.away,
        )
        key = choice.keeps_output, later, copies.later(last, choice)
        for pair in pairs:
            if pair.held > room:
                break  # they are sorted
            sums = (pair.held + more + choice.own, pair.seconds + seconds)
            yield key, _Pair(*sums, pair, (choice.level,))


def _segments(
    front: _Front, steps: Sequence[Step], start: int, limit: int, kind: str
) -> Iterator[tuple[int, list[_Pair]]]:
    """Pairs behind a segment that begins at a run and grows by one run at a time, with the number of the run
    behind it."""
    first, output = _checkpointed(steps[start]), steps[start - 1].output if start else 0
    if first is None:
        return
    own, seconds = first.own, first.seconds
    levels: tuple[str, ...] = (first.level,)
    waiting = largest = 0
    # bytes beside those that were held before it and its input, which is among what its forward needs
    needed = max(first.forward - output, first.backward, own + steps[start].behind)
    longest = len(steps) if kind == "halves" else start + _LONGEST
    for number in range(start + 1, min(len(steps), longest)):
        step, choice, given = steps[number], _checkpointed(steps[number]), steps[number - 1].output
        if choice is None or not step.links or step.block == steps[start].block:
            return
        waiting, largest = waiting + given, max(largest, given)
        known = waiting
        if kind == "halves":
            known = min(known, largest * ((number - start).bit_length() + 1))
        runs = choice.forward, choice.own + step.behind, known + choice.backward
        needed = max(needed, own + max(runs))
        own, seconds, levels = own + choice.own, seconds + choice.seconds, (*levels, kind)
        cost = seconds + _again(steps, start, number, kind)
        found = []
        for pairs in front.values():
            for pair in pairs:
                held = pair.held + output
                if held + needed > limit:
                    break  # they are sorted
                found.append(_Pair(held + own, pair.seconds + cost, pair, levels))
        if found:
            yield number + 1, found


def _checkpointed(step: Step) -> Choice | None:
    return next((choice for choice in step.choices if choice.level == "checkpointed"), None)


def _again(steps: Sequence[Step], start: int, last: int, kind: str) -> float:
    """Seconds of the runs that give the inputs of a segment again."""
    once = sum(step.again for step in steps[start:last])
    if kind == "segment":
        return once
    # each half runs again for the one before it
    return once * max(1.0, (last - start).bit_length() / 2)


def _solve(steps: Sequence[Step], limit: int, kinds: Sequence[str]) -> Solution | None:
    fronts: list[_Front] = [defaultdict(list) for _ in range(len(steps) + 1)]
    fronts[0][False, 0, 0] = [_Pair(0, 0.0)]
    copies = _Copies(steps)
    for number, step in enumerate(steps):
        front = {key: _unbeaten(pairs, limit) for key, pairs in fronts[number].items()}
        for choice in step.choices:
            for key, pair in _single(front, steps, number, choice, limit, copies):
                fronts[number + 1][key].append(pair)
        for kind in kinds:
            for behind, pairs in _segments(front, steps, number, limit, kind):
                fronts[behind][False, 0, 0] += pairs  # copies are made within a segment
    last = [pair for pairs in fronts[-1].values() for pair in pairs]
    if not last:
        return None
    best = min(last, key=lambda pair: (pair.seconds, pair.held))
    return Solution(tuple(_levels(best)), best.seconds)


def _levels(pair: _Pair | None) -> list[str]:
    found: list[tuple[str, ...]] = []
    while pair is not None:
        found.append(pair.last)
        pair = pair.before
    return [level for part in reversed(found) for level in part]


def _fixed(steps: Sequence[Step], levels: Mapping[int, str]) -> list[Step]:
    return [
        step
        if step.block not in levels
        else dataclasses.replace(
            step, choices=tuple(c for c in step.choices if c.level == levels[step.block])
        )
        for step in steps
    ]


def solve(steps: Sequence[Step], limit: int) -> Solution | None:
    """The levels that take the least time, where no part of the step exceeds ``limit`` bytes; None where
    there are none.

    Segments are looked at where single blocks do not fit: they cost a second forward.
    """
    counts = Counter(step.block for step in steps)
    tied = [block for block, count in counts.items() if count > 1]
    names = list(dict.fromkeys(choice.level for step in steps for choice in step.choices))
    for kinds in ((), ("segment",), _SEGMENTS):
        found = []
        for levels in itertools.product(names, repeat=min(len(tied), 2)):
            # more than two blocks that run several times share the last level
            given = {block: levels[min(i, len(levels) - 1)] for i, block in enumerate(tied)}
            fixed = _fixed(steps, given)
            # a block that runs several times may not have a level of others
            solution = _solve(fixed, limit, kinds) if all(one.choices for one in fixed) else None
            if solution is not None:
                found.append(solution)
        if found:
            return min(found, key=lambda solution: solution.seconds)
    return None


def least_limit(steps: Sequence[Step], enough: int) -> int:
    """The least limit that can be met, up to 1 in 1000; ``enough`` is one that can."""
    low, high = 0, enough
    while high - low > max(1, high // 1000):
        middle = (low + high) // 2
        if solve(steps, middle) is None:
            low = middle
        else:
            high = middle
    return high
