import jax
import jax.numpy as jnp
import numpy as np
import pytest

from algos.buffers import n_step_returns, n_step_sums
from algos.returns import (
    discounted_returns,
    generalized_advantage_estimation,
    lambda_returns,
    v_trace,
)

# One environment, six steps, discount 1/2, lambda 1/2: all results are exact binary fractions.
# Step 1 terminates; step 3 is truncated.
REWARD = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
VALUE = [2.0, 4.0, 2.0, 8.0, 4.0, 2.0]
NEXT_VALUE = [4.0, 6.0, 8.0, 10.0, 2.0, 12.0]
TERMINATED = [False, True, False, False, False, False]
TRUNCATED = [False, False, False, True, False, False]


def column(values: list) -> jax.Array:
    return jnp.asarray(values)[:, None]


def example() -> tuple[jax.Array, ...]:
    return tuple(column(x) for x in (REWARD, VALUE, NEXT_VALUE, TERMINATED, TRUNCATED))


def random_trajectory(steps: int, batch: int, seed: int) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(seed)
    reward, value, next_value = rng.normal(size=(3, steps, batch)).astype(np.float32)
    terminated, truncated = rng.random(size=(2, steps, batch)) < 0.2
    return reward, value, next_value, terminated, truncated


def test_gae_by_hand():
    advantage, target = generalized_advantage_estimation(*example(), discount=0.5, lambda_=0.5)
    # delta = reward + next_value / 2 (0 if terminated) - value:
    #   0: 1 + 2 - 2 = 1      1: 2 + 0 - 4 = -2 (terminated)
    #   2: 3 + 4 - 2 = 5      3: 4 + 5 - 8 = 1  (truncated: its next value counts)
    #   4: 5 + 1 - 4 = 2      5: 6 + 6 - 2 = 10
    # advantage = delta + (1/2)(1/2) (next advantage), 0 after steps 1, 3 and 5:
    #   5: 10    4: 2 + 10/4 = 4.5    3: 1    2: 5 + 1/4 = 5.25    1: -2    0: 1 - 2/4 = 0.5
    assert advantage[:, 0].tolist() == [0.5, -2.0, 5.25, 1.0, 4.5, 10.0]
    assert target[:, 0].tolist() == [2.5, 2.0, 7.25, 9.0, 8.5, 12.0]


def test_discounted_returns_by_hand():
    reward, _, next_value, terminated, truncated = example()
    result = discounted_returns(reward, jnp.array([12.0]), terminated, truncated, next_value, discount=0.5)
    # 5: 6 + 12/2 = 12    4: 5 + 12/2 = 11    3: 4 + 10/2 = 9 (truncated)    2: 3 + 9/2 = 7.5
    # 1: 2 (terminated)   0: 1 + 2/2 = 2
    assert result[:, 0].tolist() == [2.0, 2.0, 7.5, 9.0, 11.0, 12.0]


def consistent_trajectory() -> tuple[jax.Array, ...]:
    """Random, with `next_value[t] = value[t + 1]` within episodes."""
    reward, value, next_value, terminated, truncated = map(jnp.asarray, random_trajectory(32, 4, seed=0))
    inside = ~(terminated | truncated)[:-1]
    next_value = next_value.at[:-1].set(jnp.where(inside, value[1:], next_value[:-1]))
    return reward, value, next_value, terminated, truncated


def test_float_flags():
    reward, value, next_value, terminated, truncated = example()
    values = (terminated.astype(jnp.float32), truncated.astype(jnp.float32))
    for a, b in zip(
        generalized_advantage_estimation(reward, value, next_value, *values, 0.5, 0.5),
        generalized_advantage_estimation(*example(), 0.5, 0.5),
        strict=True,
    ):
        np.testing.assert_array_equal(a, b)


def test_gradient_and_vmap_over_lambda():
    reward, value, next_value, terminated, truncated = example()

    def total(value, lambda_):
        return jnp.sum(
            generalized_advantage_estimation(reward, value, next_value, terminated, truncated, 0.5, lambda_)[
                0
            ]
        )

    # d total / d value[t] = -(1 + 1/4 for each earlier step of the episode that depends on step t's error).
    gradient = jax.jit(jax.grad(total))(value, 0.5)
    assert gradient[:, 0].tolist() == [-1.0, -1.25, -1.0, -1.25, -1.0, -1.25]
    totals = jax.vmap(total, in_axes=(None, 0))(value, jnp.array([0.0, 0.5]))
    assert totals.tolist() == [17.0, 19.25]  # 1 - 2 + 5 + 1 + 2 + 10, and 0.5 - 2 + 5.25 + 1 + 4.5 + 10


# --- lambda-returns ---


def test_lambda_returns_by_hand():
    reward, _, next_value, terminated, truncated = example()
    result = lambda_returns(reward, next_value, terminated, truncated, discount=0.5, lambda_=0.5)
    # reward + (1/2) (next_value / 2 + return of the next step / 2):
    #   5: 6 + 12/2 = 12 (the last row)        4: 5 + (2/2 + 12/2)/2 = 8.5
    #   3: 4 + 10/2 = 9 (truncated)            2: 3 + (8/2 + 9/2)/2 = 7.25
    #   1: 2 (terminated)                      0: 1 + (4/2 + 2/2)/2 = 2.5
    assert result[:, 0].tolist() == [2.5, 2.0, 7.25, 9.0, 8.5, 12.0]


