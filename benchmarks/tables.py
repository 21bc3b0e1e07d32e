"""Write the tables of the documents from the committed results, so that every number has its data file.

python benchmarks/tables.py            # rewrite the tables in README.md and docs/benchmarks.md
python benchmarks/tables.py --check    # exit 1 if a page does not show the committed results
"""

from __future__ import annotations

import re
import sys
from functools import partial

from architecture_tables import architectures_table, captured_table
from whole_tables import (
    ROOT,
    environment_of,
    headline,
    limit_table,
    load,
    step_of,
    summary_table,
    whole_table,
    with_source,
)

PAGES = (ROOT / "README.md", ROOT / "docs" / "benchmarks.md")


def bytes_table() -> str:
    """Saved activation bytes of one block, as shares of unpatched."""
    data = load("saved-bytes.json")
    rows = [
        "| saved bytes of one block, and what is left of them | unpatched | `paper` | `exact` | `auto` |",
        "|---|---|---|---|---|",
    ]
    for case, variants in data["cases"].items():
        whole = variants["unpatched"]["block"]
        cells = [f"{whole / 2**20:.1f} MiB"]
        cells += [f"{variants[p]['block'] / whole:.1%}" for p in ("paper", "exact", "auto")]
        rows.append(f"| {case} | {' | '.join(cells)} |")
    command = (
        "python benchmarks/models.py --variants unpatched paper exact auto "
        "--json benchmarks/results/saved-bytes.json"
    )
    return with_source(rows, command, data)


def _named(case: str, parts: dict[str, str]) -> str:
    """The case with the part of its model that was run."""
    return f"{case} ({parts[case]})" if case in parts else case


_COLUMNS = (
    "unpatched",
    "paper",
    "exact",
    "auto",
    "compact",
    "lomem",
    "liger",
    "checkpointing",
    "compile",
    "auto+compile",
    "compact+compile",
)


def gpu_table(name: str, options: str = "", script: str = "models.py --device cuda") -> str:
    """act / peak+ / step on the GPU."""
    data = load(name)
    shown = [c for c in _COLUMNS if any(c in variants for variants in data["cases"].values())]
    rows = [
        "| act MiB / peak MiB / step ms | " + " | ".join(shown) + " |",
        "|---|" + "---|" * len(shown),
    ]
    for case, variants in data["cases"].items():
        cells = []
        for column in shown:
            row = variants.get(column)
            if row is None or "error" in row:
                cells.append("")
            else:
                cells.append(f"{row['act_mib']:.0f} / {row['peak_mib']:.0f} / {step_of(row)}")
        rows.append(f"| {_named(case, data.get('parts', {}))} | {' | '.join(cells)} |")
    command = f"python benchmarks/{script}{options} --json benchmarks/results/{name}"
    return with_source(rows, command, data)


def fit_table(name: str) -> str:
    """What a budget chose, its peak and its time."""
    data = load(name)
    rows = [
        "| budget | step peak MiB | step ms | in host memory | blocks |",
        "|---|---|---|---|---|",
    ]
    for row in data["rows"]:
        budget = "none" if row["asked_mib"] >= 10**6 else f"{row['asked_mib']:,.0f} MiB"
        if "error" in row:
            rows.append(f"| {budget} | does not fit | | | |")
            continue
        levels = ", ".join(f"{count} {level}" for level, count in row["levels"].items())
        peak, host = f"{row['measured_mib']:,.0f}", f"{row['host_mib']:,.0f} MiB"
        rows.append(f"| {budget} | {peak} | {row['step_ms']:.1f} | {host} | {levels} |")
    command = f"python benchmarks/fit.py --json benchmarks/results/{name}"
    return with_source(rows, command, data)


