"""Plots of throughput, idle time, goodput and bytes over numbers of devices."""

from collections.abc import Sequence
from pathlib import Path

from fdg.commands.cluster_report import Point

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")  # Okabe & Ito


def draw_sweep(points: Sequence[Point], path: Path, title: str) -> None:
    """Writes a PNG: a line for each policy."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lines: dict[str, list[Point]] = {}
    for one in points:
        lines.setdefault(one.policy.partition("(")[0], []).append(one)
    figure = Figure(figsize=(11, 7), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, 2)
    figure.suptitle(title)
    for colour, (name, some) in zip(COLOURS * 9, lines.items(), strict=False):
        devices = [one.devices for one in some]
        axes[0, 0].plot(devices, [one.steps_per_s for one in some], "o-", color=colour, label=name)
        idle = [100 * max(one.prediction.idle.values(), default=0.0) for one in some]
        axes[0, 1].plot(devices, idle, "o-", color=colour)
        axes[1, 0].plot(
            devices,
            [max(one.prediction.inside + one.prediction.between, 1) for one in some],
            "o-",
            color=colour,
        )
        axes[1, 1].plot(devices, [one.goodput[1] / one.straggling * 100 for one in some], "o-", color=colour)
    first = points[0]
    ideal = [first.steps_per_s * one.devices / first.devices for one in points]
    axes[0, 0].plot([one.devices for one in points], ideal, ":", color="grey", label="linear")
    axes[0, 0].legend()
    labels = ("steps/s", "idle time of the idlest group, %", "bytes over links, an iteration", "goodput, %")
    for axis, label in zip(axes.flat, labels, strict=True):
        axis.set_xscale("log", base=2)
        axis.set_xlabel("devices")
        axis.set_ylabel(label)
        axis.grid(alpha=0.3)
    for axis in (axes[0, 0], axes[1, 0]):
        axis.set_yscale("log")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
