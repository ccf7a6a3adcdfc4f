"""Runs of a second, for tests of what is done with runs."""

import contextlib
import io

import algos
import envs
import fdg

CARTPOLE = {"num_envs": 4, "num_steps": 8, "hidden": (8,), "num_minibatches": 2, "num_epochs": 1}


def small(name="ppo", env="CartPole-v1", **fields):
    """A tiny algorithm."""
    sizes = CARTPOLE if name in ("ppo", "recurrent_ppo", "ippo", "mappo") else {"num_envs": 4, "num_steps": 8}
    return algos.get(name)(env=envs.make(env), **{**sizes, **fields})


def fitted(out, algorithm=None, iterations=4, **settings):
    """A run of a few iterations, quietly, evaluated only if asked; what was printed is its `said`."""
    algorithm = small() if algorithm is None else algorithm
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        run = fdg.fit(
            algorithm,
            **{
                "devices": 1,
                "eval_episodes": 0,
                "out": out,
                "total_steps": iterations * algorithm.steps_per_iteration,
                **settings,
            },
        )
    run.said = said.getvalue()
    return run