def curve_table(name: str) -> str:
    """Memory against time: `auto` within budgets, and blocks checkpointed by hand."""
    data = load(name)
    rows = ["| variant | step peak MiB | step ms | tokens/s |", "|---|---|---|---|"]
    for variant, row in data["variants"].items():
        if "error" in row:
            rows.append(f"| {variant} | {row['error'].partition(':')[0]} | | |")
            continue
        cells = [variant, f"{row['peak_mib']:,.0f}", step_of(row), f"{row['per_second']:,.0f}"]
        rows.append(f"| {' | '.join(cells)} |")
    command = (
        f"lowmem-patch bench --shape {data['model']} --train {data['train']} --lora-rank 16 --curve "
        f"--rounds {data['rounds']} --steps {data['steps']} --json > benchmarks/results/{name}"
    )
    return with_source(rows, command, data)


def host_table(name: str) -> str:
    """Python's time of a step."""
    data = load(name)
    rows = [
        "| model | forward ms: unpatched | `exact` | backward ms: unpatched | `exact` | both |",
        "|---|---|---|---|---|---|",
    ]
    for model, row in data["models"].items():
        stock, exact = row["unpatched"], row["exact"]
        parts = ("forward_ms", "backward_ms")
        cells = [f"{variant[part]:.1f}" for part in parts for variant in (stock, exact)]
        more = sum(exact.values()) / sum(stock.values())
        rows.append(f"| {model} | {' | '.join(cells)} | {more:.2f} x |")
    command = f"python benchmarks/host.py --json benchmarks/results/{name}"
    return with_source(rows, command, data)


def longest_table(name: str) -> str:
    """The longest sequence that fits, and the time of a token."""
    data = load(name)
    rows = [
        "| weights, memory | variant | longest sequence | KiB a token | ms a token |",
        "|---|---|---|---|---|",
    ]
    for row in data["rows"]:
        if "skipped" not in row:
            cells = [row["case"], row["variant"], f"{row['longest']:,}"]
            cells += [f"{row['bytes_per_token'] / 2**10:,.0f}", f"{row['ms_per_token']:.4f}"]
            rows.append(f"| {' | '.join(cells)} |")
    command = f"python benchmarks/longest.py --json benchmarks/results/{name}"
    return with_source(rows, command, data)


def predicted_table(name: str) -> str:
    """Predicted peaks beside those of the allocator."""
    data = load(name)
    sides = ("predicted", "measured")
    with_reserved = all("reserved" in row for row in data["rows"])
    more = " of it margin MiB | reserved GiB: predicted | measured |" if with_reserved else ""
    rows = [
        "| model | trains | optimizer | layers | budget | predicted GiB | measured GiB | error |"
        + more,
        "|---|---|---|---|---|---|---|---|" + (3 * "---|" if with_reserved else ""),
    ]
    for row in data["rows"]:
        cells = [row["model"], row["train"], row["optimizer"], str(row["layers"])]
        cells.append(f"{row['budget'] / 2**30:.2f} GiB" if "budget" in row else "none")
        cells += [f"{row[key] / 2**30:.3f}" for key in sides]
        cells.append(f"{row['error']:+.2%}")
        if with_reserved:
            cells.append(f"{row['margin'] / 2**20:.1f}")
            cells += [f"{row['reserved'][key] / 2**30:.3f}" for key in sides]
        rows.append(f"| {' | '.join(cells)} |")
    command = f"python benchmarks/predicted.py --time-limit 600 --json benchmarks/results/{name}"
    return with_source(rows, command, data)


