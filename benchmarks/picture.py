"""Draw the README's picture, memory against speed, from the committed results.

python benchmarks/picture.py                     # docs/pareto.png
python benchmarks/picture.py --case "ViT-B/16 full" --out vit.png
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from lowmem_patch.plot import Point, plot_tradeoff

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "models-h200.json"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", default="LLaMA-7B LoRA all, PEFT defaults")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "pareto.png")
    options = parser.parse_args()
    data = json.loads(RESULTS.read_text(encoding="utf-8"))
    if options.case not in data["cases"]:
        parser.error(f"--case {options.case!r} is none of: {'; '.join(data['cases'])}")
    points = [
        Point(name, row["peak_mib"] * 2**20, 1000 / row["step_ms"])
        for name, row in data["cases"][options.case].items()
        if "error" not in row
    ]
    title = f"{options.case}: one training step on an {data['environment']['machine']}"
    plot_tradeoff(points, options.out, title, memory="peak memory above rest", rate="steps / s")


if __name__ == "__main__":
    main()
