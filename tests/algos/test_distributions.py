import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy  # imports `stats` when it is asked for

from algos.distributions import (
    Categorical,
    MultiCategorical,
    Normal,
    TanhNormal,
    allowed_only,
    for_space,
    masked,
    stretched,
)
from envs.spaces import Box, Discrete, MultiDiscrete
from fdg.errors import FdgError

BATCH = 5
NVEC = (2, 5, 3)


def random(*shape: int, seed: int = 0) -> jax.Array:
    return 2.0 * jax.random.normal(jax.random.key(seed), shape)


# Each distribution once, over a batch of BATCH; the shape and dtype of one action.
TABLE = {
    "categorical": (Categorical(random(BATCH, 4)), (), jnp.int32),
    "categorical, one": (Categorical(random(BATCH, 1)), (), jnp.int32),
    "categorical, many": (Categorical(random(BATCH, 100)), (), jnp.int32),
    "multi-categorical": (MultiCategorical(random(BATCH, sum(NVEC)), NVEC), (3,), jnp.int32),
    "normal": (Normal(random(BATCH, 3), random(BATCH, 3, seed=1)), (3,), jnp.float32),
    "normal, scalar": (Normal(random(BATCH, 1), random(BATCH, 1, seed=1), ()), (), jnp.float32),
    "normal, matrix": (Normal(random(BATCH, 6), random(BATCH, 6, seed=1), (2, 3)), (2, 3), jnp.float32),
    "tanh-normal": (TanhNormal(random(BATCH, 6), random(BATCH, 6, seed=1), (2, 3)), (2, 3), jnp.float32),
}
SQUASHED = TABLE["tanh-normal"][0]
every_distribution = pytest.mark.parametrize("distribution, shape, dtype", TABLE.values(), ids=TABLE)


@every_distribution
def test_shapes_and_dtypes(distribution, shape, dtype):
    sampled = distribution.sample(jax.random.key(0))
    for action in (sampled, distribution.mode()):
        assert action.shape == (BATCH, *shape) and action.dtype == dtype
    numbers = [distribution.log_prob(sampled)]
    if distribution is not SQUASHED:  # whose entropy has no closed form
        numbers.append(distribution.entropy())
    for number in numbers:
        assert number.shape == (BATCH,) and number.dtype == jnp.float32


@every_distribution
def test_a_key_per_element_gives_a_part_the_numbers_of_the_whole(distribution, shape, dtype):
    keys = jax.random.split(jax.random.key(3), BATCH)
    whole = distribution.sample(keys)
    for part in (slice(0, 2), slice(2, 5), slice(4, 5)):
        of_part = jax.tree.map(lambda x, part=part: x[part], distribution)
        np.testing.assert_array_equal(of_part.sample(keys[part]), whole[part])


@every_distribution
def test_a_key_per_element_gives_the_numbers_of_each_element_alone(distribution, shape, dtype):
    keys = jax.random.split(jax.random.key(3), BATCH)
    one_by_one = jax.vmap(lambda element, key: element.sample(key))(distribution, keys)
    np.testing.assert_array_equal(distribution.sample(keys), one_by_one)


@every_distribution
def test_it_passes_through_jit_and_scan(distribution, shape, dtype):
    keys = jax.random.split(jax.random.key(3), BATCH)
    jitted = jax.jit(lambda distribution, keys: (distribution, distribution.sample(keys)))
    returned, action = jitted(distribution, keys)
    assert jax.tree.structure(returned) == jax.tree.structure(distribution)
    np.testing.assert_allclose(action, distribution.sample(keys), rtol=1e-5)
    _, rows = jax.lax.scan(lambda carry, element: (carry, element.mode()), 0, distribution)
    np.testing.assert_allclose(rows, distribution.mode(), rtol=1e-6)


@pytest.mark.parametrize(
    "distribution, shape, dtype",
    [row for row in TABLE.values() if row[0] is not SQUASHED],
    ids=[name for name in TABLE if name != "tanh-normal"],
)
def test_the_mode_is_the_most_probable(distribution, shape, dtype):
    most = distribution.log_prob(distribution.mode())
    for seed in range(20):
        assert bool(jnp.all(distribution.log_prob(distribution.sample(jax.random.key(seed))) <= most + 1e-6))


@every_distribution
def test_keys_that_do_not_fit_the_batch_are_refused(distribution, shape, dtype):
    with pytest.raises(FdgError, match=r"give one key, or one key .* per element"):
        distribution.sample(jax.random.split(jax.random.key(0), BATCH + 1))


