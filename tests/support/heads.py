"""A model with a head, and losses of its logits: fused ones, and those that read them whole."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
)
from transformers.modeling_outputs import CausalLMOutput

from lowmem_patch import patch_model, patch_report
from tests.support.configs import KEEP
from tests.support.models import randomise
from tests.support.step import MODES, Mode, StayInFloat64, Step, cast

CLASSES = 160
IDS = torch.randint(3, CLASSES, (2, 24), generator=torch.Generator().manual_seed(2))
SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2,
    "vocab_size": CLASSES, "use_cache": False,
}  # fmt: skip
HEAD = {**KEEP, "attention": "keep", "head": "chunked"}
Loss = Callable[[Any], Tensor]


def llama(tied: bool = False, layers: int = 2) -> Any:
    torch.manual_seed(0)
    sizes = {**SIZES, "num_hidden_layers": layers}
    config = LlamaConfig(**sizes, num_key_value_heads=2, tie_word_embeddings=tied)
    return randomise(LlamaForCausalLM(config)).train()


class Bare(nn.Module):
    """An embedding and a head: all that a compiler needs to see of a model whose losses are tested."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens, self.lm_head = (
            nn.Embedding(CLASSES, 32),
            nn.Linear(32, CLASSES, bias=False),
        )

    def forward(self, input_ids: Tensor) -> CausalLMOutput:
        return CausalLMOutput(logits=self.lm_head(F.silu(self.embed_tokens(input_ids))))


def bare() -> tuple[Any, Any]:
    """A bare model, and a copy of it whose head is patched."""
    torch.manual_seed(0)
    model = Bare().train()
    return model, patch_model(copy.deepcopy(model), HEAD, example_inputs={"input_ids": IDS})


def run(model: Any, loss_of: Loss, mode: Mode = MODES["fp32"]) -> Step:
    model.zero_grad()
    torch.manual_seed(0)
    with torch.autocast("cpu", mode.autocast, enabled=mode.autocast is not None):
        loss = loss_of(model)
    loss.backward()
    named = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return Step([loss.detach()], named)


def truth(model: Any, loss_of: Loss) -> Step:
    with StayInFloat64():
        return run(cast(copy.deepcopy(model), torch.float64), loss_of)


def logits_of(model: Any) -> Tensor:
    logits: Tensor = model(input_ids=IDS).logits
    return logits


def whole_reads(model: Any) -> int:
    """How often logits were computed whole, as the report says it."""
    notes = [note for note in patch_report(model).notes if "computed whole" in note]
    often = [note.split("computed whole ")[1].split(",")[0] for note in notes]
    return sum(1 if times == "once" else int(times.split()[0]) for times in often)


def weights_of(labels: Tensor) -> Tensor:
    return torch.linspace(0.5, 1.5, labels.numel())


