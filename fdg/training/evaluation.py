"""What the trained agents are worth: whole episodes, played after training."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fdg
from fdg.processes import distributed
from fdg.training.job import Job

# Returns at which Gymnasium's registry calls an environment solved (`reward_threshold`).
SOLVED = {
    "Acrobot-v1": -100.0,
    "CartPole-v1": 475.0,
    "MountainCar-v0": -110.0,
    "MountainCarContinuous-v0": 90.0,
}


def evaluate(job: Job, engine: fdg.Engine, state: Any) -> dict[str, Any]:
    """Mean return of whole episodes, played by the trained agents; empty if there is no way to."""
    algorithm = job.algorithm
    if not job.eval_episodes or not hasattr(algorithm, "evaluate"):
        return {}

    def mean_return(state, key):
        return algorithm.evaluate(state, key, job.eval_episodes)["return"]

    state = engine.algorithm_state(state)
    # Another stream than those that training draws from.
    keys = [jax.random.fold_in(jax.random.key(job.seed + i), 2**31 - 1) for i in range(job.num_seeds or 1)]
    if distributed.count() > 1:
        state = distributed.gather(state)
        if state is None:
            return {}
    elif job.num_seeds is None:
        # On one device: on several, each would play the same episodes.
        state = jax.device_put(state, engine.devices[0])
    if job.num_seeds is None:
        value = float(jax.jit(mean_return)(state, keys[0]))
        return {"eval_return": value, "eval_episodes": job.eval_episodes}
    values = np.asarray(jax.jit(jax.vmap(mean_return))(state, jnp.stack(keys)))
    return {"eval_return": values.mean(), "eval_returns": values, "eval_episodes": job.eval_episodes}


def verdict(evaluation: Mapping[str, Any], job: Job) -> str:
    """What `evaluate` gave, as a line to print."""
    value, episodes = evaluation["eval_return"], f"{job.eval_episodes:,} episodes"
    text = f"evaluation return {value:.1f} over {episodes}"
    if "eval_returns" in evaluation:
        values = evaluation["eval_returns"]
        text += f" of each of {len(values)} agents (from {values.min():.1f} to {values.max():.1f})"
    solved = SOLVED.get(job.config["env"])
    if solved is not None:
        text += f" (solved: >= {solved:g})" if value >= solved else f" (not solved: < {solved:g})"
    return text