@pytest.mark.parametrize("count", [1, 2, 7, 100])
def test_categorical_agrees_with_scipy(count):
    logits = random(BATCH, count)
    distribution = Categorical(logits)
    for row in range(BATCH):
        exact = np.exp(np.asarray(logits[row], np.float64))
        reference = scipy.stats.rv_discrete(values=(np.arange(count), exact / exact.sum()))
        np.testing.assert_allclose(distribution.entropy()[row], reference.entropy(), rtol=1e-5, atol=1e-6)
        for action in range(count):
            log_prob = distribution.log_prob(jnp.full(BATCH, action))[row]
            np.testing.assert_allclose(log_prob, reference.logpmf(action), rtol=1e-5, atol=1e-5)


def test_multi_categorical_is_its_choices_one_by_one():
    logits = random(BATCH, sum(NVEC))
    distribution = MultiCategorical(logits, NVEC)
    action = distribution.sample(jax.random.key(0))
    parts = [Categorical(x) for x in jnp.split(logits, np.cumsum(NVEC)[:-1], axis=-1)]
    log_prob = sum(part.log_prob(action[:, m]) for m, part in enumerate(parts))
    entropy = sum(part.entropy() for part in parts)
    np.testing.assert_allclose(distribution.log_prob(action), log_prob, rtol=1e-5)
    np.testing.assert_allclose(distribution.entropy(), entropy, rtol=1e-5)
    np.testing.assert_array_equal(distribution.mode(), jnp.stack([part.mode() for part in parts], axis=-1))


def test_normal_agrees_with_scipy():
    mean, log_std = random(BATCH, 3), random(BATCH, 3, seed=1)
    distribution = Normal(mean, log_std)
    action = distribution.sample(jax.random.key(0))
    for row in range(BATCH):
        covariance = np.diag(np.exp(2.0 * np.asarray(log_std[row], np.float64)))
        reference = scipy.stats.multivariate_normal(np.asarray(mean[row]), covariance)
        np.testing.assert_allclose(
            distribution.log_prob(action)[row], reference.logpdf(action[row]), rtol=1e-4
        )
        np.testing.assert_allclose(distribution.entropy()[row], reference.entropy(), rtol=1e-5)


def test_the_order_of_a_matrix_of_actions_is_that_of_its_parameters():
    mean, log_std = random(BATCH, 6), random(BATCH, 6, seed=1)
    flat, matrix = Normal(mean, log_std), Normal(mean, log_std, (2, 3))
    key = jax.random.key(0)
    np.testing.assert_array_equal(matrix.sample(key).reshape(BATCH, 6), flat.sample(key))
    np.testing.assert_array_equal(matrix.log_prob(matrix.sample(key)), flat.log_prob(flat.sample(key)))


@pytest.mark.parametrize("mean, std", [(0.0, 1.0), (1.5, 0.3), (-3.0, 2.0), (6.0, 0.5)])
def test_the_density_of_a_squashed_normal_is_the_slope_of_its_distribution_function(mean, std):
    """P(action <= a) = P(normal <= arctanh(a)), differentiated by a, in float64."""
    distribution = TanhNormal(jnp.array([[mean]]), jnp.log(jnp.array([[std]])))

    def up_to(action):
        return scipy.stats.norm.cdf(np.arctanh(action), mean, std)

    for action in (-0.96, -0.4, 0.0, 0.7, 0.96, 0.996):
        width = 1e-4 * (1.0 - abs(action))
        slope = (up_to(action + width) - up_to(action - width)) / (2.0 * width)
        density = float(jnp.exp(distribution.log_prob(jnp.array([[action]])))[0])
        assert density == pytest.approx(slope, rel=2e-3, abs=1e-6)


def test_the_density_of_a_squashed_normal_integrates_to_one():
    count = 400
    middle = 2.0 * (np.arange(count) + 0.5) / count - 1.0
    grid = jnp.asarray(np.stack(np.meshgrid(middle, middle), axis=-1).reshape(-1, 2), jnp.float32)
    one = TanhNormal(jnp.array([[0.3, -0.5]]), jnp.array([[-0.2, -1.0]]))
    every = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, grid.shape), one)
    total = float(jnp.sum(jnp.exp(every.log_prob(grid)))) * (2.0 / count) ** 2
    assert total == pytest.approx(1.0, rel=1e-3)


def test_the_log_density_of_a_sample_is_that_of_its_action():
    """Narrow ones: rounded near its bounds, an action no longer tells what the tanh was given."""
    distribution = TanhNormal(0.25 * random(BATCH, 6), 0.25 * random(BATCH, 6, seed=1) - 1.0, (2, 3))
    keys = jax.random.split(jax.random.key(3), BATCH)
    action, log_prob = distribution.sample_with_log_prob(keys)
    assert jnp.max(jnp.abs(action)) < 0.99
    np.testing.assert_array_equal(action, distribution.sample(keys))
    np.testing.assert_allclose(log_prob, distribution.log_prob(action), rtol=1e-3)


