"""Drives rejax's PPO, DQN, SAC and PQN (github.com/keraJLi/rejax).

Configuration: `{"algo": "PPO", "config": {...}}`; `config` has settings of rejax. Training has no
evaluations; each round ends with an evaluation that is not timed.
"""

from typing import Any

import jax
import rejax
import rejax.algos.algorithm

from bench.peers.drivers import old_gymnax
from bench.peers.serve import Stopwatch


def prepare(config: dict[str, Any]):
    """Compiles the whole training; returns what `bench.peers.serve` needs."""
    rejax.algos.algorithm.create = old_gymnax.make
    settings = config["config"]
    with_evaluation = getattr(rejax, config["algo"]).create(
        **settings, eval_freq=settings["total_timesteps"], skip_initial_evaluation=True
    )
    evaluate = jax.jit(with_evaluation.eval_callback)
    algo = with_evaluation.replace(eval_callback=lambda *_: ())
    with Stopwatch() as watch:
        train = jax.jit(algo.train).lower(jax.random.PRNGKey(0)).compile()

    def one_round(seed: int) -> dict[str, Any]:
        with Stopwatch() as watch:
            state, _ = jax.block_until_ready(train(jax.random.PRNGKey(seed)))
        _, returns = evaluate(with_evaluation, state, jax.random.PRNGKey(seed))
        return {
            "steps": settings["total_timesteps"],
            "seconds": watch.seconds,
            "return": float(returns.mean()),
        }

    return one_round, {"compile_seconds": watch.seconds}
