"""A patched LLaMA on all GPUs of one machine: DDP, FSDP2 and GPipe beside the unpatched one, and budgets.

    python benchmarks/several_gpus.py --json benchmarks/results/several-h200.json
    python benchmarks/several_gpus.py --device cpu --tiny            # a trial: two processes, no bytes

The widths are those of Llama-3-8B, with six layers and a vocabulary of 32,000; each GPU has a batch of its
own (GPipe: one of four times its rows, in four microbatches). *Step peak* is the most that the allocator
of one GPU gave in a step above what rests between steps (shards of weights, optimizer's states): the largest
of all GPUs. The rows of one table have the same weights and the same batches, so their losses must agree.

Budgets have a vocabulary of 128,256. *Predicted* is what ``patch_report(model).fit`` says of each GPU,
*measured* the most that the allocator of any GPU gave in a step, model states included.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.multiprocessing import start_processes
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

from lowmem_patch import BudgetError, patch_model, patch_report
from lowmem_patch.bench import environment
from lowmem_patch.planning.fit_report import FitReport

WAYS = ("ddp", "fsdp2", "fsdp2+checkpointing", "gpipe")
TRAINS = ("full", "lora")
VARIANTS = ("unpatched", "exact", "auto")
MICROBATCHES, STEPS, WARM_UP, RATE = 4, 6, 2, 2e-5


@dataclasses.dataclass(frozen=True)
class Size:
    """What all models of a run have in common."""

    width: int = 4096
    inner: int = 14336
    heads: int = 32
    layers: int = 6
    vocabulary: int = 32000
    rows: int = 2
    length: int = 2048


TINY = Size(width=64, inner=128, heads=8, layers=2, vocabulary=512, rows=2, length=16)


@dataclasses.dataclass(frozen=True)
class Machine:
    """One process and its device."""

    device: torch.device
    rank: int
    world: int

    def rests(self) -> int:
        """Bytes allocated now; the peak is counted from here."""
        if self.device.type == "cpu":
            return 0
        torch.cuda.synchronize()
        # for it the allocator frees what NCCL's stream is done with
        torch.empty(1, device=self.device)
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()

    def peak(self) -> int:
        """Bytes of the GPU that had most."""
        most = 0 if self.device.type == "cpu" else torch.cuda.max_memory_allocated()
        return int(self.most(most))

    def most(self, value: float) -> float:
        found = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return float(found)

    def mean(self, value: float) -> float:
        found = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(found)
        return float(found) / self.world

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def clear(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch._C._cuda_clearCublasWorkspaces()
            torch.cuda.empty_cache()
        dist.barrier()


def build(size: Size, trains: str, machine: Machine) -> Any:
    """In bfloat16, the same weights on every GPU; adapters are bfloat16, as FSDP2 asks for one dtype."""
    config = LlamaConfig(
        hidden_size=size.width, intermediate_size=size.inner, num_attention_heads=size.heads,
        num_key_value_heads=size.heads // 4, num_hidden_layers=size.layers, vocab_size=size.vocabulary,
        use_cache=False, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    with machine.device:
        model: Any = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
        if trains == "lora":
            adapters = LoraConfig(r=16, target_modules="all-linear")
            model = get_peft_model(model, adapters, autocast_adapter_dtype=False)
    return model.train()


def batch(size: Size, machine: Machine, seed: int, rows: int | None = None) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = (rows or size.rows, size.length)
    return torch.randint(size.vocabulary, shape, generator=generator).to(machine.device)


def sharded(model: Any, machine: Machine) -> Any:
    """Each block is a group of FSDP2, and the rest another."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    mesh = init_device_mesh(machine.device.type, (machine.world,))
    for layer in base.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


