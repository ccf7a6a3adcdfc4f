"""The pictures of `docs/performance.md`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt

_OURS, _THEIRS, _ASKED = "#1f6f8b", "#c0c6cc", "#c8553d"


def draw(results: Mapping[str, Any], directory: Path) -> list[Path]:
    """Draws what there are figures of, and returns the files."""
    drawn = []
    if results.get("peers"):
        drawn.append(_ratios(results["peers"], directory / "ratios.png"))
    for group in ("environments", "seeds"):
        rows = [one for one in results.get("bench", {}).values() if one.get("group") == group]
        if len(rows) > 1:
            drawn.append(_sizes(rows, group, directory / f"{group}.png"))
    return drawn


def _ratios(peers: Mapping[str, Any], path: Path) -> Path:
    """A bar for each pair, with its middle half, and a mark at what is asked for."""
    rows = sorted(peers.values(), key=lambda row: (row["peer"], row["task"], row["size"]), reverse=True)
    figure, axes = plt.subplots(figsize=(9, 0.32 * len(rows) + 1.2), layout="constrained")
    for y, row in enumerate(rows):
        low, high = row["ratio_middle_half"]
        axes.barh(y, row["ratio"], color=_OURS, height=0.62)
        axes.plot([low, high], [y, y], color="black", linewidth=1)
        axes.plot([row["at_least"]] * 2, [y - 0.42, y + 0.42], color=_ASKED, linewidth=2)
        axes.text(max(row["ratio"], high) * 1.05, y, f"{row['ratio']:.2f}", va="center", fontsize=8)
    axes.axvline(1, color="black", linewidth=0.6)
    axes.set_xscale("log")
    axes.set_yticks(range(len(rows)), [f"{r['peer']}: {r['task']}, {r['size']:,}" for r in rows], fontsize=8)
    axes.set_xlabel("steps/s of fdg by those of the other (red: asked for; line: middle half of the rounds)")
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def _sizes(rows: list[Mapping[str, Any]], group: str, path: Path) -> Path:
    """Steps/s over a size."""
    rows = sorted(rows, key=lambda row: row["value"])
    figure, axes = plt.subplots(figsize=(6, 3.2), layout="constrained")
    sizes = [row["value"] for row in rows]
    axes.plot(sizes, [row["steps_per_s"] for row in rows], marker="o", color=_OURS)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
    axes.set_ylim(bottom=0)
    axes.set_xlabel(group)
    axes.set_ylabel("steps/s, all agents together")
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path
