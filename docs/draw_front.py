"""Draws README's picture, docs/images/front.png: `python -m docs.draw_front`, in the root of the repository.

It shows PPO on CartPole-v1 under two distribution policies: the devices of fragments, and learning curves.
"""

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch

import algos
import envs
import fdg
import policies

OUT = Path(__file__).parent / "images" / "front.png"
COLOURS = {"act": "#cfd8f7", "step": "#d5edd9", "learn": "#fbd9c4"}
# Label, policy, number of devices, colour and line width of the curve.
PLACEMENTS = [
    ("GPUOnly(), 1 device", policies.GPUOnly(), 1, "#9aa7d6", 6.0),
    ("SingleLearnerCoarse(actors=3), 4 devices", policies.SingleLearnerCoarse(actors=3), 4, "#b3401f", 1.6),
]


def main() -> None:
    """Trains under both policies, and writes the picture."""
    fdg.host_devices(4)
    algorithm = algos.PPO(env=envs.make("CartPole-v1"), num_envs=48, num_steps=32)
    figure = plt.figure(figsize=(11, 3.6), layout="constrained")
    grid = figure.add_gridspec(2, 2, width_ratios=(1.0, 1.15))
    curve = figure.add_subplot(grid[:, 1])
    for row, (label, policy, count, colour, width) in enumerate(PLACEMENTS):
        engine = fdg.compile(algorithm, policy, devices=count)
        _draw_devices(figure.add_subplot(grid[row, 0]), label, engine.plan, count, colour)
        _, metrics = engine.run(engine.init(seed=0), iterations=80)
        returns = np.asarray(metrics["episode_return"])
        steps = np.arange(1, len(returns) + 1) * algorithm.num_envs * algorithm.num_steps
        curve.plot(steps / 1000, returns, color=colour, linewidth=width, label=label)
    curve.set_xlabel("thousand steps of CartPole-v1")
    curve.set_title("return: the same numbers", loc="left", fontsize=11)
    curve.legend(frameon=False, loc="lower right", fontsize=9)
    curve.spines[["top", "right"]].set_visible(False)
    figure.savefig(OUT, dpi=130)
    print(OUT)


def _draw_devices(axes: Axes, label: str, plan: fdg.Plan, count: int, colour: str) -> None:
    """Draws a box for each device, and in it a box for each fragment that the plan places there."""
    axes.set_title(label, loc="left", fontsize=11, color="#222222")
    axes.set_xlim(0, 4)
    axes.set_ylim(0, 1)
    axes.axis("off")
    for device in range(count):
        outline = FancyBboxPatch(
            (device + 0.06, 0.02), 0.88, 0.9, boxstyle="round,pad=0,rounding_size=0.06", fc="white", ec=colour
        )
        axes.add_patch(outline)
        axes.text(
            device + 0.5, 0.84, f"device {device}", ha="center", va="center", fontsize=8, color="#555555"
        )
        placed = [name for name in COLOURS if device in plan.group_of(name).devices]
        for row, name in enumerate(placed):
            axes.add_patch(
                FancyBboxPatch(
                    (device + 0.14, 0.56 - 0.24 * row), 0.72, 0.2, fc=COLOURS[name], ec="none",
                    boxstyle="round,pad=0,rounding_size=0.04",
                )
            )  # fmt: skip
            axes.text(device + 0.5, 0.66 - 0.24 * row, name, ha="center", va="center", fontsize=9)


if __name__ == "__main__":
    main()