@pytest.mark.parametrize("mean", [-1e4, -30.0, 30.0, 1e4])
def test_a_squashed_normal_far_out_has_finite_log_densities_and_gradients(mean):
    """tanh is 1 to the last bit; log(1 - tanh(u)^2) still falls as 2 (log 2 - |u|)."""

    def log_prob(mean):
        return TanhNormal(mean[None, None], jnp.zeros((1, 1))).sample_with_log_prob(jax.random.key(0))[1][0]

    noise = float(jax.random.normal(jax.random.key(0), (1, 1))[0, 0])
    value, gradient = jax.value_and_grad(log_prob)(jnp.float32(mean))
    expected = -0.5 * noise**2 - 0.5 * math.log(2.0 * math.pi) - 2.0 * math.log(2.0) + 2.0 * abs(mean + noise)
    assert float(value) == pytest.approx(expected, rel=1e-3)  # of 1e4 + noise, float32 keeps three decimals
    assert float(gradient) == pytest.approx(2.0 * np.sign(mean))
    on_the_bound = TanhNormal(jnp.full((1, 1), mean), jnp.zeros((1, 1))).log_prob(jnp.ones((1, 1)))
    assert bool(jnp.all(jnp.isfinite(on_the_bound)))


def test_stretched_actions_reach_the_bounds_of_each_component_and_no_further():
    low, high = (-1.3, 0.1, -0.7), (0.9, 0.2, 1e3)
    space = Box(low, high, (3,))
    ends = stretched(jnp.array([[-1.0] * 3, [0.0] * 3, [1.0] * 3]), space)
    np.testing.assert_allclose(ends[0], low, rtol=1e-6)
    np.testing.assert_allclose(ends[1], (np.array(low) + np.array(high)) / 2.0, rtol=1e-5)
    np.testing.assert_allclose(ends[2], high, rtol=1e-6)
    assert all(bool(space.contains(action)) for action in ends)
    largest = float(np.finfo(np.float32).max)
    assert bool(jnp.all(jnp.isfinite(stretched(ends / 1e3, Box(-largest, largest, (3,))))))


DRAWS = 20_000


def chi_square_is_plausible(actions: np.ndarray, probability: np.ndarray) -> bool:
    """Pearson's test at a level of one in a million; the seed is fixed, so a pass stays a pass."""
    observed = np.bincount(actions, minlength=len(probability))
    return scipy.stats.chisquare(observed, probability * len(actions)).pvalue > 1e-6


@pytest.mark.parametrize("count", [2, 6, 18, 100])
@pytest.mark.parametrize("per_element", [False, True], ids=["one key", "a key per element"])
def test_categorical_samples_have_the_right_frequencies(count, per_element):
    logits = 0.5 * random(count)
    keys = jax.random.split(jax.random.key(7), DRAWS) if per_element else jax.random.key(7)
    actions = Categorical(jnp.broadcast_to(logits, (DRAWS, count))).sample(keys)
    probability = np.exp(np.asarray(logits, np.float64))
    probability /= probability.sum()
    assert chi_square_is_plausible(np.asarray(actions), probability)
    # The check itself can fail: for the reversed probabilities it does.
    assert not chi_square_is_plausible(np.asarray(actions), probability[::-1])


def test_multi_categorical_samples_have_the_right_frequencies_and_are_independent():
    logits = 0.5 * random(5)
    distribution = MultiCategorical(jnp.broadcast_to(logits, (DRAWS, 5)), (2, 3))
    actions = np.asarray(distribution.sample(jax.random.split(jax.random.key(7), DRAWS)))
    first, second = (np.exp(np.asarray(x, np.float64)) for x in (logits[:2], logits[2:]))
    joint = np.outer(first / first.sum(), second / second.sum()).ravel()
    assert chi_square_is_plausible(3 * actions[:, 0] + actions[:, 1], joint)


@pytest.mark.parametrize("per_element", [False, True], ids=["one key", "a key per element"])
def test_normal_samples_have_the_right_moments(per_element):
    keys = jax.random.split(jax.random.key(7), DRAWS) if per_element else jax.random.key(7)
    mean, std = np.array([1.0, -2.0]), np.array([0.5, 3.0])
    parameters = (jnp.broadcast_to(jnp.asarray(x, jnp.float32), (DRAWS, 2)) for x in (mean, np.log(std)))
    actions = np.asarray(Normal(*parameters).sample(keys))
    for component in range(2):
        reference = scipy.stats.norm(mean[component], std[component])
        assert scipy.stats.kstest(actions[:, component], reference.cdf).pvalue > 1e-6
    assert abs(np.corrcoef(actions.T)[0, 1]) < 5.0 / math.sqrt(DRAWS)