class Stage(nn.Module):
    """The layers of one process, with the embedding before the first and the head behind the last."""

    def __init__(self, core: Any, machine: Machine) -> None:
        super().__init__()
        layers, own = list(core.model.layers), len(core.model.layers) // machine.world
        self.layers = nn.ModuleList(layers[machine.rank * own : (machine.rank + 1) * own])
        self.rotary = core.model.rotary_emb
        self.embedding = core.model.embed_tokens if machine.rank == 0 else None
        last = machine.rank == machine.world - 1
        self.norm, self.head = (core.model.norm, core.lm_head) if last else (None, None)

    def forward(self, hidden: Tensor) -> Tensor:
        if self.embedding is not None:
            hidden = self.embedding(hidden)
        positions = torch.arange(hidden.shape[1], device=hidden.device)[None]
        rotations = self.rotary(hidden, positions)
        for layer in self.layers:
            found = layer(
                hidden, attention_mask=None, position_ids=positions, position_embeddings=rotations
            )
            hidden = found[0] if isinstance(found, tuple) else found
        if self.norm is None or self.head is None:
            return hidden
        logits: Tensor = self.head(self.norm(hidden))
        return logits


def next_tokens(logits: Tensor, ids: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten())


class Trained:
    """A model in its loop: ``step`` gives the loss, or on a stage that is not the last 0."""

    def __init__(self, way: str, model: Any, size: Size, machine: Machine) -> None:
        self.schedule = None
        self.last = machine.rank == machine.world - 1
        if way == "ddp":
            ids = [machine.rank] if machine.device.type == "cuda" else None
            model = DistributedDataParallel(model, device_ids=ids)
        elif way.startswith("fsdp2"):
            model = sharded(model, machine)
        else:
            core = model.get_base_model() if hasattr(model, "get_base_model") else model
            model = Stage(core, machine)
            stage = PipelineStage(model, machine.rank, machine.world, machine.device)
            self.schedule = ScheduleGPipe(stage, MICROBATCHES, loss_fn=next_tokens)
        gpipe = self.schedule is not None
        rows = MICROBATCHES * size.rows if gpipe else size.rows
        self.ids = batch(size, machine, 5 if gpipe else 5 + machine.rank, rows)
        self.model, self.first = model, machine.rank == 0
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=RATE, fused=True)

    def step(self) -> float:
        loss = self._backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss

    def _backward(self) -> float:
        if self.schedule is None:
            loss = self.model(input_ids=self.ids, labels=self.ids).loss
            loss.backward()
            return float(loss.detach())
        losses: list[Tensor] = []
        if self.first:
            self.schedule.step(self.ids)
        else:
            self.schedule.step(target=self.ids, losses=losses)
        return float(torch.stack(losses).mean()) if losses else 0.0


def trained_row(
    way: str, trains: str, variant: str, size: Size, machine: Machine
) -> dict[str, Any]:
    """Losses, the step's peak and its time."""
    model = build(size, trains, machine)
    if way.endswith("checkpointing"):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if trains == "lora":
            model.enable_input_require_grads()
    if variant != "unpatched":
        example = {"input_ids": batch(size, machine, 5)}
        patch_model(model, variant, example_inputs=example | {"labels": example["input_ids"]})
    trained = Trained(way, model, size, machine)
    del model
    losses = [trained.step() for _ in range(WARM_UP)]
    gc.collect()  # what planning left in circles would count as resting
    rests, times = machine.rests(), []
    for _ in range(STEPS):
        machine.wait()
        dist.barrier()
        start = time.perf_counter()
        losses.append(trained.step())
        machine.wait()
        times.append(1000 * (time.perf_counter() - start))
    peak = machine.peak()
    over = machine.world if way == "gpipe" else 1  # one stage of a pipeline has the loss
    low, median, high = statistics.quantiles(times, n=4, method="inclusive")
    return {
        "step_peak_mib": machine.most((peak - rests) / 2**20),
        "step_ms": median, "step_spread_ms": high - low,
        "losses": [machine.mean(loss) * over for loss in losses],
    }  # fmt: skip


