"""Two processes, each way to train on several devices: what a patched LLaMA gives, beside the unpatched one.

``python tests/life/distributed_runs.py FOLDER DEVICE`` leaves ``runs.pt`` in FOLDER: losses, gradients and
saved bytes by name of the run.
"""

from __future__ import annotations

import copy
import datetime
import itertools
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.multiprocessing import start_processes
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaForCausalLM

from lowmem_patch import patch_model, patch_report, unpatch_model
from lowmem_patch.errors import LowmemPatchError
from tests.life.distributed_models import (
    COLUMNS,
    INPUTS,
    LENGTH,
    MICROBATCHES,
    ROWS,
    VOCABULARY,
    WORLD,
    Block,
    Stage,
    adapted,
    backward_of,
    layers_of,
    llama,
    loss_of,
    next_token_loss,
    train,
    whole,
)
from tests.support.models import randomise
from tests.support.step import StayInFloat64


class Runs:
    """Every run by name; ``device`` decides the backend."""

    def __init__(self, rank: int, device: torch.device, folder: Path) -> None:
        self.rank, self.device, self.folder = rank, device, folder
        self.mesh = init_device_mesh(device.type, (WORLD,))
        generator = torch.Generator().manual_seed(7)
        self.all = torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=generator).to(device)
        self.own = self.all.chunk(WORLD)[rank].clone()
        self.models: dict[Any, Any] = {}
        self.found: dict[str, Any] = {}

    def record(self, name: str, run: Callable[..., dict[str, Any]], *args: Any) -> None:
        try:
            self.found[name] = run(*args)
        except Exception as error:  # one run that fails is one red test
            where = "".join(traceback.format_tb(error.__traceback__)[-3:])
            self.found[name] = {"error": f"{type(error).__name__}: {error}\n{where}"}

    def model(self, trains: str, preset: str | None) -> Any:
        """A copy of one that was patched once: a plan costs more than a step."""
        key = (trains, preset, torch.is_autocast_enabled(self.device.type))
        if key not in self.models:
            model = llama(trains).to(self.device)
            self.models[key] = model if preset is None else patch_model(model, preset)
        return copy.deepcopy(self.models[key])

    def alone(self, trains: str, preset: str | None, tokens: Tensor) -> dict[str, Any]:
        def step(model: Any, tokens: Tensor) -> Tensor:
            loss = loss_of(model, tokens)
            loss.backward()
            return loss

        return train(self.model(trains, preset), tokens, step)

    def truth(self, trains: str) -> dict[str, Any]:
        """Of all rows, in float64, in one process, unpatched."""

        def step(model: Any, tokens: Tensor) -> Tensor:
            with StayInFloat64():
                loss = loss_of(model, tokens)
            loss.backward()
            return loss

        model = llama(trains).to(self.device)
        for parameter in model.parameters():
            parameter.data = parameter.data.double()
        return train(model, self.all, step)

    def ddp(self, trains: str, preset: str | None) -> dict[str, Any]:
        model = self.model(trains, preset)
        return train(DistributedDataParallel(model), self.own, backward_of)

    def ddp_compiled(self, trains: str, preset: str | None) -> dict[str, Any]:
        """torch.compile cuts the graph where DDP's buckets end."""
        model = DistributedDataParallel(self.model(trains, preset))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the compiler's own
            torch._dynamo.reset()
            return train(torch.compile(model, backend="aot_eager"), self.own, backward_of)

    def fsdp(self, trains: str, preset: str | None) -> dict[str, Any]:
        return train(self.sharded(self.model(trains, preset)), self.own, backward_of)

    def hsdp(self, trains: str, preset: str | None) -> dict[str, Any]:
        """As where each host has all of the model, in shards: gradients are reduced twice."""
        mesh = init_device_mesh(self.device.type, (WORLD, 1), mesh_dim_names=("replicate", "shard"))
        return train(self.sharded(self.model(trains, preset), mesh), self.own, backward_of)

    def sharded(self, model: Any, mesh: Any = None) -> Any:
        mesh = self.mesh if mesh is None else mesh
        for layer in layers_of(model):
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    def fsdp_checkpointed(self, trains: str, preset: str | None) -> dict[str, Any]:
        model = self.model(trains, preset)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        if trains == "lora":
            model.enable_input_require_grads()
        return train(self.sharded(model), self.own, backward_of)

    def fsdp_adapters(self, trains: str, preset: str | None) -> dict[str, Any]:
        """Each LoRA layer sharded on its own, in blocks that run again."""
        model = self.model(trains, preset)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
        for module in [*model.modules()]:
            if hasattr(module, "base_layer"):
                fully_shard(module, mesh=self.mesh)
        return train(self.sharded(model), self.own, backward_of)

    def fsdp_norms(self, trains: str, preset: str | None) -> dict[str, Any]:
        """Each norm sharded on its own, under autocast: its weights are gathered again for backward by the
        tensor that leaves it."""

        def step(model: Any, tokens: Tensor) -> Tensor:
            with torch.autocast(self.device.type, torch.bfloat16):
                return backward_of(model, tokens)

        with torch.autocast(self.device.type, torch.bfloat16):
            model = self.model(trains, preset)
        for name, module in model.named_modules():
            if name.endswith("norm"):
                fully_shard(module, mesh=self.mesh, reshard_after_forward=True)
        return train(self.sharded(model), self.own, step)

    def gpipe(self, trains: str, preset: str | None) -> dict[str, Any]:
        model = self.model(trains, preset)
        stage = Stage(model, self.rank)
        schedule = ScheduleGPipe(
            PipelineStage(stage, self.rank, WORLD, self.device), MICROBATCHES, next_token_loss
        )

        def step(_stage: Any, tokens: Tensor) -> Tensor:
            losses: list[Tensor] = []
            if self.rank == 0:
                schedule.step(tokens)
            else:
                schedule.step(target=tokens, losses=losses)
            mean = torch.stack(losses).mean() if losses else torch.zeros((), device=self.device)
            dist.broadcast(mean.detach(), WORLD - 1)
            return mean

        mine = train(stage, self.all, step, read=model)
        halves: list[Any] = [None] * WORLD
        dist.all_gather_object(halves, (mine["gradients"], mine["bytes"]))
        mine["gradients"] = {n: g for gradients, _ in halves for n, g in gradients.items()}
        mine["bytes"] = sum(count for _, count in halves)
        return mine

    def tensor_parallel(self, trains: str, preset: str | None) -> dict[str, Any]:
        model = self.model(trains, preset)
        plan: dict[str, Any] = {}
        for name in COLUMNS:
            if trains == "full":
                plan[name] = ColwiseParallel()
            else:  # each rank has all of A and its own columns of the product
                plan[f"{name}.base_layer"] = ColwiseParallel()
                plan[f"{name}.lora_B.default"] = ColwiseParallel()
        for name in INPUTS:
            if trains == "full":
                plan[name] = RowwiseParallel()
            else:
                plan[f"{name}.base_layer"] = RowwiseParallel()
                plan[f"{name}.lora_A.default"] = RowwiseParallel()
        for layer in layers_of(model):
            parallelize_module(layer, self.mesh, plan)
        return train(model, self.all, backward_of)

    def came_sharded(self, trains: str, preset: str | None) -> dict[str, Any]:
        """transformers' own tensor parallel: the model is sharded before it can be patched."""
        model = LlamaForCausalLM.from_pretrained(self.folder / "llama", tp_plan="auto")
        if trains != "full":
            model = adapted(model, trains)
            with torch.no_grad():
                for name, weight in llama(trains).named_parameters():
                    own = model.get_parameter(name)
                    if isinstance(own, DTensor):
                        weight = distribute_tensor(weight, own.device_mesh, own.placements)
                    own.copy_(weight)
        model.train()
        assert any(isinstance(parameter, DTensor) for parameter in model.parameters())
        if preset is None:
            return train(model, self.all, backward_of)
        weights = {name: whole(p) for name, p in model.named_parameters()}
        kinds = [type(module) for module in model.modules()]
        report = str(patch_report(patch_model(model, preset, check=True)))
        same = all(torch.equal(weights[name], whole(p)) for name, p in model.named_parameters())
        found = train(model, self.all, backward_of)
        undone = [type(module) for module in unpatch_model(model).modules()] == kinds
        return {**found, "report": report, "same weights": same, "undone": undone}

    def save(self) -> None:
        if self.rank == 0:
            llama("full").save_pretrained(self.folder / "llama")
        dist.barrier()

    def replicated(self, trains: str, preset: str | None) -> dict[str, Any]:
        """Every weight and every activation is a DTensor."""

        def step(model: Any, tokens: Tensor) -> Tensor:
            with implicit_replication():
                loss = loss_of(model, DTensor.from_local(tokens, self.mesh, [Replicate()]))
                loss.backward()
            return loss.full_tensor()

        model = self.model(trains, preset)
        model.set_attn_implementation("eager")  # torch shards no other attention on a CPU
        return train(distribute_module(model, self.mesh), self.all, step)

    def sequence(self, trains: str, preset: str | None, p: float = 0.0) -> dict[str, Any]:
        """A norm on rows that are sharded, and an activation (and dropout) between two Linears that are."""
        model = self.block(trains, p)
        if preset is not None:
            patch_model(model, preset, example_inputs=self.rows())
        plan = {
            "norm": SequenceParallel(),
            "fc1": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
            "fc2": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        }
        parallelize_module(model, self.mesh, plan)

        def step(model: Any, rows: Tensor) -> Tensor:
            torch.manual_seed(3)
            loss = model(distribute_tensor(rows, self.mesh, [Shard(1)])).square().mean()
            loss.backward()
            return loss.full_tensor()

        return train(model, self.rows(), step)

    def block(self, trains: str, p: float) -> Any:
        torch.manual_seed(0)
        block = randomise(Block(p)).to(self.device).train()
        block.fc2.weight.requires_grad_(trains == "full")
        return block

    def rows(self) -> Tensor:
        return torch.randn(ROWS, LENGTH, 8, generator=torch.Generator().manual_seed(5)).to(
            self.device
        )

    def sequence_truth(self, trains: str) -> dict[str, Any]:
        def step(model: Any, rows: Tensor) -> Tensor:
            loss = model(rows.double()).square().mean()
            loss.backward()
            return loss

        return train(self.block(trains, 0.0).double(), self.rows(), step)

    def fsdp_first(self) -> dict[str, Any]:
        model = self.sharded(llama("full").to(self.device))
        before = dict(model.named_parameters())
        try:
            patch_model(model, "exact")
        except LowmemPatchError as error:
            same = all(before[name] is p for name, p in model.named_parameters())
            return {"refused": str(error), "same": same}
        return {"refused": "", "same": False}

    def run(self) -> None:
        self.save()
        ways = (
            self.ddp, self.fsdp, self.fsdp_checkpointed, self.gpipe, self.tensor_parallel, self.replicated,
        )  # fmt: skip
        for trains in ("full", "lora"):
            self.record(f"truth {trains}", self.truth, trains)
            for preset in ("exact", "auto"):
                self.record(f"alone {trains} {preset}", self.alone, trains, preset, self.own)
            for way in ways:
                self.in_all_presets(way, trains)
        self.record("all rows full exact", self.alone, "full", "exact", self.all)
        self.record("truth columns", self.truth, "columns")
        for trains in ("full", "columns"):
            self.in_all_presets(self.came_sharded, trains)
        for trains in ("full", "frozen"):
            self.record(f"truth sequence {trains}", self.sequence_truth, trains)
            self.in_all_presets(self.sequence, trains)
        for trains, preset in itertools.product(("full", "lora"), (None, "auto")):
            self.record(f"hsdp {trains} {preset}", self.hsdp, trains, preset)
            self.record(f"ddp_compiled {trains} {preset}", self.ddp_compiled, trains, preset)
        for preset in (None, "exact"):
            self.record(f"dropout {preset}", self.sequence, "full", preset, 0.5)
            self.record(f"fsdp_norms full {preset}", self.fsdp_norms, "full", preset)
            self.record(f"fsdp_adapters lora {preset}", self.fsdp_adapters, "lora", preset)
        self.record("fsdp_first", self.fsdp_first)

    def in_all_presets(self, way: Callable[..., dict[str, Any]], trains: str) -> None:
        for preset in (None, "exact", "auto"):
            self.record(f"{way.__name__} {trains} {preset}", way, trains, preset)


