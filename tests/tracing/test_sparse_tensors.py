"""Sparse tensors have no storage of their own: they count by their indices and values."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from peft import ShiraConfig, get_peft_model
from torch import Tensor, nn

from lowmem_patch import patch_model, patch_report, saved_bytes
from tests.support.models import llama_of

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*[Ss]parse:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*adapted with ShiRA:UserWarning"),
    # PEFT reads a name that transformers has since deprecated
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),
]

NODES, EDGES, WIDTH = 4, 5, 16
ENDS = torch.tensor([[0, 1, 2, 3, 3], [1, 2, 3, 0, 1]])


class GraphBlock(nn.Module):
    """Nodes read their neighbours over edges with a weight that trains, and over fixed ones."""

    def __init__(self) -> None:
        super().__init__()
        self.edges = nn.Parameter(torch.rand(EDGES))
        self.register_buffer("fixed", torch.sparse_coo_tensor(ENDS, torch.ones(EDGES)).coalesce())
        self.norm, self.act = nn.LayerNorm(WIDTH), nn.GELU()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        trained = torch.sparse_coo_tensor(ENDS, self.edges, (NODES, NODES))
        y = self.norm(torch.sparse.mm(trained, x))
        return x + torch.sparse.mm(self.fixed, self.down(self.act(self.up(y))))


class PlainBlock(GraphBlock):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(self.norm(x))))


class Nodes(nn.Module):
    def __init__(self, kind: type[GraphBlock], *, sparse: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(30, WIDTH, sparse=sparse)
        self.blocks = nn.Sequential(kind(), kind())

    def forward(self, nodes: Tensor) -> Tensor:
        y: Tensor = self.blocks(self.embed(nodes))
        return y


def dense_gradients(model: nn.Module, loss: Tensor) -> list[Tensor]:
    trained = [p for p in model.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(loss, trained, allow_unused=True)
    return [g.to_dense() for g in gradients if g is not None]


def assert_same(model: Any, twin: Any, *inputs: Tensor) -> None:
    given, expected = (one(*inputs) for one in (model, twin))
    given, expected = (getattr(one, "logits", one) for one in (given, expected))
    torch.testing.assert_close(given, expected)
    torch.testing.assert_close(
        dense_gradients(model, given.pow(2).mean()), dense_gradients(twin, expected.pow(2).mean())
    )


def test_products_of_sparse_matrices() -> None:
    nodes = torch.arange(NODES)
    model = Nodes(GraphBlock, sparse=False)
    twin = copy.deepcopy(model)
    patch_model(model, "exact", example_inputs=nodes)
    with saved_bytes(model) as saved:
        model(nodes)
    assert 0 < saved.activations <= patch_report(model).saved_after
    assert_same(model, twin, nodes)


@pytest.mark.parametrize("fit", [None, "1GiB"])
def test_an_embedding_with_sparse_gradients(fit: str | None) -> None:
    nodes = torch.arange(NODES)
    model = Nodes(PlainBlock, sparse=True)
    twin = copy.deepcopy(model)
    budget: Any = {} if fit is None else {"fit": fit, "optimizer": "sgd"}
    patch_model(model, "exact", example_inputs=nodes, **budget)
    assert_same(model, twin, nodes)


def test_an_adapter_that_adds_a_sparse_matrix() -> None:
    model = get_peft_model(
        llama_of(num_hidden_layers=1), ShiraConfig(r=4, target_modules=["q_proj", "up_proj"])
    )
    twin, tokens = copy.deepcopy(model), torch.arange(12).reshape(2, 6)
    patch_model(model, "exact")
    assert_same(model, twin, tokens)


LAYOUTS = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}


class Keeps(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, kept: Tensor) -> Tensor:
        ctx.save_for_backward(kept)
        return x.clone()


class Kept(nn.Module):
    def forward(self, x: Tensor, kept: Tensor) -> Tensor:
        y: Tensor = Keeps.apply(x, kept)
        return y


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_parts_of_every_layout_are_counted(layout: torch.layout) -> None:
    block = (2, 2) if layout in (torch.sparse_bsr, torch.sparse_bsc) else None
    sparse = torch.eye(4).to_sparse(layout=layout, blocksize=block)
    parts = [getattr(sparse, name)().untyped_storage() for name in LAYOUTS[layout]]
    with saved_bytes(Kept()) as saved:
        y = Kept()(torch.randn(4, 4, requires_grad=True), sparse)
    assert saved.activations == sum({one._cdata: one.nbytes() for one in parts}.values())
    del y
