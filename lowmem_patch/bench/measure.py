"""Memory and time of one whole training step: forward, loss, backward and a fused AdamW."""

from __future__ import annotations

import dataclasses
import gc
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from lowmem_patch.memory.step import step_loss, with_labels
from lowmem_patch.planning.costs import seconds_between, time_mark
from lowmem_patch.tracing.inputs import ExampleInputs
from lowmem_patch.tracing.saved_bytes import saved_bytes, storage_key


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of one step above those held before it; see :class:`lowmem_patch.bench.Row`."""

    act: int
    peak: int | None = None
    reserved: int | None = None


class Step:
    """One training step of a model on fixed inputs, which can be run, timed, and counted."""

    def __init__(self, model: nn.Module, inputs: ExampleInputs, *, autocast: bool) -> None:
        self.model = model
        self.inputs = with_labels(getattr(model, "_orig_mod", model), inputs)
        self.device = next(iter(model.parameters())).device
        self.autocast = autocast
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        # a rate that leaves the weights as they are: all steps are alike
        self.optimizer = torch.optim.AdamW(trained, lr=1e-8, weight_decay=0.0, fused=True)

    def loss(self) -> Tensor:
        """The model's own loss, or the mean square of its first output."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast):
            output: Any = self.model(*self.inputs.args, **self.inputs.kwargs)
        return step_loss(output)

    def run(self) -> Tensor:
        """One step; gradients are freed at its end. Returns the loss."""
        loss = self.loss()
        torch.autograd.backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def move(self, device: torch.device | str) -> None:
        """Move the weights and the optimizer's states."""
        self.model.to(device)
        for state in self.optimizer.state.values():
            for name, value in state.items():
                state[name] = value.to(device) if isinstance(value, Tensor) else value

    def milliseconds(self) -> float:
        """The time of one step; on a GPU as its own clock measures it."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        start = time_mark(self.device)
        self.run()
        return 1000 * seconds_between(start, time_mark(self.device))

    def kernel_milliseconds(self) -> float | None:
        """The sum of the times of all kernels of one step; None where nobody counts them, as on a CPU."""
        if self.device.type != "cuda":
            return None
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            self.run()
            torch.cuda.synchronize(self.device)
        events = profiled.key_averages()
        kernels = [
            event for event in events if not event.key.startswith("Memcpy")
        ]  # beside kernels
        return sum(event.self_device_time_total for event in kernels) / 1000 or None

    def memory(self) -> Memory:
        """The memory of one step; the caching allocator returns its reserve to the device first."""
        if self.device.type != "cuda":
            return self._saved()
        gc.collect()
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)
        rest = torch.cuda.memory_allocated(self.device)
        reserved = torch.cuda.memory_reserved(self.device)
        loss = self.loss()
        act = torch.cuda.memory_allocated(self.device) - rest
        torch.autograd.backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        torch.cuda.synchronize(self.device)
        return Memory(
            act,
            torch.cuda.max_memory_allocated(self.device) - rest,
            torch.cuda.max_memory_reserved(self.device) - reserved,
        )

    def _saved(self) -> Memory:
        """Saved bytes; in compiled functions, into which `saved_bytes` does not see, by plain hooks."""
        if not hasattr(self.model, "_orig_mod"):
            with saved_bytes(self.model) as counted:
                loss = self.loss()
            del loss
            return Memory(counted.total)
        weights = {storage_key(t) for t in (*self.model.parameters(), *self.model.buffers())}
        saved: dict[int, Tensor] = {}

        def pack(tensor: Tensor) -> Tensor:
            key = storage_key(tensor)
            if key not in weights:
                saved.setdefault(key, tensor.detach())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = self.loss()
        del loss
        return Memory(sum(tensor.untyped_storage().nbytes() for tensor in saved.values()))