@pytest.mark.parametrize("count", [3, 100])
@pytest.mark.parametrize("allowed", [0, 1, -1])
def test_an_action_that_is_ruled_out_is_never_drawn(count, allowed):
    logits = jnp.full((DRAWS, count), -jnp.inf).at[:, allowed].set(3.0)
    distribution = Categorical(logits)
    assert set(np.asarray(distribution.sample(jax.random.key(0))).tolist()) == {allowed % count}
    np.testing.assert_array_equal(distribution.entropy(), 0.0)


@pytest.mark.parametrize("total", [1.0, 1.5, 1.9999999, 2.5, 3.0, 63.7])
def test_the_largest_uniform_number_stays_below_the_total(total):
    # The invariant that keeps `Categorical.sample` from an action of probability zero at the end.
    largest = np.float32(1.0) - np.finfo(np.float32).eps
    assert np.float32(total) * largest < np.float32(total)


@pytest.mark.parametrize("scale", [1e2, 1e4, 1e30])
@pytest.mark.parametrize(
    "of_logits",
    [Categorical, lambda logits: MultiCategorical(logits, (2, 3))],
    ids=["categorical", "multi-categorical"],
)
def test_extreme_logits_have_finite_values_and_gradients(of_logits, scale):
    logits = scale * jnp.array([[1.0, -1.0, 0.0, 0.5, -0.5]])

    def objective(logits):
        distribution = of_logits(logits)
        action = distribution.mode()
        return jnp.sum(distribution.log_prob(action) + distribution.entropy())

    value, gradient = jax.value_and_grad(objective)(logits)
    assert bool(jnp.isfinite(value)) and bool(jnp.all(jnp.isfinite(gradient)))


def test_the_gradient_at_an_action_ruled_out_is_zero():
    logits = jnp.array([[0.0, 1.0, -jnp.inf]])
    gradient = jax.grad(
        lambda x: jnp.sum(Categorical(x).log_prob(jnp.array([0])) + Categorical(x).entropy())
    )(logits)
    assert bool(jnp.all(jnp.isfinite(gradient))) and gradient[0, 2] == 0.0


# Logits 0, log 2, log 3 with the second ruled out: probabilities 1/4, 0, 3/4, and
# entropy log(4) / 4 + 3 log(4/3) / 4.
WEIGHTS, ALLOWED = jnp.log(jnp.array([[1.0, 2.0, 3.0]])), jnp.array([[True, False, True]])
QUARTERS_ENTROPY = 0.5623351


def test_masked_categorical_by_hand():
    distribution = masked(Categorical(WEIGHTS), ALLOWED)
    log_probs = [float(distribution.log_prob(jnp.array([action]))[0]) for action in range(3)]
    assert log_probs == pytest.approx([math.log(0.25), -math.inf, math.log(0.75)], rel=1e-6)
    assert float(distribution.entropy()[0]) == pytest.approx(QUARTERS_ENTROPY, rel=1e-6)
    assert distribution.mode().tolist() == [2]
    assert masked(Categorical(WEIGHTS), jnp.array([[True, True, False]])).mode().tolist() == [1]


def test_gradients_of_a_masked_categorical_by_hand():
    """Of log p(2): one-hot minus probability; of the entropy H: -p_i (log p_i + H); where ruled out: zero."""
    log_prob = jax.grad(lambda x: masked(Categorical(x), ALLOWED).log_prob(jnp.array([2]))[0])(WEIGHTS)
    np.testing.assert_allclose(log_prob, [[-0.25, 0.0, 0.25]], rtol=1e-6)
    entropy = jax.grad(lambda x: masked(Categorical(x), ALLOWED).entropy()[0])(WEIGHTS)
    np.testing.assert_allclose(entropy, [[0.2059898, 0.0, -0.2059898]], rtol=1e-5)


