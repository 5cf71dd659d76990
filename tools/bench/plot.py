# SPDX-License-Identifier: Apache-2.0
"""The headline as a picture."""

import os
from pathlib import Path
from typing import Any

COLOURS = ("#9a9a9a", "#5b8db8", "#c8553d")


def draw(found: dict[str, Any], path: Path) -> None:
    """End-to-end rates, and step times over the context; the suffix of `path` names the format."""
    import matplotlib

    matplotlib.use("agg")
    matplotlib.rcParams["svg.hashsalt"] = "vllm-tq"  # the same figures give the same file
    from matplotlib import pyplot

    rows = list(found["contestants"].values())
    figure, (rates, steps) = pyplot.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    titles = [row["title"] for row in rows]
    bars = rates.barh(titles, [row["tokens_per_s"] for row in rows], color=COLOURS)
    rates.bar_label(bars, fmt="%.0f", padding=3)
    rates.margins(x=0.15)
    rates.invert_yaxis()
    rates.set_xlabel("tokens/s, prompt and generated")
    for row, colour in zip(rows, COLOURS):
        points = row["passes"][-1]["curve"]
        label = row["title"]
        steps.plot([x for x, _ in points], [y * 1e3 for _, y in points], color=colour, label=label)
    steps.set_xlabel("tokens of context")
    steps.set_ylabel("ms per step")
    steps.set_ylim(bottom=0)
    steps.legend(frameon=False)
    for axes in (rates, steps):
        axes.spines[["top", "right"]].set_visible(False)
    work = found["workload"]
    figure.suptitle(
        f"{work['count']} prompts of {work['prompt']:,} tokens to {work['total']:,}, "
        f"{found['machine']['cores']} cores: {found['ratio_vs_transformers']:.2f}× Transformers, "
        f"{found['ratio_vs_upstream']:.2f}× upstream"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"part-{path.name}")
    figure.savefig(partial, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)
    os.replace(partial, path)
