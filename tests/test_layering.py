"""Imports go one way, and each outside package has one door.

``constants, op_roles <- formulas <- kernels, reference <- functional, tables <- nn <- tracing <- strategies
<- planning <- api <- checkpoint, verify, profile, bench, integrations <- the package's own names <- demo,
report <- cli``: what stands left may not import what stands right. The files of ``tracing``, ``strategies``
and ``planning`` have an order of their own. The first ones of ``tracing`` lie below ``kernels``, and
``memory`` between the plan and the budgets of ``planning``.
All imports count, also those inside functions and under ``TYPE_CHECKING``.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = "lowmem_patch"
FOLDER = Path(__file__).parent.parent / PACKAGE
PUBLIC = "(public names)"  # lowmem_patch/__init__.py itself

# A module may import whatever stands on an earlier line, and itself if it is a package.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors",),
    (
        "constants",
        "tracing",
        "tracing.base_model",
        "tracing.inputs",
        "tracing.observers",
        "tracing.op_roles",
    ),
    ("tracing.call_arguments", "tracing.categories"),
    ("tracing.row_moves", "tracing.saved_bytes"),
    ("tracing.live_storages",),
    ("formulas",),
    ("kernels", "reference"),
    ("functional", "tables"),
    ("nn",),
    (
        "tracing.fake_mode",
        "tracing.isolation",
        "tracing.quantised",
        "tracing.sharded",
    ),
    ("tracing.shadow",),
    ("tracing.diffusion_inputs", "tracing.probed_gradients", "tracing.trace"),
    ("tracing.example_inputs",),
    ("tracing.dataflow", "tracing.probes"),
    ("tracing.consumers", "tracing.functions", "tracing.gated_norms"),
    ("config",),
    ("strategies.protocol",),
    (
        "strategies.fold_weights",
        "strategies.norm_sites",
        "strategies.normed_channels",
        "strategies.swap",
    ),
    (
        "strategies.activations",
        "strategies.checkpointing",
        "strategies.lora",
        "strategies.rotary",
    ),
    ("strategies.common_parts", "strategies.head"),
    ("strategies.codes", "strategies.recompute", "strategies.scales"),
    ("strategies.chains", "strategies.one_copy"),
    ("strategies.share",),
    (
        "strategies.dropout_bits",
        "strategies.gated_norms",
        "strategies.rows",
        "strategies.speed",
        "strategies.fold_rules",
    ),
    ("strategies.eight_bit", "strategies.fold"),
    ("strategies",),
    ("planning.columns", "planning.names"),
    ("planning.fit_report",),
    ("planning.report",),
    ("planning.plan",),
    ("planning.floor_sites",),
    ("planning.changes", "planning.check", "planning.floor"),
    ("planning.planner", "planning"),
    ("memory",),
    ("planning.budget", "planning.costs", "planning.solve"),
    ("planning.choices",),
    ("planning.fit",),
    ("planning.suggestions",),
    ("planning.fit_model",),
    ("planning.largest",),
    ("api",),
    ("bench", "checkpoint", "integrations", "profile", "verify"),
    (PUBLIC,),
    ("demo", "plot", "report"),
    ("cli",),
    ("__main__",),
)
# Reports and verifications give bytes, so `profile` is open to both; `verify` compares checkpoints too.
EXCEPTIONS = {("verify", "profile"), ("verify", "checkpoint")}
ONLY_IMPORTERS = {
    "triton": "kernels",
    "rich": "report",
    "matplotlib": "plot",
    "adjustText": "plot",
    "typer": "cli",
    "click": None,
}

RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}


def component(module: str) -> str:
    """``lowmem_patch.nn.norms`` -> ``nn``; ``tracing.trace`` where the files have layers."""
    parts = module.split(".")
    file = ".".join(parts[1:3])
    if file in RANK:
        return file
    return parts[1] if len(parts) > 1 else PUBLIC


def module_name(path: Path) -> str:
    parts = [PACKAGE, *path.relative_to(FOLDER).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_module(name: str) -> bool:
    path = FOLDER.parent.joinpath(*name.split("."))
    return component(name) in RANK or path.is_dir() or path.with_suffix(".py").is_file()


def imported_modules(source: str) -> Iterator[tuple[int, str]]:
    """Line and full name of every module that the source imports, wherever it does so."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import"
            assert node.module is not None
            # "from lowmem_patch import kernels" imports a module, "import __version__" does not.
            submodules = [f"{node.module}.{alias.name}" for alias in node.names]
            if node.module.split(".")[0] == PACKAGE:
                for name in submodules:
                    yield node.lineno, name if is_module(name) else node.module
            else:
                yield node.lineno, node.module