def several_table(name: str) -> str:
    """Trainings on several GPUs: peak and time of a step, and the last loss."""
    data = load(name)
    rows = [
        "| way | trains | variant | step peak MiB | step ms | loss of the last step |",
        "|---|---|---|---|---|---|",
    ]
    for row in data["trainings"]:
        cells = [row["way"], row["train"], row["variant"], f"{row['step_peak_mib']:,.0f}"]
        cells += [step_of(row), f"{row['losses'][-1]:.4f}"]
        rows.append(f"| {' | '.join(cells)} |")
    rows += [
        "",
        "| way | trains | budget GiB | levels of 8 blocks | predicted GiB | measured GiB | error |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in data["budgets"]:
        levels = ", ".join(f"{count} {level}" for level, count in row["levels"].items())
        asked = f"{row['budget'] / 2**30:.2f}" if "budget" in row else "none"
        cells = [row["way"], row["train"], asked, levels]
        cells += [f"{row[key] / 2**30:.3f}" for key in ("predicted", "measured")]
        cells.append(f"{row['error']:+.2%}")
        rows.append(f"| {' | '.join(cells)} |")
    command = f"python benchmarks/several_gpus.py --json benchmarks/results/{name}"
    return "\n".join([*rows, "", f"`{command}`: {data['gpus']} x {environment_of(data)}"])


def diffusion_table(name: str) -> str:
    """Peak, GPU time and step time of diffusion models, by variant."""
    data = load(name)
    variants = ("unpatched", "checkpointing", "exact", "auto")
    rows = [f"| model | trains | number | {' | '.join(variants)} |", "|---" * 7 + "|"]
    kinds = (
        ("peak_mib", "peak MiB", ",.0f"),
        ("gpu_ms", "GPU ms", ".1f"),
        ("step_ms", "step ms", ".1f"),
    )
    for row in data["rows"]:
        adapted = row["trains"] != "all weights"
        trains = f"LoRA, {row['trains']}" if adapted else row["trains"]
        for number, (key, title, form) in enumerate(kinds):
            first = [f"{row['model']}, {row['blocks']}", trains] if number == 0 else ["", ""]
            cells = [
                f"{row[v][key]:{form}}"
                + ("" if v == variants[0] else f" ({row[v][key] / row[variants[0]][key]:.2f})")
                for v in variants
            ]
            rows.append(f"| {' | '.join([*first, title, *cells])} |")
    command = f"python benchmarks/diffusion.py --json benchmarks/results/{name}"
    return with_source(rows, command, data)


def head_table(name: str) -> str:
    """Time and memory of the head and its loss alone."""
    data = load(name)
    variants = list(dict.fromkeys(row["variant"] for row in data["rows"]))
    cells: dict[tuple[str, ...], dict[str, str]] = {}
    for row in data["rows"]:
        trains = "trains" if row["trains"] else "frozen"
        case = (f"{row['vocabulary']:,} x {row['width']:,}, {trains}", f"{row['rows']:,}")
        memory = f" / {row['extra_mib']:,.0f}" if "extra_mib" in row else ""
        cells.setdefault(case, {})[row["variant"]] = f"{row['ms']:.1f}{memory}"
    rows = [
        f"| ms / extra MiB | rows | {' | '.join(variants)} |",
        "|---" * (2 + len(variants)) + "|",
    ]
    for case, found in cells.items():
        rows.append(f"| {' | '.join([*case, *(found.get(v, '') for v in variants)])} |")
    command = f"python benchmarks/head.py --json benchmarks/results/{name}"
    return with_source(rows, command, data)


def _shares(name: str, command: str, columns: str) -> str:
    """Bandwidth of each op beside that of a copy; a column for each writer, or for each count of bits."""
    data = load(name)
    shown: dict[str, None] = {}
    cells: dict[tuple[str, ...], dict[str, str]] = {}
    for row in data["results"]:
        case, column = (row["op"], row["shape"]), row["by"]
        if columns == "bits":
            known = re.fullmatch(r"(\w+) -> (\d bits?) (\w+)", row["op"])
            if known is None:
                continue
            activation, column, way = known.groups()
            case = (activation, way)
        shown[column] = None
        cells.setdefault(case, {})[column] = f"{row['share']:.0%}"
    first = "activation | pass" if columns == "bits" else "op | shape"
    rows = [f"| {first} | {' | '.join(shown)} |", "|---" * (2 + len(shown)) + "|"]
    for case, found in cells.items():
        rows.append(f"| {' | '.join([*case, *(found.get(c, '') for c in shown)])} |")
    bandwidth = data["copy_bytes_per_second"] / 1e12
    machine = f"{data['gpu']}, {data['date'][:10]}; driver {data['driver']}, torch {data['torch']}"
    own = f", lowmem-patch {data['lowmem-patch']}" if "lowmem-patch" in data else ""
    said = f"triton {data['triton']}{own}; {data['dtype']}; a copy moves {bandwidth:.2f} TB/s."
    return "\n".join([*rows, "", f"`{command}`: {machine}, {said}"])


_OP_SPEED = "python benchmarks/op_speed.py --json benchmarks/results/"
_OF_QWEN = (
    "--case qwen --variants unpatched exact auto fit=8448MiB liger auto+compile fit=8448MiB+compile "
    "--steps 20 "
)
TABLES = {
    "headline": partial(headline, "whole-h200.json", "longest-h200.json"),
    "summary": partial(summary_table, "whole-h200.json"),
    "head": partial(head_table, "head-h200.json"),
    "codes": partial(
        _shares, "codes-h200.json", f"{_OP_SPEED}codes-h200.json --only bit", columns="bits"
    ),
    "kernels": partial(_shares, "kernels-h200.json", f"{_OP_SPEED}kernels-h200.json", columns="by"),
    "bytes": bytes_table,
    "whole": partial(whole_table, "whole-h200.json"),
    "whole-qwen": partial(whole_table, "whole-qwen-h200.json", _OF_QWEN),
    "limit": partial(limit_table, "limit-h200.json"),
    "fit": partial(fit_table, "fit-h200.json"),
    "longest": partial(longest_table, "longest-h200.json"),
    "predicted": partial(predicted_table, "predicted-h100.json"),
    "curve": partial(curve_table, "curve-h100.json"),
    "several": partial(several_table, "several-h100.json"),
    "compact": partial(
        gpu_table, "models-h200-compact.json", " --variants unpatched paper exact auto compact"
    ),
    "compiled": partial(
        gpu_table,
        "models-h200-compiled.json",
        " --case CASE --variants auto compact auto+compile compact+compile",
    ),
    "host": partial(host_table, "host-h200.json"),
    "gpu": partial(gpu_table, "models-h200.json"),
    "architectures": partial(architectures_table, "architectures-h200.json"),
    "architectures-autocast": partial(
        architectures_table, "architectures-autocast-h200.json", "--autocast "
    ),
    "architectures-compiled": partial(
        architectures_table,
        "architectures-compiled-h200.json",
        "--autocast --compile --only BERT BLOOM DINOv2 ResNet-50 EfficientNet-B0 ",
    ),
    "captured": partial(
        captured_table,
        "architectures-captured-h200.json",
        "--autocast --capture --only GPT-2 BERT ModernBERT DINOv2 SigLIP CLIP SegFormer-B0 EVA-02-B "
        "ConvNeXt-T MaxViT-T ResNet-50 DenseNet-121 EfficientNet-B0 MobileNetV2 ",
    ),
    "captured-newer": partial(
        captured_table,
        "architectures-captured-newer-h200.json",
        "--autocast --capture --only BERT ModernBERT GPT-2 Qwen2 Qwen3 ",
    ),
    "captured-compiled": partial(
        captured_table,
        "architectures-compiled-captured-h200.json",
        "--autocast --compile --capture --only BERT BLOOM DINOv2 ResNet-50 ",
    ),
    "diffusion": partial(diffusion_table, "diffusion-h200.json"),
    "experts": partial(gpu_table, "experts-h100.json", script="experts.py"),
    "gpu-earlier": partial(gpu_table, "models-h200-earlier.json"),
}


def render(text: str) -> str:
    """A page's text with each marked table replaced."""
    for name, table in TABLES.items():
        if f"<!-- {name} -->" not in text:
            continue
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        rendered = table() + "\n"
        text = pattern.sub(lambda match, new=rendered: match[1] + new + match[2], text)
    return text


def main() -> int:
    differs = False
    for page in PAGES:
        before = page.read_text(encoding="utf-8")
        after = render(before)
        differs |= before != after
        if "--check" not in sys.argv:
            page.write_text(after, encoding="utf-8")
    return int(differs and "--check" in sys.argv)


if __name__ == "__main__":
    sys.exit(main())
