"""Prints the exchanges in plans of all presets on four devices; all versions of JAX should give the same.

python -m bench.exchanges > one.txt        # then with another JAX: diff one.txt other.txt
"""

import os
import sys

# Each algorithm with an environment of each family for which it has a preset, or in which its defaults run.
JOBS = {
    "ppo": """CartPole-v1 Acrobot-v1 Pendulum-v1 MountainCar-v0 MountainCarContinuous-v0 Breakout-MinAtar
        SpaceInvaders-MinAtar Catch-bsuite brax:reacher Craftax-Symbolic-v1 octax:brix jumanji:Snake-v1""",
    "recurrent_ppo": "CartPole-v1",
    "ippo": "MPE_simple_spread_v3 switch_riddle",
    "mappo": "MPE_simple_spread_v3 switch_riddle",
    "a2c": "CartPole-v1 Pendulum-v1 Breakout-MinAtar",
    "a3c": "CartPole-v1 Pendulum-v1 Breakout-MinAtar",
    "impala": "CartPole-v1 Pendulum-v1 Breakout-MinAtar",
    "dqn": "CartPole-v1 MountainCar-v0 Breakout-MinAtar",
    "pqn": "CartPole-v1 Acrobot-v1 Breakout-MinAtar SpaceInvaders-MinAtar",
    "sac": "Pendulum-v1 brax:reacher",
    "td3": "Pendulum-v1 brax:reacher",
    "qr_dqn": "CartPole-v1 MountainCar-v0 Breakout-MinAtar",
    "c51": "CartPole-v1 MountainCar-v0 Breakout-MinAtar",
    "crossq": "Pendulum-v1 brax:reacher",
    "fast_td3": "Pendulum-v1 brax:reacher",
    "redq": "Pendulum-v1 brax:reacher",
    "droq": "Pendulum-v1 brax:reacher",
    "tqc": "Pendulum-v1 brax:reacher",
    "vdn": "MPE_simple_spread_v3",
    "qmix": "MPE_simple_spread_v3",
    "sft": "text:sorting",
    "dpo": "text:sorting",
    "ppo_rlhf": "text:sorting text:addition",
    "grpo": "text:sorting text:addition text:countdown",
    "reward_model": "text:sorting",
}
POLICIES = "gpu_only", "single_learner_coarse", "central"
DEVICES = 4


def graph_of(algorithm, environment):
    """The graph of an algorithm with its preset for an environment."""
    import algos
    import envs
    import fdg

    cls, env = algos.get(algorithm), envs.make(environment)
    return fdg.trace(cls(env=env, **cls.settings(env.name, env, {})))


def exchange_lines(graph, policy):
    """Sorted lines, one for each movement between devices in a plan under a policy."""
    import fdg
    import policies

    plan = fdg.place(graph, policies.get(policy)(), DEVICES)
    return sorted(
        f"{move.how} {move.source} -> {move.target} ({move.where}):"
        f" {move.crossings_per_iteration} times {move.bytes_per_crossing} bytes"
        for move in plan.movements
        if move.how
    )


def main() -> None:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    import jax

    import fdg

    print("JAX", jax.__version__, file=sys.stderr)
    for algorithm, environments in JOBS.items():
        for environment in environments.split():
            graph = graph_of(algorithm, environment)
            for policy in POLICIES:
                try:
                    printed = exchange_lines(graph, policy)
                except fdg.PlanError as error:
                    printed = [str(error)]
                for line in printed or ["nothing"]:
                    print(algorithm, environment, policy, line, flush=True)


if __name__ == "__main__":
    main()
