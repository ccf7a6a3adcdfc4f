"""Training runs of about a second, and helpers that read and compare runs."""

import contextlib
import io
import json

import jax
import numpy as np

import algos
import envs
import fdg

CARTPOLE = {"num_envs": 4, "num_steps": 8, "hidden": (8,), "num_minibatches": 2, "num_epochs": 1}


def small(name="ppo", env="CartPole-v1", **fields):
    """An algorithm with small networks and few environments."""
    sizes = CARTPOLE if name in ("ppo", "recurrent_ppo", "ippo", "mappo") else {"num_envs": 4, "num_steps": 8}
    return algos.get(name)(env=envs.make(env), **{**sizes, **fields})


def fitted(out, algorithm=None, iterations=4, **settings):
    """Trains a few iterations, without evaluation by default; `printed` is the captured output."""
    algorithm = small() if algorithm is None else algorithm
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
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
    run.printed = output.getvalue()
    return run


def strict_json(text):
    """Parses JSON; NaN and infinities are errors."""

    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


def rows(run):
    """The metrics in a run directory."""
    return [strict_json(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def untimed_rows(run):
    """`rows` without `wall_s`, which differs between runs of the same job."""
    return [{name: value for name, value in row.items() if name != "wall_s"} for row in rows(run)]


def to_numpy(state):
    """The leaves as NumPy arrays, with the data of random keys."""
    leaves = jax.tree.leaves(state)
    is_key = [jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) for leaf in leaves]
    return [
        np.asarray(jax.random.key_data(leaf) if key else leaf)
        for leaf, key in zip(leaves, is_key, strict=True)
    ]


def assert_same(a, b):
    """Asserts equal structures, dtypes, shapes and bits."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(to_numpy(a), to_numpy(b), strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes()
