"""The optimizers that a step is predicted with: the bytes of their state, and of what their step makes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor, nn

from lowmem_patch.errors import ConfigError

# bitsandbytes: one float32 scale per 256 values of each 8-bit state; small tensors stay in 32 bits
_STATE_BLOCK, _SMALLEST_8BIT = 256, 4096
_SMALLEST_PAGED = 100_000  # elements: smaller states of a paged optimizer stay on the GPU
_LEAST_BLOCK = 512  # bytes that the allocator of a GPU gives for one number
# Name to what is meant by it, as a report prints it.
OPTIMIZERS = {
    "adamw": "torch's AdamW, fused, as transformers trains by default: no temporaries",
    "adamw_foreach": "torch's AdamW as torch builds it: its step makes a copy of one moment",
    "adamw8bit": "bitsandbytes' AdamW8bit",
    "paged_adamw": "bitsandbytes' PagedAdamW: float32 states, which may lie on the host",
    "paged_adamw8bit": "bitsandbytes' PagedAdamW8bit: states may lie on the host",
    "sgd": "torch's SGD, without momentum",
    "adafactor": "torch's Adafactor",
}


def check_optimizer(name: str) -> None:
    """Raises:
    ConfigError: an unknown optimizer.
    """
    if not isinstance(name, str) or name not in OPTIMIZERS:
        given = repr(name) if isinstance(name, str) else f"of type {type(name).__name__}"
        raise ConfigError(f"optimizer {given} is none of {', '.join(OPTIMIZERS)}: give such a name")


def state_sizes(parameter: Tensor, optimizer: str) -> tuple[int, ...]:
    """Bytes of each tensor of a parameter's state."""
    count, width, shape = parameter.numel(), parameter.element_size(), parameter.shape
    if optimizer.startswith("paged_") and count >= _SMALLEST_PAGED:
        return ()
    if optimizer in ("adamw", "adamw_foreach"):  # two moments in the parameter's dtype
        # the fused one counts its steps where the parameter is
        steps = _LEAST_BLOCK if optimizer == "adamw" and parameter.device.type != "cpu" else 0
        return count * width, count * width, steps
    if optimizer == "paged_adamw":
        return count * 4, count * 4
    if optimizer in ("adamw8bit", "paged_adamw8bit"):
        if count < _SMALLEST_8BIT:
            return count * 4, count * 4
        scales = -(-count // _STATE_BLOCK) * 4
        return count, count, scales, scales
    if optimizer == "adafactor":  # a row and a column of second moments
        if len(shape) > 1:
            return count // shape[-1] * width, count // shape[-2] * width
        return (count * width,)
    return ()  # sgd without momentum


def temporaries_of(
    model: nn.Module, optimizer: str, gpus: int = 1, *, elsewhere: bool
) -> tuple[int, ...]:
    """Bytes of what an optimizer's step holds at one time for a while. Those of bitsandbytes, SGD and the
    fused AdamW work in place, and hold nothing.

    Args:
        gpus: over which the weights are sharded.
        elsewhere: the model will run on a GPU, wherever it is now.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    sizes: Sequence[int] = ()
    if optimizer == "adafactor":
        sizes = _of_one_weight_each(trained)
    elif optimizer == "adamw_foreach" and trained:
        sizes = [parameter.nbytes for parameter in trained]
        if trained[0].device.type == "cpu" and not elsewhere:  # where no foreach is torch's default
            sizes = 2 * (max(sizes),)
    return tuple(-(-size // gpus) for size in sizes)


def _of_one_weight_each(trained: Iterable[Tensor]) -> tuple[int, ...]:
    """torch's Adafactor takes one weight after the other, on a GPU as well, unless it is built with foreach.

    Names of its loop hold what it made last: a weight's update lives until that of the next one is there,
    and the means of squares (as large as the state) that it takes for each.
    """
    most: tuple[int, ...] = ()
    update, means = 0, dict[bool, tuple[int, ...]]()
    for parameter in trained:
        means[parameter.dim() > 1] = state_sizes(parameter, "adafactor")
        most = max(most, (update, parameter.nbytes, *sum(means.values(), ())), key=sum)
        update = parameter.nbytes
    return most