@pytest.mark.parametrize("lambda_", [0.0, 0.6, 1.0])
def test_lambda_returns_match_gae_targets(lambda_):
    reward, value, *rest = consistent_trajectory()
    _, target = generalized_advantage_estimation(reward, value, *rest, 0.97, lambda_)
    np.testing.assert_allclose(lambda_returns(reward, *rest, 0.97, lambda_), target, rtol=1e-5, atol=1e-5)


# --- n-step returns ---

# As above, but step 5 terminates and step 3 is truncated.
LONG = (column(REWARD), column(NEXT_VALUE), column([False] * 5 + [True]), column(TRUNCATED))


def test_two_step_returns_by_hand():
    # 0: 1 + 2/2 + 6/4 = 3.5                 1: 2 + 3/2 + 8/4 = 5.5
    # 2: 3 + 4/2 + 10/4 = 7.5 (its second step is truncated and bootstrapped)
    # 3: 4 + 10/2 = 9 (truncated: one step)  4: 5 + 6/2 = 8 (its second step terminates: no bootstrap)
    # 5: 6 (terminated)
    assert n_step_returns(*LONG, discount=0.5, n=2)[:, 0].tolist() == [3.5, 5.5, 7.5, 9.0, 8.0, 6.0]


def test_two_step_sums():
    reward, _, terminated, truncated = LONG
    sums = n_step_sums(reward, terminated, truncated, discount=0.5, n=2)
    assert sums.reward[:, 0].tolist() == [2.0, 3.5, 5.0, 4.0, 8.0, 6.0]
    assert sums.weight[:, 0].tolist() == [0.25, 0.25, 0.25, 0.5, 0.0, 0.0]
    assert sums.last[:, 0].tolist() == [1, 2, 3, 3, 5, 5]


def test_windows_end_with_last_row():
    reward, next_value, _, truncated = LONG
    no_ends = jnp.zeros_like(truncated)
    # 3: 4 + 5/2 + 6/4 + 12/8 = 9.5    4: 5 + 6/2 + 12/4 = 11    5: 6 + 12/2 = 12
    assert n_step_returns(reward, next_value, no_ends, no_ends, 0.5, n=3)[3:, 0].tolist() == [9.5, 11.0, 12.0]


# --- V-trace ---

RATIO = [2.0, 0.5, 0.25, 4.0, 0.5, 1.0]


def test_v_trace_by_hand():
    advantage, target = v_trace(column(RATIO), *example(), discount=0.5, rho_clip=1.0, c_clip=0.5)
    # delta, as for GAE above:          1,  -2,    5,   1,  2, 10
    # rho = min(1, ratio):              1,  1/2,  1/4,  1, 1/2, 1
    # c = min(1/2, ratio):             1/2, 1/2,  1/4, 1/2, 1/2, 1/2
    # target - value = rho delta + (1/2) c (the same of the next step), 0 after steps 1, 3 and 5:
    #   5: 10    4: 1 + 10/4 = 3.5    3: 1    2: 5/4 + 1/8 = 1.375    1: -1    0: 1 - 1/4 = 0.75
    assert target[:, 0].tolist() == [2.75, 3.0, 3.375, 9.0, 7.5, 12.0]
    # advantage = rho (reward + next / 2 - value); `next` is the target of the next step:
    #   5: 6 + 12/2 - 2 = 10 (the last row: its next value)    4: (1/2)(5 + 12/2 - 4) = 3.5
    #   3: 4 + 10/2 - 8 = 1 (truncated: its next value)        2: (1/4)(3 + 9/2 - 2) = 1.375
    #   1: (1/2)(2 - 4) = -1 (terminated: 0)                   0: 1 + 3/2 - 2 = 0.5
    assert advantage[:, 0].tolist() == [0.5, -1.0, 1.375, 1.0, 3.5, 10.0]


@pytest.mark.parametrize("lambda_", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("clip", [1.0, 2.0])
def test_on_policy_v_trace_matches_gae(lambda_, clip):
    trajectory = consistent_trajectory()
    ours = v_trace(jnp.ones((32, 4)), *trajectory, 0.97, lambda_, rho_clip=clip, c_clip=clip)
    for a, b in zip(ours, generalized_advantage_estimation(*trajectory, 0.97, lambda_), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_v_trace_values_target_policy():
    """One step, reward = action; actions 0 and 1 were equally likely, the target policy has P(1) = 1/4.

    Its value is 1/4: there the mean target equals the value. Without ratios this happens at 1/2.
    """
    action = column([0.0, 1.0])
    ends, no_ends = jnp.ones_like(action, bool), jnp.zeros_like(action, bool)

    def mean_target(value, ratio):
        value = jnp.full_like(action, value)
        return float(jnp.mean(v_trace(ratio, action, value, value, ends, no_ends, 0.9, rho_clip=2.0)[1]))

    ratio = column([0.75, 0.25]) / 0.5
    # 1/4 + (3/2)(0 - 1/4) = -1/8, and 1/4 + (1/2)(1 - 1/4) = 5/8
    assert mean_target(0.25, ratio) == 0.25
    assert mean_target(0.5, ratio) == 0.25
    assert mean_target(0.25, jnp.ones_like(ratio)) == mean_target(0.5, jnp.ones_like(ratio)) == 0.5
