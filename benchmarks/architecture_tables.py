"""Many architectures as tables, for `tables.py`: the results of `architectures.py`."""

from __future__ import annotations

from whole_tables import load, with_source


def architectures_table(name: str, option: str = "") -> str:
    """Peak, GPU time and step time of many architectures, unpatched and with `auto`."""
    data = load(name)
    rows = [
        "| architecture | batch | peak MiB | `auto` | | GPU ms | `auto` | | step ms | `auto` | |",
        "|---" * 11 + "|",
    ]
    for case, row in data["cases"].items():
        cells = [case, f"{row['batch']} x {row['length']} {row['unit']}"]
        for key, form in (("peak_mib", ",.0f"), ("gpu_ms", ".1f"), ("step_ms", ".1f")):
            was, now = row["unpatched"][key], row["auto"][key]
            cells += [f"{was:{form}}", f"{now:{form}}", f"{now / was:.2f}"]
        rows.append(f"| {' | '.join(cells)} |")
    command = f"python benchmarks/architectures.py {option}--json benchmarks/results/{name}"
    return with_source(rows, command, data)


def captured_table(name: str, option: str) -> str:
    """Steps as CUDA graphs beside steps that Python launches."""
    data = load(name)
    rows = [
        "| architecture | batch | captured: peak MiB | `auto` | | ms | `auto` | | by Python: ms | `auto` |",
        "|---" * 10 + "|",
    ]
    for case, row in data["cases"].items():
        unpatched, auto = row["unpatched"], row["auto"]
        cells = [case, f"{row['batch']} x {row['length']} {row['unit']}"]
        for key, form in (("captured_mib", ",.0f"), ("captured_ms", ".1f")):
            was, now = unpatched[key], auto[key]
            cells += [f"{was:{form}}", f"{now:{form}}", f"{now / was:.2f}"]
        cells += [f"{variant['step_ms']:.1f}" for variant in (unpatched, auto)]
        rows.append(f"| {' | '.join(cells)} |")
    command = f"python benchmarks/architectures.py {option}--json benchmarks/results/{name}"
    return with_source(rows, command, data)
