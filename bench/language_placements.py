"""Learning from language under every placement beside plain `iterate`, in float64 and token by token.

    python -m bench.language_placements                # all algorithms, three iterations, all placements
    python -m bench.language_placements --only grpo --placement hybrid

Every line says how far any number of the state is from plain `iterate`, relative to the largest of its leaf,
and whether all tokens were the same. With `--float32` the bound is 1e-5 in place of 1e-12. `judged` is GRPO
with a reward model, `reward_model` one that learns, with adapters. `grpo equal` and
`ppo equal` have the same reward for all responses: they move nowhere, and not by rounding either.
"""

import argparse
import functools
import os
import sys
import time

ALGORITHMS = ("grpo", "ppo_rlhf", "lora", "judged", "reward_model", "grpo equal", "ppo equal")
PLACEMENTS = ("colocated", "hybrid", "fsdp", "split", "split sharded", "standalone", "stale")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.language_placements", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--only", choices=ALGORITHMS, action="append")
    parser.add_argument("--placement", choices=PLACEMENTS, action="append")
    parser.add_argument("--iterations", type=int, default=3)
    parser.add_argument("--float32", action="store_true")
    return parser.parse_args()


def main() -> int:
    given = arguments()
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    import jax

    jax.config.update("jax_enable_x64", not given.float32)
    bound, worst = (1e-5 if given.float32 else 1e-12), 0.0
    for name in given.only or ALGORITHMS:
        for placement in given.placement or PLACEMENTS:
            start = time.perf_counter()
            largest, tokens = compare(name, placement, given.iterations)
            worst = max(worst, largest if tokens else float("inf"))
            same = "all tokens equal" if tokens else "TOKENS DIFFER"
            print(
                f"{name:10} {placement:14} {largest:9.1e} {same}  {time.perf_counter() - start:5.0f} s",
                flush=True,
            )
    print(f"largest difference {worst:.1e}, bound {bound:.0e}")
    return int(worst > bound)


@functools.cache
def made(name):
    """One of `algorithms`."""
    return algorithms()[name]()


def algorithms():
    """Small ones, which say a checksum of all tokens among their metrics.

    Rewards differ from response to response, and are no sums of halves; those of `equal` are all the same.
    """
    import dataclasses

    import jax.numpy as jnp

    import envs
    from algos.rlhf.group_relative import GRPO
    from algos.rlhf.ppo import PPORLHF
    from algos.rlhf.reward_model import RewardModel

    class Counted(envs.text.TextTask):
        def reward(self, answer, tokens, mask):
            total = (jnp.sum(jnp.where(mask, tokens % 5, 0), axis=1) / 7.0).astype(jnp.float32)
            return envs.text.Reward(total, {"counted": total})

    class Equal(envs.text.TextTask):
        def reward(self, answer, tokens, mask):
            total = jnp.full(len(tokens), 0.1, jnp.float32)
            return envs.text.Reward(total, {"equal": total})

    def checked(base):
        def _lengths(self, responses):
            rows, width = responses.tokens.shape
            factors = 2 * jnp.arange(rows * width, dtype=jnp.int32).reshape(rows, width) + 1
            total = jnp.sum(jnp.where(responses.mask, responses.tokens, 0) * factors, dtype=jnp.int32)
            return {**base._lengths(self, responses), "token_checksum": total}

        return dataclasses.dataclass(frozen=True)(type(base.__name__, (base,), {"_lengths": _lengths}))

    sizes = {"hidden_size": 16, "num_layers": 1, "num_heads": 4, "learning_rate": 1e-2}
    problem = envs.make("text:addition", digits=1).problem
    env, equal = Counted(problem), Equal(problem)
    group = {"env": env, "num_prompts": 8, "group_size": 2, **sizes}
    return {
        "grpo": lambda: checked(GRPO)(**group, kl_coefficient=0.04, num_minibatches=2),
        "lora": lambda: checked(GRPO)(**group, kl_coefficient=0.04, lora_rank=2),
        "ppo_rlhf": lambda: checked(PPORLHF)(env=env, num_prompts=16, **sizes),
        "judged": lambda: checked(GRPO)(
            **group, kl_coefficient=0.04, num_minibatches=2, reward_model=judge(env, sizes)
        ),
        "reward_model": lambda: checked(RewardModel)(env=env, num_prompts=8, lora_rank=2, **sizes),
        "grpo equal": lambda: checked(GRPO)(
            **{**group, "env": equal}, kl_coefficient=0.04, num_minibatches=2
        ),
        "ppo equal": lambda: checked(PPORLHF)(env=equal, num_prompts=16, **sizes),
    }


def judge(env, sizes):
    """The folder of a reward model with an opinion."""
    import tempfile

    import jax

    from algos.rlhf.reward_model import RewardModel

    folder = tempfile.mkdtemp()
    algorithm = RewardModel(env=env, **sizes)
    state = jax.jit(algorithm.init)(jax.random.key(0))
    opinion = jax.random.normal(jax.random.key(7), state.parameters["score"].shape)
    algorithm.export(state._replace(parameters={**state.parameters, "score": opinion}), folder)
    return folder


@functools.cache
def plain(name, iterations):
    """State and checksums of plain calls of `iterate`."""
    import jax
    import numpy as np

    algorithm = made(name)
    state, sums = jax.jit(algorithm.init)(jax.random.key(3)), []
    iterate = jax.jit(algorithm.iterate)
    for _ in range(iterations):
        state, metrics = iterate(state)
        sums.append(np.asarray(metrics["token_checksum"]))
    return state, sums


def policy_of(placement):
    """The policy of a placement, and its devices."""
    from policies import Colocated, Split, Standalone

    return {
        "colocated": (Colocated(), 8),
        "hybrid": (Colocated(model_parallel=4, generation_parallel=2), 8),
        "fsdp": (Colocated(parameters="fsdp", generation_parallel=1), 8),
        "split": (Split(actors=4, learners=2), 6),
        "split sharded": (Split(actors=4, learners=4, model_parallel=2, generation_parallel=2), 8),
        "standalone": (Standalone(actors=4, learners=2, references=1, critics=1), 8),
        "stale": (Split(actors=4, learners=2, staleness=1), 6),
    }[placement]


def compare(name, placement, iterations):
    """Largest relative difference of any leaf of the state, and whether all tokens are equal."""
    import jax
    import numpy as np

    import fdg
    from fdg.keys import words

    algorithm = made(name)
    policy, count = policy_of(placement)
    engine = fdg.compile(algorithm, policy, jax.devices()[:count])
    if placement == "stale":  # beside the same on one device
        other = fdg.compile(algorithm, policy, jax.devices()[:1])
        state, metrics = other.run(other.init(3), iterations)
        state, sums = other.algorithm_state(state), list(np.asarray(metrics["token_checksum"]))
        found, measured = engine.run(engine.init(3), iterations)
        found = engine.algorithm_state(found)
    else:
        found, measured = engine.run(jax.jit(algorithm.init)(jax.random.key(3)), iterations)
        state, sums = plain(name, iterations)
    largest = 0.0
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(state), strict=True):
        a, b = np.asarray(words(a)), np.asarray(words(b))
        scale = max(1.0, float(np.max(np.abs(b), initial=0)))
        largest = max(largest, float(np.max(np.abs(a.astype(float) - b.astype(float)), initial=0)) / scale)
    return largest, bool(np.array_equal(np.asarray(measured["token_checksum"]), np.asarray(sums)))


if __name__ == "__main__":
    sys.exit(main())
