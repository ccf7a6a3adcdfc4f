"""What a run used and did: versions, `summary.json`, and collectives that the plan did not predict."""

import platform
import subprocess
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

import fdg
from fdg.costs.machine import cluster_for
from fdg.costs.prediction import predict
from fdg.errors import FdgError
from fdg.processes import distributed
from fdg.showing.words import quantity


def versions() -> dict[str, str]:
    """Versions of the packages that a run's numbers depend on."""
    packages = ("jax", "jaxlib", "flax", "optax", "numpy")
    return {
        "fdg": fdg.__version__,
        "python": platform.python_version(),
        **{package: metadata.version(package) for package in packages},
    }


def git_commit() -> str | None:
    """The git commit of the current folder, with `-dirty` if files have changed; None without one."""
    try:
        result = subprocess.run(
            # `core.fsmonitor` of an untrusted repository could start a program.
            "git -c core.fsmonitor=false describe --always --dirty --abbrev=40 --exclude=*".split(),
            capture_output=True,
            text=True,
            timeout=5,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip() or None if result.returncode == 0 else None


def unplanned_collectives(engine: fdg.Engine) -> list[str]:
    """One line per collective of the compiled programs that the plan did not predict."""
    return [
        f"unexplained: {c.kind} of {quantity(c.bytes, 'B')} x {c.calls} in program '{program}'"
        f" ({', '.join(c.fragments) or 'between fragments'}), which the plan does not name"
        for program, c in engine.unexplained()
    ]


def groups_summary(engine: fdg.Engine, wall_s: float) -> dict[str, Any]:
    """Busy and idle seconds of each group in `wall_s` seconds, and bytes moved; empty for a single group."""
    if len(engine.plan.groups) < 2:
        return {}
    processes = distributed.exchange({"busy_s": engine.busy_seconds(), "moved": engine.moved_bytes})
    groups = {}
    for group in engine.plan.groups:
        busy = min(wall_s, max(process["busy_s"][group.name] for process in processes))
        groups[group.name] = {
            "devices": len(group),
            "busy_s": round(busy, 4),
            "idle_s": round(wall_s - busy, 4),
        }
    return {"groups": groups, "moved_bytes": sum(process["moved"] for process in processes)}


def predicted_seconds(engine: fdg.Engine) -> float | None:
    """Predicted seconds per iteration on this machine (`fdg.costs`); None if its rates are unknown."""
    try:
        return predict(engine.plan, cluster_for(engine.devices)).seconds
    except FdgError:
        return None


def summary(
    engine: fdg.Engine,
    iterations: int,
    steps: int,
    seeds: Sequence[int],
    seconds: Mapping[str, float],
    evaluation: Mapping[str, Any],
    groups: Mapping[str, Any],
) -> dict[str, Any]:
    """The content of `summary.json`.

    `steps` is of one agent, and `seeds` has one seed per agent. `seconds` has `wall_s` and `compile_s`;
    `evaluation` and `groups` are further entries (`summary_entries`, `groups_summary`).
    """
    return {
        "env_steps": steps,
        "iterations": iterations,
        **seconds,
        # The time is unknown if the metrics of an earlier session were removed.
        "steps_per_s": steps * len(seeds) / seconds["wall_s"] if seconds["wall_s"] else None,
        **evaluation,
        "seeds": list(seeds),
        "policy": str(engine.plan.policy),
        "predicted_s": predicted_seconds(engine),
        "iteration_s": seconds["wall_s"] / iterations,
        "memory_bytes": engine.memory(),
        **groups,
        "devices": [device.device_kind for device in engine.devices],
        "versions": versions(),
    }