def budget_rows(trains: str, way: str, size: Size, machine: Machine) -> list[dict[str, Any]]:
    """Without a budget that binds, and within one halfway between the model states and that peak."""
    huge, rows = 2**50, []
    budget: int = huge
    for _ in range(2):
        machine.clear()
        before = machine.rests()
        model = build(size, trains, machine)
        model, fit = fitted(model, way, budget, size, machine)
        trained = Trained(way, model, size, machine)
        del model
        for _ in range(WARM_UP):
            trained.step()
        gc.collect()
        machine.rests()
        trained.step()
        measured = machine.peak() - before
        del trained
        row = {"way": way, "train": trains, "predicted": fit.predicted, "measured": measured}
        row |= {
            "error": fit.predicted / measured - 1 if measured > 0 else 0.0,
            "moment": fit.moment,
        }
        rows.append(row | {"levels": fit.levels} | ({} if budget == huge else {"budget": budget}))
        held = fit.parameters + fit.optimizer_state
        budget = held + (fit.predicted - held) // 2
    return rows


def fitted(
    model: Any, way: str, budget: int, size: Size, machine: Machine
) -> tuple[Any, FitReport]:
    """All processes plan alike: the batch of the plan is the same on all of them."""
    ids = batch(size, machine, 5)
    settings: dict[str, Any] = {"example_inputs": {"input_ids": ids, "labels": ids}}
    if way != "ddp":
        settings["gpus"] = machine.world
    try:
        patch_model(model, "auto", fit=budget, **settings)
    except BudgetError as error:
        if error.least is None:
            raise
        patch_model(model, "auto", fit=error.least, **settings)
    fit = patch_report(model).fit
    assert fit is not None
    return model, fit


def run(rank: int, options: argparse.Namespace) -> None:
    """One process: all rows, in the same order everywhere."""
    backend = "nccl" if options.device == "cuda" else "gloo"
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="29541")
    device = torch.device(options.device, rank) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, rank=rank, world_size=options.gpus)
    machine, size = Machine(device, rank, options.gpus), TINY if options.tiny else Size()
    result: dict[str, Any] = {"environment": environment(options.device), "gpus": options.gpus}
    result |= {"trainings": [], "budgets": []}
    for way in WAYS:
        for trains in TRAINS:
            for variant in VARIANTS:
                known = {"way": way, "train": trains, "variant": variant}
                if options.only not in " ".join(known.values()):
                    continue
                row = known | attempt(
                    functools.partial(trained_row, way, trains, variant, size, machine)
                )
                result["trainings"].append(row)
                machine.clear()
                save(result, row, machine, options.json)
    larger = size if options.tiny else dataclasses.replace(size, vocabulary=128256, layers=8)
    for way in ("fsdp2", "ddp"):
        for trains in TRAINS:
            if options.only not in f"budget {way} {trains}":
                continue
            found = attempt(functools.partial(budget_rows, trains, way, larger, machine))
            rows = [{"way": way, "train": trains, **found}] if isinstance(found, dict) else found
            for row in rows:
                result["budgets"].append(row)
                save(result, row, machine, options.json)
            machine.clear()
    dist.destroy_process_group()


def attempt(rows: Any) -> Any:
    """The other rows go on where one cannot be had, on all processes alike."""
    try:
        return rows()
    except Exception as error:
        return {"error_text": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}


def save(result: dict[str, Any], row: dict[str, Any], machine: Machine, path: Path | None) -> None:
    if machine.rank != 0:
        return
    print(json.dumps(row), flush=True)
    if path is not None:
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--gpus", type=int, help="default: all of them; on a CPU two processes")
    parser.add_argument(
        "--only", default="", help="rows whose name contains this, as 'budget fsdp2'"
    )
    parser.add_argument("--tiny", action="store_true", help="a trial at tiny widths")
    parser.add_argument("--json", type=Path, help="write the rows there")
    options = parser.parse_args()
    options.gpus = options.gpus or (torch.cuda.device_count() if options.device == "cuda" else 2)
    start_processes(run, (options,), nprocs=options.gpus, start_method="spawn")


if __name__ == "__main__":
    main()
