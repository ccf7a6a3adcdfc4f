"""Draws the pictures of `docs/performance.md` from measurements, for `bench.performance`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt

_OUR_COLOR, _TARGET_COLOR = "#1f6f8b", "#c8553d"
_TICKS = (0.5, 1, 2, 3, 5, 10, 25, 50)  # of the axis of ratios
_MIN_SIZES = 3  # a task with fewer sizes gets no picture of its sizes


def draw(results: Mapping[str, Any], directory: Path) -> list[Path]:
    """Draws all pictures for which there are results; returns their files.

    `results` is the content of `docs/performance.json`: `peers` are comparisons with other libraries, `bench`
    are timings of fdg.
    """
    files = []
    if results.get("peers"):
        files.append(_draw_ratios(results["peers"], directory / "ratios.png"))
        files += _draw_speeds_by_size(results["peers"], directory)
    for group in ("environments", "seeds"):
        rows = [row for row in results.get("bench", {}).values() if row.get("group") == group]
        if len(rows) > 1:
            rows.sort(key=lambda row: row["value"])
            files.append(directory / f"{group}.png")
            _draw_lines([row["value"] for row in rows], {"fdg": rows}, group, files[-1])
    return files


def _draw_ratios(peers: Mapping[str, Any], path: Path) -> Path:
    """Draws the ratio of each pair as a bar, with the middle half of the rounds and the target."""
    rows = sorted(peers.values(), key=lambda row: (row["peer"], row["task"], row["size"]), reverse=True)
    figure, axes = plt.subplots(figsize=(9, 0.32 * len(rows) + 1.2), layout="constrained")
    for y, row in enumerate(rows):
        low, high = row["ratio_middle_half"]
        axes.barh(y, row["ratio"], color=_OUR_COLOR, height=0.62)
        axes.plot([low, high], [y, y], color="black", linewidth=1)
        axes.plot([row["at_least"]] * 2, [y - 0.42, y + 0.42], color=_TARGET_COLOR, linewidth=2)
        label = axes.text(max(row["ratio"], high) * 1.05, y, f"{row['ratio']:.2f}", va="center", fontsize=8)
        # The box hides the red marks behind the text.
        label.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.6})
        label.set_zorder(5)
    axes.axvline(1, color="black", linewidth=0.6)
    axes.set_xscale("log")
    axes.set_xticks(_TICKS, [f"{tick:g}" for tick in _TICKS], minor=False)
    axes.minorticks_off()
    axes.set_xlim(left=min(0.5, 0.9 * min(row["ratio_middle_half"][0] for row in rows)))
    axes.set_yticks(range(len(rows)), [f"{r['peer']}: {r['task']}, {r['size']:,}" for r in rows], fontsize=8)
    axes.set_xlabel("steps/s of fdg / steps/s of the other (red: target; line: middle half of the rounds)")
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def _draw_speeds_by_size(peers: Mapping[str, Any], directory: Path) -> list[Path]:
    """Draws steps/s of both sides by number of environments, for each task with several sizes."""
    tasks: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in peers.values():
        tasks.setdefault((row["peer"], row["task"]), []).append(row)
    files = []
    for (peer, task), rows in tasks.items():
        if len(rows) >= _MIN_SIZES:
            rows.sort(key=lambda row: row["size"])
            files.append(directory / f"{peer}-{task}-by-size.png".replace(" ", "-").replace(":", "-"))
            sides = {"fdg": [row["ours"] for row in rows], peer: [row["theirs"] for row in rows]}
            _draw_lines([row["size"] for row in rows], sides, "environments", files[-1], task)
    return files


def _draw_lines(
    sizes: list[int], sides: Mapping[str, list[Any]], x_label: str, path: Path, title: str = ""
) -> None:
    """Draws steps/s by size: one line for each side (name -> measurements in the order of `sizes`)."""
    figure, axes = plt.subplots(figsize=(6, 3.2), layout="constrained")
    for (name, rows), color in zip(sides.items(), (_OUR_COLOR, "gray"), strict=False):
        if "middle_half" in rows[0]:
            low, high = zip(*(row["middle_half"] for row in rows), strict=True)
            axes.fill_between(sizes, low, high, color=color, alpha=0.2, linewidth=0)
        axes.plot(sizes, [row["steps_per_s"] for row in rows], marker="o", color=color, label=name)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
    axes.set_ylim(bottom=0)
    axes.set(xlabel=x_label, ylabel="steps/s" if len(sides) > 1 else "steps/s, all agents together")
    axes.set_title(title, fontsize=10)
    if len(sides) > 1:
        axes.legend(frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)