# each never needs logits whole
FUSED: dict[str, Loss] = {
    "the model's own": lambda m: m(input_ids=IDS, labels=IDS).loss,
    "num_items_in_batch": lambda m: (
        m(input_ids=IDS, labels=IDS, num_items_in_batch=torch.tensor(40)).loss
    ),
    "shift_labels": lambda m: m(input_ids=IDS, labels=IDS, shift_labels=IDS.roll(-1, 1)).loss,
    "a user's own": lambda m: F.cross_entropy(
        logits_of(m)[:, :-1].reshape(-1, CLASSES), IDS[:, 1:].reshape(-1)
    ),
    "transposed": lambda m: F.cross_entropy(logits_of(m).transpose(1, 2).float(), IDS),
    "permuted": lambda m: F.cross_entropy(logits_of(m).permute(0, 2, 1), IDS),
    "CrossEntropyLoss": lambda m: nn.CrossEntropyLoss(label_smoothing=0.1)(
        logits_of(m).flatten(0, 1), IDS.flatten()
    ),
    "class weights": lambda m: F.cross_entropy(
        logits_of(m).view(-1, CLASSES),
        IDS.view(-1),
        weight=torch.linspace(0, 1, CLASSES).to(m.lm_head.weight),
    ),
    "sum": lambda m: (
        F.cross_entropy(logits_of(m).view(-1, CLASSES), IDS.view(-1), reduction="sum") / 7
    ),
    "none": lambda m: (
        F.cross_entropy(logits_of(m).view(-1, CLASSES), IDS.view(-1), reduction="none")
        * weights_of(IDS)
    ).sum(),
    "ignored rows": lambda m: F.cross_entropy(
        logits_of(m).view(-1, CLASSES), torch.where(IDS > 60, IDS, -100).view(-1)
    ),
    "soft cap": lambda m: F.cross_entropy(
        (torch.tanh(logits_of(m) / 30) * 30).float().view(-1, CLASSES), IDS.view(-1)
    ),
    "scale": lambda m: F.cross_entropy((logits_of(m) * 0.5).view(-1, CLASSES), IDS.view(-1)),
    "a bias added": lambda m: F.cross_entropy(
        (logits_of(m) + torch.arange(CLASSES) / CLASSES).view(-1, CLASSES), IDS.view(-1)
    ),
    "z-loss": lambda m: (
        lambda y: (
            F.cross_entropy(y.view(-1, CLASSES), IDS.view(-1))
            + 1e-2 * y.logsumexp(-1).square().mean()
        )
    )(logits_of(m)),
    "nll_loss": lambda m: F.nll_loss(logits_of(m).log_softmax(-1).view(-1, CLASSES), IDS.view(-1)),
    "log_softmax, gather": lambda m: (
        -torch.gather(F.log_softmax(logits_of(m), -1), -1, IDS.unsqueeze(-1)).mean()
    ),
    "row by row": lambda m: (
        torch.stack(
            [
                F.log_softmax(row, -1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
                for row, labels in zip(logits_of(m), IDS, strict=True)
            ]
        )
        .square()
        .mean()
    ),
    "unbound rows": lambda m: (
        torch.stack(
            [
                F.log_softmax(row, -1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
                for row, labels in zip(logits_of(m).unbind(), IDS, strict=True)
            ]
        )
        .square()
        .mean()
    ),
    "gather less logsumexp": lambda m: (
        lambda y: (
            (
                y.gather(-1, IDS.unsqueeze(-1)).squeeze(-1)
                - torch.stack([torch.logsumexp(row, -1) for row in y])
            )
            .square()
            .mean()
        )
    )(logits_of(m)),
    "Trainer's label smoother": lambda m: (
        lambda p: (
            p.gather(-1, IDS.unsqueeze(-1)).mean()
            + 0.1
            * p.sum(dim=-1, keepdim=True, dtype=torch.promote_types(p.dtype, torch.float32)).mean()
        )
    )(-F.log_softmax(logits_of(m), dim=-1)),
    "loss and accuracy": lambda m: (
        lambda y: (
            F.cross_entropy(y.view(-1, CLASSES), IDS.view(-1))
            + 0 * (y.argmax(-1) == IDS).float().mean()
        )
    )(logits_of(m)),
    "a vocabulary without its padding": lambda m: F.cross_entropy(
        logits_of(m)[..., :150].reshape(-1, 150), IDS.view(-1) % 150
    ),
    "two losses of halves": lambda m: (
        lambda y: sum(
            F.cross_entropy(half.reshape(-1, CLASSES), IDS.chunk(2)[n].reshape(-1))
            for n, half in enumerate(y.chunk(2))
        )
    )(logits_of(m)),
}
# each is read whole, and right
READ: dict[str, Loss] = {
    "squares": lambda m: logits_of(m).square().mean(),
    "soft targets": lambda m: F.cross_entropy(
        logits_of(m).view(-1, CLASSES), F.one_hot(IDS, CLASSES).float().view(-1, CLASSES)
    ),
    "a hook": lambda m: (
        lambda y: (
            y.register_hook(lambda g: g * 2),
            F.cross_entropy(y.view(-1, CLASSES), IDS.view(-1)),
        )[1]
    )(logits_of(m)),
    "a write in place": lambda m: (
        lambda y: (
            y.__setitem__((slice(None), slice(None), slice(0, 9)), -5.0),
            F.cross_entropy(y.view(-1, CLASSES), IDS.view(-1)),
        )[1]
    )(logits_of(m)),
    "every other class": lambda m: F.cross_entropy(
        logits_of(m)[..., ::2].reshape(-1, 80), IDS.view(-1) % 80
    ),
    "softmax": lambda m: logits_of(m).softmax(-1).square().sum(),
    "a learned temperature": lambda m: F.cross_entropy(
        (logits_of(m) * torch.tensor(0.5)).view(-1, CLASSES), IDS.view(-1)
    ),
    "cross entropy and a read": lambda m: (
        lambda y: F.cross_entropy(y.view(-1, CLASSES), IDS.view(-1)) + y.square().mean()
    )(logits_of(m)),
}
