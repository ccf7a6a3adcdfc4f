"""What V-trace corrects: IMPALA with it and without, as its actors' parameters grow older.

CartPole-v1, five seeds, one device, and two step sizes: the further the learner goes in one update, the less
its policy is that of its actors.

    python -m bench.v_trace
"""

import jax
import numpy as np

import algos
import envs
import fdg
import policies
from bench.harness import table

SEEDS, STALENESS, STEP_SIZES, EPISODES = 5, (0, 16, 64), (1e-3, 3e-3), 128


class Uncorrected(algos.IMPALA):
    """As if the actors' policy were the learner's own: all ratios are one."""

    def _loss(self, parameters, trajectory):
        policy, _ = self._policy_over_time(parameters, trajectory.observation)
        own = jax.lax.stop_gradient(policy.log_prob(trajectory.action))
        return super()._loss(parameters, trajectory._replace(log_prob=own))


def returns(kind: type, staleness: int, **fields) -> np.ndarray:
    """Evaluation return of each seed after training."""
    algorithm = kind(env=envs.make("CartPole-v1"), **fields)
    policy = policies.SingleLearnerCoarse(staleness=staleness)
    engine = fdg.compile(algorithm, policy, jax.devices()[:1], num_seeds=SEEDS)
    state, _ = engine.run(engine.init(0), algorithm.num_iterations)
    keys = jax.random.split(jax.random.key(0), SEEDS)
    evaluate = jax.jit(jax.vmap(lambda state, key: algorithm.evaluate(state, key, EPISODES)["return"]))
    return np.asarray(evaluate(engine.algorithm_state(state), keys))


def main() -> None:
    """Prints a row for each step size and staleness."""
    print(table(("step size", "staleness", "V-trace: mean (lowest)", "without: mean (lowest)"), ()))
    for step_size in STEP_SIZES:
        for staleness in STALENESS:
            both = [returns(kind, staleness, learning_rate=step_size) for kind in (algos.IMPALA, Uncorrected)]
            cells = [f"{r.mean():.1f} ({r.min():.1f})" for r in both]
            print(f"| {step_size:g} | {staleness} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
