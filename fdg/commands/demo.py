"""`fdg demo`: trains on one and on four devices within a minute; shows the plan, the curves and the agent."""

import time
from pathlib import Path
from typing import Any

from fdg.commands.cli import Command
from fdg.commands.flags import Flag
from fdg.errors import FdgError
from fdg.files import check_results, writing
from fdg.running.host_devices import make_host_devices
from fdg.running.program_cache import keep_programs

FLAGS = (Flag("out", str, "fdg-demo", "a folder for the pictures"), Flag("seed", int, 0, "the random seed"))
_ABOUT = "Trains PPO on CartPole-v1 on one device and on four, and shows the plan, both curves and the agent."
_DEVICES = 4
_ITERATIONS = 40


def _demo(flags: dict[str, Any]) -> None:
    out, seed, start_time = Path(flags["out"]), flags["seed"], time.perf_counter()
    if not 0 <= seed < 2**32:
        raise FdgError(f"--seed {seed}: give a whole number from 0 to {2**32 - 1}")
    check_results(out, ("curves.png", "agent.gif"))
    keep_programs(None)
    make_host_devices(_DEVICES)

    import jax

    import algos
    import envs
    import fdg
    import policies
    from fdg.training.run import Run

    algorithm = algos.PPO(
        env=envs.make("CartPole-v1"),
        num_envs=48,
        num_steps=32,
        num_minibatches=4,
        learning_rate=2.5e-3,
        total_steps=48 * 32 * _ITERATIONS,
    )
    graph, returns = fdg.trace(algorithm), dict[int, Any]()
    for count in sorted({1, min(_DEVICES, len(jax.devices()))}, reverse=True):
        # One learner sums gradients in the order of one device; with several, rounding would differ.
        policy = policies.GPUOnly() if count < _DEVICES else policies.SingleLearnerCoarse(actors=_DEVICES - 1)
        engine = fdg.compile(algorithm, policy, jax.devices()[:count], graph=graph)
        if not returns:
            print(engine.plan, "", sep="\n", flush=True)
        state, metrics = engine.run(engine.init(seed), _ITERATIONS)
        returns[count] = jax.device_get(metrics["episode_return"])
        print(
            f"trained on {count} device{'s' * (count > 1)}: {time.perf_counter() - start_time:.0f} s",
            flush=True,
        )
    _draw(returns, algorithm.steps_per_iteration, out / "curves.png")
    agent = Run(algorithm, engine.algorithm_state(state), _ITERATIONS, seed=seed)
    print(agent.evaluate(episodes=32), flush=True)
    try:
        print(f"the agent: {agent.play(out / 'agent.gif', max_steps=150)}")
    except FdgError as error:
        print(f"no picture of the agent: {error}")
    print(f"the curves: {out / 'curves.png'}\n{time.perf_counter() - start_time:.0f} s in total", flush=True)


def _draw(returns: dict[int, Any], steps_per_iteration: int, path: Path) -> None:
    """Plots `returns` (`[iterations]`, by number of devices); the second, thinner one is on top."""
    import numpy as np

    from fdg.training import curves

    figure, axes = curves.make_figure()
    for i, (count, values) in enumerate(sorted(returns.items())):
        _, colour = curves.style_of(i)
        width, dashes = ((7, "-"), (2, "--"))[i]
        label = f"{count} device{'s' * (count > 1)}"
        x = steps_per_iteration * np.arange(1, len(values) + 1)
        axes.plot(x, values, dashes, color=colour, linewidth=width, alpha=0.35 if i == 0 else 1, label=label)
    largest_difference = float(np.nanmax(np.abs(np.subtract(*returns.values())))) if len(returns) > 1 else 0.0
    title = (
        f"PPO on CartPole-v1 on one device, and with actors and learner on separate devices"
        f"\n(largest difference of a return: {largest_difference:.2g})"
    )
    axes.set(
        title=title, xlabel="environment steps", ylabel="mean episode return", xlim=(0, None), ylim=(0, None)
    )
    curves.finish_figure(figure, [axes], "env_steps")
    with writing(path) as file:
        figure.savefig(file, format="png", dpi=150)
    print(f"largest difference between the curves: {largest_difference:.2g}", flush=True)


main = Command("fdg demo", _ABOUT, FLAGS, _demo)