def test_masked_multi_categorical_by_hand():
    """A choice of two with the second ruled out leaves nothing to choose; the choice of three is as above."""
    logits = jnp.concatenate([jnp.array([[5.0, 9.0]]), WEIGHTS], axis=-1)
    mask = jnp.concatenate([jnp.array([[True, False]]), ALLOWED], axis=-1)

    def log_prob_and_entropy(logits):
        distribution = masked(MultiCategorical(logits, (2, 3)), mask)
        return distribution.log_prob(jnp.array([[0, 2]]))[0], distribution.entropy()[0]

    log_prob, entropy = log_prob_and_entropy(logits)
    assert float(log_prob) == pytest.approx(math.log(0.75), rel=1e-6)
    assert float(entropy) == pytest.approx(QUARTERS_ENTROPY, rel=1e-6)
    of_log_prob, of_entropy = jax.jacobian(log_prob_and_entropy)(logits)
    np.testing.assert_allclose(of_log_prob, [[0.0, 0.0, -0.25, 0.0, 0.25]], rtol=1e-6)
    np.testing.assert_allclose(of_entropy, [[0.0, 0.0, 0.2059898, 0.0, -0.2059898]], rtol=1e-5, atol=1e-7)
    assert masked(MultiCategorical(logits, (2, 3)), mask).mode().tolist() == [[0, 2]]


@pytest.mark.parametrize(
    "of_logits", [Categorical, lambda x: MultiCategorical(x, (3, 97))], ids=["one", "several"]
)
def test_an_action_that_is_not_allowed_is_never_drawn(of_logits):
    mask = jax.random.bernoulli(jax.random.key(1), 0.3, (DRAWS, 100)).at[:, 2].set(True)
    distribution = masked(of_logits(random(DRAWS, 100)), mask)
    action = distribution.sample(jax.random.split(jax.random.key(0), DRAWS))
    assert bool(jnp.all(distribution.log_prob(action) > -jnp.inf))


def test_where_nothing_is_allowed_all_numbers_stay_finite():
    """Nobody acts there, but what is computed must not turn into not-a-number when multiplied by zero."""
    nothing = jnp.zeros((1, 3), bool)
    distribution = masked(Categorical(WEIGHTS), nothing)
    np.testing.assert_array_equal(distribution.logits, WEIGHTS)
    np.testing.assert_array_equal(allowed_only(WEIGHTS, nothing), WEIGHTS)


def test_without_a_mask_nothing_changes():
    distribution = Categorical(WEIGHTS)
    assert masked(distribution, None) is distribution and allowed_only(WEIGHTS, None) is WEIGHTS


def test_masks_that_do_not_fit_are_refused():
    with pytest.raises(FdgError, match=r"a TanhNormal cannot be masked: only actions that can be counted"):
        masked(TanhNormal(jnp.zeros((1, 2)), jnp.zeros((1, 2))), jnp.ones((1, 2), bool))
    with pytest.raises(FdgError, match=r"an action mask of shape \[1, 2\] for values \[1, 3\]"):
        masked(Categorical(WEIGHTS), jnp.ones((1, 2), bool))


def test_the_gradient_of_log_prob_is_one_hot_minus_probability():
    logits = random(BATCH, 4)
    action = jnp.array([0, 1, 2, 3, 0])
    gradient = jax.grad(lambda x: jnp.sum(Categorical(x).log_prob(action)))(logits)
    np.testing.assert_allclose(gradient, jax.nn.one_hot(action, 4) - jax.nn.softmax(logits), atol=1e-6)


@pytest.mark.parametrize(
    "space, size, shape",
    [
        (Discrete(4), 4, ()),
        (MultiDiscrete((2, 5, 3)), 10, (3,)),
        (Box(-1.0, 1.0, ()), 2, ()),
        (Box(-1.0, 1.0, (3,)), 6, (3,)),
        (Box(-1.0, 1.0, (2, 3)), 12, (2, 3)),
    ],
    ids=str,
)
def test_for_space(space, size, shape):
    parameterization = for_space(space)
    assert parameterization.size == size
    distribution = parameterization.distribution(jnp.zeros((BATCH, size)))
    action = distribution.sample(jax.random.split(jax.random.key(0), BATCH))
    assert action.shape == (BATCH, *shape)
    assert distribution.log_prob(action).shape == distribution.entropy().shape == (BATCH,)


def test_for_a_box_the_means_come_first():
    distribution = for_space(Box(-1.0, 1.0, (2,))).distribution(jnp.array([[1.0, 2.0, 3.0, 4.0]]))
    assert distribution.mean.tolist() == [[1.0, 2.0]]
    assert distribution.log_std.tolist() == [[3.0, 4.0]]


@pytest.mark.parametrize("space", [object(), Box(0, 9, (2,), "int32")], ids=["unknown", "integers"])
def test_a_space_without_distribution_is_refused(space):
    with pytest.raises(FdgError, match=r"no distribution over the action space .*: use Discrete"):
        for_space(space)
