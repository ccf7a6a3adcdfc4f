"""Compares training of language models under every placement with plain `iterate`, in float64.

    python -m bench.language_placements                # all algorithms, three iterations, all placements
    python -m bench.language_placements --only grpo --placement hybrid

Each line has the largest difference from plain `iterate` in any leaf of the state, relative to the leaf's
largest value (or to 1), and whether all tokens are equal. With `--float32` the bound is 1e-5, not 1e-12.
`judged` is GRPO with a reward model; `reward_model` trains a reward model with adapters. In `grpo equal` and
`ppo equal` all responses have the same reward, so that rounding alone could change the parameters.
"""

import dataclasses
import functools
import os
import sys
import tempfile
import time

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
import numpy as np

import envs
import fdg
from algos.rlhf.group_relative import GRPO
from algos.rlhf.ppo import PPORLHF
from algos.rlhf.reward_model import RewardModel
from bench.harness import parser
from fdg.keys import to_data
from policies import Colocated, Split, Standalone
from tools.break_it.language import counted


class ConstantRewardTask(envs.text.TextTask):
    """A text task in which every response has the reward 0.1."""

    def reward(self, answer, tokens, mask):
        total = jnp.full(len(tokens), 0.1, jnp.float32)
        return envs.text.Reward(total, {"equal": total})


def with_token_checksum(base):
    """The algorithm class with an additional metric, a checksum of the tokens of an iteration."""

    def _lengths(self, responses):
        rows, width = responses.tokens.shape
        factors = 2 * jnp.arange(rows * width, dtype=jnp.int32).reshape(rows, width) + 1
        total = jnp.sum(jnp.where(responses.mask, responses.tokens, 0) * factors, dtype=jnp.int32)
        return {**base._lengths(self, responses), "token_checksum": total}

    return dataclasses.dataclass(frozen=True)(type(base.__name__, (base,), {"_lengths": _lengths}))


def reward_model_folder(env):
    """The folder of a reward model with random scores."""
    folder = tempfile.mkdtemp()
    algorithm = RewardModel(env=env, **SIZES)
    state = jax.jit(algorithm.init)(jax.random.key(0))
    score = jax.random.normal(jax.random.key(7), state.parameters["score"].shape)
    algorithm.export(state._replace(parameters={**state.parameters, "score": score}), folder)
    return folder


SIZES = {"hidden_size": 16, "num_layers": 1, "num_heads": 4, "learning_rate": 1e-2}
env = counted()
constant_reward_env = ConstantRewardTask(env.problem)
GRPO_ARGUMENTS = {"env": env, "num_prompts": 8, "group_size": 2, **SIZES}
ALGORITHMS = {
    "grpo": lambda: with_token_checksum(GRPO)(**GRPO_ARGUMENTS, kl_coefficient=0.04, num_minibatches=2),
    "lora": lambda: with_token_checksum(GRPO)(**GRPO_ARGUMENTS, kl_coefficient=0.04, lora_rank=2),
    "ppo_rlhf": lambda: with_token_checksum(PPORLHF)(env=env, num_prompts=16, **SIZES),
    "judged": lambda: with_token_checksum(GRPO)(
        **GRPO_ARGUMENTS, kl_coefficient=0.04, num_minibatches=2, reward_model=reward_model_folder(env)
    ),
    "reward_model": lambda: with_token_checksum(RewardModel)(env=env, num_prompts=8, lora_rank=2, **SIZES),
    "grpo equal": lambda: with_token_checksum(GRPO)(
        **{**GRPO_ARGUMENTS, "env": constant_reward_env}, kl_coefficient=0.04, num_minibatches=2
    ),
    "ppo equal": lambda: with_token_checksum(PPORLHF)(env=constant_reward_env, num_prompts=16, **SIZES),
}

PLACEMENTS = {  # policies with numbers of devices
    "colocated": (Colocated(), 8),
    "hybrid": (Colocated(model_parallel=4, generation_parallel=2), 8),
    "fsdp": (Colocated(parameters="fsdp", generation_parallel=1), 8),
    "split": (Split(actors=4, learners=2), 6),
    "split sharded": (Split(actors=4, learners=4, model_parallel=2, generation_parallel=2), 8),
    "standalone": (Standalone(actors=4, learners=2, references=1, critics=1), 8),
    "stale": (Split(actors=4, learners=2, staleness=1), 6),
}


@functools.cache
def algorithm_of(name):
    return ALGORITHMS[name]()


@functools.cache
def run_plain(name, iterations):
    """The state after plain calls of `iterate`, and the token checksum of each."""
    algorithm = algorithm_of(name)
    state, checksums = jax.jit(algorithm.init)(jax.random.key(3)), []
    iterate = jax.jit(algorithm.iterate)
    for _ in range(iterations):
        state, metrics = iterate(state)
        checksums.append(np.asarray(metrics["token_checksum"]))
    return state, checksums


def compare(name, placement, iterations):
    """The largest relative difference of any leaf of the state, and whether all tokens are equal."""
    algorithm = algorithm_of(name)
    policy, count = PLACEMENTS[placement]
    engine = fdg.compile(algorithm, policy, jax.devices()[:count])
    if placement == "stale":  # the reference is the same policy on one device
        reference_engine = fdg.compile(algorithm, policy, jax.devices()[:1])
        state, metrics = reference_engine.run(reference_engine.init(3), iterations)
        state, checksums = (
            reference_engine.algorithm_state(state),
            list(np.asarray(metrics["token_checksum"])),
        )
        result, result_metrics = engine.run(engine.init(3), iterations)
        result = engine.algorithm_state(result)
    else:
        result, result_metrics = engine.run(jax.jit(algorithm.init)(jax.random.key(3)), iterations)
        state, checksums = run_plain(name, iterations)
    largest = 0.0
    for a, b in zip(jax.tree.leaves(result), jax.tree.leaves(state), strict=True):
        a, b = np.asarray(to_data(a)), np.asarray(to_data(b))
        scale = max(1.0, float(np.max(np.abs(b), initial=0)))
        largest = max(largest, float(np.max(np.abs(a.astype(float) - b.astype(float)), initial=0)) / scale)
    return largest, bool(np.array_equal(np.asarray(result_metrics["token_checksum"]), np.asarray(checksums)))


def main() -> int:
    command = parser("bench.language_placements", __doc__)
    command.add_argument("--only", choices=ALGORITHMS, action="append")
    command.add_argument("--placement", choices=PLACEMENTS, action="append")
    command.add_argument("--iterations", type=int, default=3)
    command.add_argument("--float32", action="store_true")
    args = command.parse_args()
    jax.config.update("jax_enable_x64", not args.float32)
    bound, largest_of_all = (1e-5 if args.float32 else 1e-12), 0.0
    for name in args.only or ALGORITHMS:
        for placement in args.placement or PLACEMENTS:
            start = time.perf_counter()
            largest, tokens_equal = compare(name, placement, args.iterations)
            largest_of_all = max(largest_of_all, largest if tokens_equal else float("inf"))
            same = "all tokens equal" if tokens_equal else "TOKENS DIFFER"
            print(
                f"{name:10} {placement:14} {largest:9.1e} {same}  {time.perf_counter() - start:5.0f} s",
                flush=True,
            )
    print(f"largest difference {largest_of_all:.1e}, bound {bound:.0e}")
    return int(largest_of_all > bound)


if __name__ == "__main__":
    sys.exit(main())