def main(rank: int, folder: Path, device_type: str) -> None:
    warnings.simplefilter("error")
    # transformers' own name for it, which PEFT reads and older versions alone have
    warnings.filterwarnings("ignore", ".*gradient_checkpointing", FutureWarning)
    warnings.filterwarnings("ignore", "Passing `tp_plan` directly", FutureWarning)
    # two ranks on CPUs draw the same numbers, which is what the run wants
    warnings.filterwarnings("ignore", "DTensor random operators", UserWarning)
    torch.set_num_threads(1)
    device = torch.device(device_type, rank) if device_type == "cuda" else torch.device("cpu")
    if device_type == "cuda":
        torch.cuda.set_device(device)
    # as torchrun sets them; transformers reads how many there are
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(WORLD))
    dist.init_process_group(
        "nccl" if device_type == "cuda" else "gloo",
        init_method=(folder.resolve() / "meeting").as_uri(),
        rank=rank,
        world_size=WORLD,
        device_id=device if device_type == "cuda" else None,
        timeout=datetime.timedelta(seconds=60),
    )
    runs = Runs(rank, device, folder)
    runs.run()
    if rank == 0:
        torch.save(runs.found, folder / "runs.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    # forked, what is imported is imported once, but CUDA does not outlive a fork
    method = "fork" if sys.argv[2] == "cpu" else "spawn"
    start_processes(main, (Path(sys.argv[1]), sys.argv[2]), WORLD, start_method=method)