def violations(module: str, source: str) -> list[str]:
    """What is wrong with the imports of one module."""
    here = component(module)
    found = []
    for line, target in imported_modules(source):
        top = target.split(".")[0]
        if top in ONLY_IMPORTERS and here != ONLY_IMPORTERS[top]:
            found.append(f"{module}:{line} imports {top}: only {ONLY_IMPORTERS[top]} may")
        if top != PACKAGE:
            continue
        there = component(target)
        if there not in RANK:
            found.append(f"{module}:{line} imports {target}, which has no layer")
        elif here != there and RANK[here] <= RANK[there] and (here, there) not in EXCEPTIONS:
            found.append(f"{module}:{line} imports {target}, which stands right of it")
    return found


MODULES = {module_name(path): path for path in sorted(FOLDER.rglob("*.py"))}


def test_imports_go_one_way() -> None:
    unranked = [module for module in MODULES if component(module) not in RANK]
    assert not unranked, f"{unranked} have no layer: add them to LAYERS"
    found = {name: violations(name, path.read_text("utf-8")) for name, path in MODULES.items()}
    assert {name: wrong for name, wrong in found.items() if wrong} == {}


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("lowmem_patch.reference", "from lowmem_patch import kernels"),
        ("lowmem_patch.reference", "def late():\n    import lowmem_patch.nn.norms"),
        ("lowmem_patch.nn.norms", "from lowmem_patch.config import PatchConfig"),
        ("lowmem_patch.nn.readers", "from lowmem_patch.tracing.trace import Trace"),
        ("lowmem_patch.tracing.trace", "from lowmem_patch.tracing import consumers"),
        ("lowmem_patch.tracing.trace", "from lowmem_patch.planning.report import Site"),
        ("lowmem_patch.tracing.unlisted", "from lowmem_patch.tracing.trace import Trace"),
        ("lowmem_patch.checkpoint", "from lowmem_patch.verify import verify_model"),
        ("lowmem_patch.functional", "import triton.language as tl"),
        ("lowmem_patch.cli", "from rich.console import Console"),
        ("lowmem_patch.report", "import typer"),
        ("lowmem_patch", "from lowmem_patch import cli"),
    ],
)
def test_wrong_imports_are_found(module: str, source: str) -> None:
    assert violations(module, source)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("lowmem_patch.kernels.norm", "import triton"),
        ("lowmem_patch.verify", "from lowmem_patch.profile import anything"),
        ("lowmem_patch.cli", "from lowmem_patch import PatchConfig, report\nimport typer"),
        ("lowmem_patch.nn.norms", "import torch\nfrom lowmem_patch import errors, functional"),
        ("lowmem_patch.nn.readers", "from lowmem_patch.tracing.op_roles import Role"),
    ],
)
def test_right_imports_pass(module: str, source: str) -> None:
    assert not violations(module, source)


def run_fresh(code: str) -> str:
    """Run code in a new interpreter in which importing Triton fails as if it were not installed."""
    blocked = (
        f"import sys\nsys.modules['triton'] = None\nsys.path.insert(0, {str(FOLDER.parent)!r})\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", blocked + code], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_works_without_triton_and_imports_late() -> None:
    """One start: what importing the package leaves alone, then ops that never reach for the kernels."""
    out = run_fresh(
        "import lowmem_patch, torch\n"
        "loaded = lambda: print(*sorted(m for m in sys.modules if 'lowmem' in m or m in ('timm', 'peft')))\n"
        "loaded()\n"
        "from lowmem_patch.functional import NormSettings, codes_activation, ms_norm\n"
        "x = torch.randn(4, 16, requires_grad=True)\n"
        "y, *_ = ms_norm(x, None, None, NormSettings(1e-6, centered=False))\n"
        "codes_activation(y, 'gelu').sum().backward()\n"
        "assert bool(x.grad.isfinite().all())\n"
        "loaded()\n"
        "import lowmem_patch.report, lowmem_patch.cli\n"
        "loaded()"
    )
    imported, computed, commanded = (line.split() for line in out.splitlines())
    for late in ("kernels", "report", "cli", "demo"):
        assert f"lowmem_patch.{late}" not in imported
    assert "lowmem_patch.kernels" not in computed
    # seconds, which a command on another library's model would wait for
    assert not {"timm", "peft", "lowmem_patch.kernels"} & {*commanded}
