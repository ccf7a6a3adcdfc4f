"""MSRL's two clusters on the model: what its evaluation says in words, as pictures; and PPO on 4,096 H100s.

    python -m bench.costs paper

The clusters are those of its evaluation (Zhu et al., USENIX ATC 2023): 64 P100s, four to a machine, on 10 Gb
Ethernet; and 32 V100s, eight to a machine with NVLink, on 100 Gb InfiniBand.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import algos
import envs
import fdg
import policies
from fdg.commands.cluster_report import draw_sweep, point, points_report
from fdg.costs import published
from fdg.costs.hardware import Cluster
from fdg.costs.prediction import predict
from fdg.training.curves import figure_of, finish, style

PICTURES = Path(__file__).parents[1] / "docs" / "images" / "scale"
_LAYERS = (256, 256, 256)


def cloud() -> Cluster:
    """Its P100s."""
    links = published.link("PCIe 3"), published.link("Ethernet 10")
    return Cluster(published.kind("P100"), 4, 16, *links)


def local() -> Cluster:
    """Its V100s."""
    links = published.link("NVLink 2"), published.link("InfiniBand EDR")
    return Cluster(published.kind("V100"), 8, 4, *links)


def ppo(num_envs: int, **fields: Any) -> fdg.FDG:
    """PPO of a continuous task, a network of three layers, rollouts of 128 steps."""
    given = {"num_steps": 128, "hidden": _LAYERS, "total_steps": 10**10, **fields}
    return fdg.trace(algos.PPO(env=envs.make("Pendulum-v1"), num_envs=num_envs, **given))


def paper() -> None:
    """All figures, as text and pictures."""
    found = {"crossing": crossing(), "scaling": scaling(), "large": large()}
    print(json.dumps(found, indent=1))


def crossing() -> dict[str, Any]:
    """One learner against many, as environments (so the batch) grow; 320 updates, as CleanRL has them."""
    said: dict[str, Any] = {}
    for name, cluster in (("64 P100, 10 Gb Ethernet", cloud()), ("32 V100, NVLink and InfiniBand", local())):
        lines: dict[str, list[tuple[float, float]]] = {"SingleLearnerCoarse": [], "MultiLearner": []}
        bounds = {}
        for number in (64, 256, 1024, 4096, 16384, 65536):
            graph = ppo(number, num_epochs=10, num_minibatches=32)
            for policy in (policies.SingleLearnerCoarse(), policies.MultiLearner()):
                word = type(policy).__name__
                prediction = predict(fdg.place(graph, policy, cluster.devices), cluster)
                lines[word].append((number, prediction.seconds))
                bounds[f"{word}, {number}"] = prediction.bound
        said[name] = {"seconds": lines, "bounds": bounds, "crosses at": crosses(*lines.values())}
        draw_lines(lines, PICTURES / f"crossing-{cluster.kind.name.lower()}.png", f"PPO on {name}")
    return said


def crosses(one: Sequence[tuple[float, float]], other: Sequence[tuple[float, float]]) -> list[str]:
    """Between which numbers of environments the quicker one changes."""
    found = []
    for i in range(len(one) - 1):
        now, later = (one[j][1] < other[j][1] for j in (i, i + 1))
        if now != later:
            found.append(f"{one[i][0]:g} to {one[i + 1][0]:g}")
    return found


def scaled(
    cluster: Cluster, num_envs: int, counts: Sequence[int], title: str, name: str, **fields: Any
) -> Any:
    """`GPUOnly` with as many environments on every device, however many: points, printed and drawn."""
    points = []
    for count in counts:
        plan = fdg.place(ppo(num_envs * count, **fields), policies.GPUOnly(), count)
        points.append(point(plan, cluster.of(count), num_envs * count * 128))
    print(points_report(points, price=cluster.price > 0), "\n")
    draw_sweep(points, PICTURES / f"{name}.png", f"PPO under GPUOnly, {num_envs:,} environments {title}")
    return points


def draw_lines(lines: Mapping[str, Sequence[tuple[float, float]]], path: Path, title: str) -> None:
    """Seconds of an iteration by environments, both logarithmic: a line for each name."""
    figure, axes = figure_of()
    for i, (name, points) in enumerate(lines.items()):
        axes.plot(*zip(*points, strict=True), "o-", color=style(i)[1], label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set(title=title, xlabel="environments", ylabel="seconds an iteration")
    finish(figure, [axes], "environments")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def scaling() -> dict[str, Any]:
    """On the paper's clusters: the share of the speed that is kept."""
    said = {}
    for name, cluster in (("P100", cloud()), ("V100", local())):
        counts = [n for n in (1, 2, 4, 8, 16, 32, 64) if n <= cluster.devices]
        first, *_, last = scaled(cluster, 4096, counts, f"a {name}", f"gpu-only-{name.lower()}")
        said[name] = last.steps_per_s / first.steps_per_s / last.devices
    return said


def large() -> dict[str, str]:
    """On up to 4,096 H100s, with two ways to shuffle: what bounds each."""
    links = published.usual_links("H100")
    whole = Cluster(
        published.kind("H100"), 8, 512, *links, price=2.5, straggling=0.02, failures=2e-6, storage=1e10
    )
    bounds = {}
    for shuffle in ("each", "time"):
        title = f"an H100, shuffle={shuffle}"
        points = scaled(whole, 2048, (8, 64, 512, 4096), title, f"h100-{shuffle}", shuffle=shuffle)
        bounds[shuffle] = points[-1].prediction.bound
    return bounds
