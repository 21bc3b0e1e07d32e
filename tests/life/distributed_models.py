"""The models of the distributed runs, one training of each, and the bytes that it saves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import peft
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

from tests.support.models import randomise

WORLD = 2
MICROBATCHES = 4
ROWS, LENGTH, VOCABULARY = 4, 12, 64
COLUMNS = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
)
INPUTS = ("self_attn.o_proj", "mlp.down_proj")

Loss = Callable[[Any, Tensor], Tensor]


def llama(trains: str) -> Any:
    """The same weights in every process."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        use_cache=False,
    )
    return adapted(randomise(LlamaForCausalLM(config)), trains).train()


def adapted(model: Any, trains: str) -> Any:
    if trains == "full":
        return model
    torch.manual_seed(1)
    # PEFT 0.21 makes an A beside a row-wise sharded Linear too narrow (transformers 5.23), patched or not
    targets = "all-linear" if trains == "lora" else [name.split(".")[1] for name in COLUMNS]
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=targets))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name and type(parameter) is nn.Parameter:
                parameter.uniform_(-0.1, 0.1)
    return model


def layers_of(model: Any) -> Any:
    base = model.get_base_model() if isinstance(model, peft.PeftModel) else model
    return base.model.layers


def loss_of(model: Any, tokens: Tensor) -> Tensor:
    loss: Tensor = model(input_ids=tokens, labels=tokens).loss
    return loss


def whole(tensor: Tensor) -> Tensor:
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().to("cpu", torch.float64, copy=True)


class SavedBytes:
    """Counts unique storages that autograd holds, weights excluded, also those that FSDP2 gathers."""

    def __init__(self, model: nn.Module) -> None:
        self.kept: dict[int, Tensor] = {}
        self.weights: dict[int, Tensor] = {}
        self.model = model

    def __enter__(self) -> SavedBytes:
        def look(module: nn.Module, _args: Any) -> None:
            for weight in (*module.parameters(), *module.buffers()):
                self._add(weight, self.weights)

        look.only_looks = True  # type: ignore[attr-defined]
        modules = list(self.model.modules())
        shards = any(isinstance(weight, DTensor) for weight in self.model.parameters())
        # who is compiled would be compiled anew with hooks
        self.hooks = [m.register_forward_pre_hook(look) for m in modules if shards]
        look(self.model, ())
        self.context = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)
        self.context.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.context.__exit__(*error)
        for hook in self.hooks:
            hook.remove()

    def _pack(self, tensor: Tensor) -> Tensor:
        self._add(tensor, self.kept)
        return tensor

    def _add(self, tensor: Tensor, to: dict[int, Tensor]) -> None:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        local = local.detach()
        to[int(local.untyped_storage()._cdata)] = local

    @property
    def count(self) -> int:
        return sum(
            t.untyped_storage().nbytes() for k, t in self.kept.items() if k not in self.weights
        )


def train(model: Any, tokens: Tensor, step: Loss, read: Any = None) -> dict[str, Any]:
    """Two steps of SGD: their losses, and the gradients and saved bytes of the second."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    # one by one: torch's fused update takes no mixture of tensors and DTensors
    optimizer = torch.optim.SGD(parameters, lr=0.1, foreach=False)
    losses = [step(model, tokens)]
    optimizer.step()
    optimizer.zero_grad()
    with SavedBytes(model) as saved:  # a pipeline runs once more at first, to see shapes
        losses.append(step(model, tokens))
    losses = [loss.detach().double().cpu() for loss in losses]
    named = model if read is None else read
    gradients = {n: whole(p.grad) for n, p in named.named_parameters() if p.grad is not None}
    gradients = {
        n.removeprefix("_orig_mod.").removeprefix("module."): g for n, g in gradients.items()
    }
    return {"losses": losses, "gradients": gradients, "bytes": saved.count}


def backward_of(model: Any, tokens: Tensor) -> Tensor:
    loss = loss_of(model, tokens)
    loss.backward()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    return mean / WORLD


class Stage(nn.Module):
    """Half of a LLaMA."""

    def __init__(self, model: Any, rank: int) -> None:
        super().__init__()
        base = model.get_base_model() if isinstance(model, peft.PeftModel) else model
        self.rank, self.rotary = rank, base.model.rotary_emb
        self.layer = base.model.layers[rank]
        if rank == 0:
            self.embedding = base.model.embed_tokens
        else:
            self.norm, self.head = base.model.norm, base.lm_head

    def forward(self, x: Tensor) -> Tensor:
        if self.rank == 0:
            x = self.embedding(x)
        positions = torch.arange(x.shape[1], device=x.device)[None]
        x = self.layer(x, position_ids=positions, position_embeddings=self.rotary(x, positions))
        return x if self.rank == 0 else self.head(self.norm(x))


class Block(nn.Module):
    """A block of a ViT without its attention."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.norm, self.act, self.drop = nn.LayerNorm(8), nn.GELU(), nn.Dropout(p)
        self.fc1, self.fc2 = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.fc2(self.drop(self.act(self.fc1(self.norm(x)))))
        return y


def next_token_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
