"""The solver finds what trying everything finds."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest

from lowmem_patch.planning.solve import Choice, Step, least_limit, solve


def peaks_of(steps: list[Step], levels: tuple[str, ...]) -> tuple[int, float]:
    """The largest part of a step and the seconds, straight from the definition."""
    chosen = [
        next(choice for choice in step.choices if choice.level == level)
        for step, level in zip(steps, levels, strict=True)
    ]

    def held_output(number: int) -> int:
        keeps = chosen[number].keeps_output or (
            number + 1 < len(chosen) and chosen[number + 1].keeps_input
        )
        return steps[number].output if keeps else 0

    most = 0
    for number, choice in enumerate(chosen):
        own = sum(earlier.own for earlier in chosen[:number])
        before = own + sum(held_output(i) for i in range(number))
        without_input = own + sum(held_output(i) for i in range(number - 1))
        most = max(
            most, without_input + choice.forward, before + choice.backward,
            before + choice.own + steps[number].behind,
        )  # fmt: skip
    return most, sum(choice.seconds for choice in chosen)


def random_steps(numbers: random.Random, count: int) -> list[Step]:
    steps = []
    for number in range(count):
        whole = numbers.randint(20, 60)
        transient = numbers.randint(1, 30)
        choices = (
            Choice("patched", whole, whole + 10, whole + transient, 0.0,
                   numbers.random() < 0.5, numbers.random() < 0.3),
            Choice("attention", whole // 3, whole + 5, whole + transient + 5, numbers.uniform(1, 4)),
            Choice("checkpointed", 0, whole, whole + transient + 8, numbers.uniform(2, 5)),
            Choice("host", 0, whole, whole + transient + 12, numbers.uniform(3, 7), False),
        )  # fmt: skip
        steps.append(Step(choices, numbers.randint(2, 9), numbers.randint(1, 20), number))
    return steps


@pytest.mark.parametrize("seed", range(12))
def test_it_is_the_best_of_all(seed: int) -> None:
    numbers = random.Random(seed)
    steps = random_steps(numbers, 5)
    names = ("patched", "attention", "checkpointed", "host")
    every = [(peaks_of(steps, levels), levels) for levels in itertools.product(names, repeat=5)]
    least = min(peak for (peak, _), _ in every)
    most = max(peak for (peak, _), _ in every)
    for limit in (least, *(numbers.randint(least, most) for _ in range(6)), most):
        wanted = min(seconds for (peak, seconds), _ in every if peak <= limit)
        found = solve(steps, limit)
        assert found is not None
        peak, seconds = peaks_of(steps, found.levels)
        assert peak <= limit and found.seconds == pytest.approx(seconds) == pytest.approx(wanted)
    assert solve(steps, least - 1) is None
    assert least <= least_limit(steps, most) <= least + 1


def test_blocks_that_run_several_times_have_one_level() -> None:
    steps = random_steps(random.Random(3), 6)
    levels = dict(enumerate((0, 1, 0, 1, 0, 2)))  # block by run
    shared = [Step(s.choices, s.output, s.behind, levels[i]) for i, s in enumerate(steps)]
    least = least_limit(shared, 10_000)
    for limit in (least, least + 20, least + 60, 1000):
        found = solve(shared, limit)
        assert found is not None
        assert all(len({found.levels[i] for i in levels if levels[i] == b}) == 1 for b in range(3))


def test_a_block_that_runs_several_times_needs_no_level_of_others() -> None:
    """As under X-LoRA, whose classifier runs the model once more."""
    one, other, *_ = equal_steps(2)
    alone = dataclasses.replace(
        other, choices=(*other.choices, Choice("offloaded", 0, 10, 10, 9.0))
    )
    steps = [one, alone, dataclasses.replace(one, links=False)]  # the first block, twice
    found = solve(steps, 200)
    assert found is not None and found.levels == ("patched",) * 3
    found = solve(steps, 100)
    assert found is not None and found.levels[0] == found.levels[2]
    assert solve(steps, 1) is None


def equal_steps(count: int) -> list[Step]:
    patched = Choice("patched", 40, 50, 50, 0.0, keeps_input=False)
    again = Choice("checkpointed", 0, 20, 60, 1.0)
    return [Step((patched, again), 4, 4, i, links=i > 0, again=1.0) for i in range(count)]


def test_segments_hold_square_roots_and_logarithms() -> None:
    steps = equal_steps(100)
    assert solve(steps, 99 * 4 + 60) is not None
    one = solve(steps, 60 + 4 * 20)  # 10 segments of 10
    assert one is not None and set(one.levels) <= {"patched", "checkpointed", "segment"}
    assert one.levels.count("checkpointed") <= 22 and one.levels.count("patched") <= 1
    least = solve(steps, 60 + 4 * 10)
    assert least is not None and "halves" in least.levels
    assert solve(steps, 62) is None


def test_no_segment_where_blocks_alone_fit_or_are_not_linked() -> None:
    solution = solve(equal_steps(30), 200)
    assert solution is not None and "segment" not in solution.levels
    unlinked = [Step(s.choices, s.output, s.behind, s.block) for s in equal_steps(100)]
    assert solve(unlinked, 60 + 4 * 20) is None


def test_many_blocks_take_little_time() -> None:
    """Unequal ones, whose sums are all different."""
    steps = random_steps(random.Random(1), 120)
    least = least_limit(steps[:20], 100_000)
    assert solve(steps, 8 * least) is not None
