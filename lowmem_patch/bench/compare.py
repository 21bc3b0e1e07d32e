"""Run the variants of one model in turn, round after round, so that noise reaches all of them."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lowmem_patch.bench.measure import Step
from lowmem_patch.bench.variants import VARIANTS, Variant
from lowmem_patch.errors import NothingToPatchError, VariantError
from lowmem_patch.memory import model_state_bytes
from lowmem_patch.tracing.inputs import ExampleInputs

Progress = Callable[[str, int, int], None]

# The first step compiles and chooses kernels, the second may compile once more.
_WARM_UP = 3
_LONGEST_MESSAGE = 300


@dataclasses.dataclass(frozen=True)
class Row:
    """One variant; bytes on a device are above those held before the step.

    Attributes:
        act: bytes held between forward and backward; on the CPU those that autograd saves.
        peak, reserved: the most bytes allocated by tensors, and by the allocator; None on the CPU.
        times: of every timed step, in milliseconds.
        kernels: the sum of the times of all kernels of a step, in milliseconds; None on the CPU.
        failed, skipped: the error, or the reason why the variant does not apply; then without numbers.
    """

    name: str
    act: int | None = None
    peak: int | None = None
    reserved: int | None = None
    times: tuple[float, ...] = ()
    failed: str | None = None
    skipped: str | None = None
    kernels: float | None = None

    @property
    def measured(self) -> bool:
        return bool(self.times)

    @property
    def quartiles(self) -> tuple[float, float, float]:
        """Quartiles of the step time, in milliseconds; the second is the median."""
        if len(self.times) == 1:
            return (self.times[0],) * 3
        low, median, high = statistics.quantiles(self.times, n=4, method="inclusive")
        return low, median, high

    @property
    def busy(self) -> float | None:
        """The share of a step in which kernels run, at most 1; the rest waits for Python and launches."""
        return None if self.kernels is None else min(1.0, self.kernels / self.quartiles[1])

    def to_dict(self, work: int) -> dict[str, Any]:
        """Plain data; ``work`` is the number of tokens, images or rows of a step."""
        if self.failed is not None:
            return {"error": self.failed}
        if self.skipped is not None:
            return {"skipped": self.skipped}
        low, median, high = self.quartiles
        return {
            "act_mib": _mib(self.act),
            "peak_mib": _mib(self.peak),
            "reserved_mib": _mib(self.reserved),
            "step_ms": median,
            "step_spread_ms": high - low,
            "kernels_ms": self.kernels,
            "per_second": 1000 * work / median,
        }


def _mib(size: int | None) -> float | None:
    return None if size is None else size / 2**20


@dataclasses.dataclass(frozen=True)
class Comparison:
    """All variants on one device.

    Attributes:
        work, unit: the number of tokens, images or rows of a step, such as 8192 tokens.
        parked: whether models were moved to the host while another was measured, for lack of memory.
    """

    rows: tuple[Row, ...]
    device: str
    work: int
    unit: str
    rounds: int
    steps: int
    parked: bool

    def to_dict(self) -> dict[str, Any]:
        data = dataclasses.asdict(self)
        del data["rows"]
        return {**data, "variants": {row.name: row.to_dict(self.work) for row in self.rows}}


@dataclasses.dataclass
class _Entry:
    """A variant during the rounds; without a step when it failed or was skipped."""

    row: Row
    step: Step | None = None

    @contextlib.contextmanager
    def record_errors(self) -> Iterator[None]:
        """An error becomes the result of this variant; the others go on."""
        try:
            yield
        except (VariantError, NothingToPatchError) as error:
            self.row, self.step = Row(self.row.name, skipped=_one_line(error)), None
        except Exception as error:  # foreign code and the device may raise anything
            why = f"{type(error).__name__}: {_one_line(error)}"
            self.row, self.step = Row(self.row.name, failed=why), None


def _one_line(error: BaseException) -> str:
    # the cause is in the second line of the compiler's errors
    text = " ".join(str(error).split()) or "no message"
    return text if len(text) <= _LONGEST_MESSAGE else text[: _LONGEST_MESSAGE - 3] + "..."


def compare(
    model: nn.Module,
    inputs: ExampleInputs,
    variants: Mapping[str, Variant] = VARIANTS,
    *,
    rounds: int = 5,
    steps: int = 3,
    autocast: bool = False,
    share_frozen: bool = False,
    progress: Progress | None = None,
) -> Comparison:
    """Measure each variant on a copy of the model; a variant that fails does not stop the others.

    The copies take turns: a round measures, for every variant, the memory of one step and the time of
    ``steps`` more. Where all weights together would fill more than half of the GPU's free memory, the
    copies lie on the host except during their turn.

    Args:
        model: never changed, unless a variant writes into shared weights; on any device, in training
            mode, with ``requires_grad`` as it will train.
        inputs: of a step, on the device to measure on.
        autocast: under bfloat16 autocast.
        share_frozen: the copies share the model's frozen weights, where these lie on the device of the
            inputs and no copy has to wait on the host; a variant that writes into one (a fold) fails.
        progress: called with a text, the number of turns done, and the number of all turns.
    """
    tensors = inputs.tensors
    device = tensors[0].device
    shared = [p for p in model.parameters() if not p.requires_grad and p.device == device]
    shared = shared if share_frozen else []
    parked = device.type == "cuda" and _needs_host_memory(model, shared, len(variants), device)
    shared = [] if parked else shared  # what waits on the host takes all of its weights there
    entries = [_Entry(Row(name)) for name in variants]
    turns = len(entries) * (rounds + 1)
    tell = progress or (lambda *_: None)
    try:
        for number, (entry, variant) in enumerate(zip(entries, variants.values(), strict=True)):
            tell(f"{entry.row.name}: first steps", number, turns)
            with entry.record_errors():
                entry.step = _prepare(model, shared, variant, inputs, device, autocast)
                if parked:
                    entry.step.move("cpu")
            _free_unused(device)
        for turn in range(len(entries), turns):
            entry = entries[turn % len(entries)]
            if entry.step is not None:
                tell(f"{entry.row.name}: round {turn // len(entries)}", turn, turns)
                with entry.record_errors():
                    _take_turn(entry, entry.step, steps, parked)
                _free_unused(device)
    finally:
        for entry in entries:
            entry.step = None
        _free_unused(device)
    work, unit = _work(inputs, tensors)
    rows = tuple(entry.row for entry in entries)
    return Comparison(rows, str(device), work, unit, rounds, steps, parked)


def _prepare(
    model: nn.Module,
    shared: Sequence[nn.Parameter],
    variant: Variant,
    inputs: ExampleInputs,
    device: torch.device,
    autocast: bool,
) -> Step:
    """A copy of the model but for shared weights, made into the variant, after its first steps."""
    versions = [parameter._version for parameter in shared]
    copied: Any = copy.deepcopy(model, {id(parameter): parameter for parameter in shared}).to(
        device
    )
    with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
        step = Step(variant(copied, inputs), inputs, autocast=autocast)
    for _ in range(_WARM_UP):
        step.run()
    if versions != [parameter._version for parameter in shared]:
        raise RuntimeError(
            "it wrote into frozen weights, which the variants share: measure it without share_frozen"
        )
    return step


def _take_turn(entry: _Entry, step: Step, steps: int, parked: bool) -> None:
    if parked:
        step.move(step.device)
    step.run()
    row, memory = entry.row, step.memory()
    # equal in every round, except where a kernel that was chosen late allocates more
    most = {
        name: max(size, getattr(row, name) or 0)
        for name, size in dataclasses.asdict(memory).items()
        if size is not None
    }
    step.run()  # leaves the caching allocator as a training loop finds it
    times = (*row.times, *(step.milliseconds() for _ in range(steps)))
    kernels = step.kernel_milliseconds() if row.kernels is None else row.kernels
    entry.row = dataclasses.replace(row, times=times, kernels=kernels, **most)
    if parked:  # while others have their turn
        step.move("cpu")


def _free_unused(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _needs_host_memory(
    model: nn.Module, shared: Sequence[nn.Parameter], copies: int, device: torch.device
) -> bool:
    states = model_state_bytes(model, "adamw")
    of_one = states.parameters + states.optimizer - sum(parameter.nbytes for parameter in shared)
    return copies * of_one > torch.cuda.mem_get_info(device)[0] / 2


def _work(inputs: ExampleInputs, tensors: list[Tensor]) -> tuple[int, str]:
    """The number of tokens, images or rows of a step, and their name."""
    tokens = inputs.kwargs.get("input_ids")
    if isinstance(tokens, Tensor):
        return tokens.numel(), "tokens"
    return len(tensors[0]), "images" if tensors[0].ndim == 4 else "rows"
