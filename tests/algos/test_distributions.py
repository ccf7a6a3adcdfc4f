import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy  # imports `scipy.stats` lazily

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


# Jitted: eager mode compiles a dozen small programs for every shape.
sample = jax.jit(lambda distribution, keys: distribution.sample(keys))
log_prob = jax.jit(lambda distribution, action: distribution.log_prob(action))
entropy = jax.jit(lambda distribution: distribution.entropy())
mode = jax.jit(lambda distribution: distribution.mode())


def random(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(2.0 * np.random.default_rng(seed).normal(size=shape), jnp.float32)


def key_per_element(count: int, seed: int = 3) -> jax.Array:
    """Made with NumPy: `jax.random.split` compiles for each count."""
    data = np.random.default_rng(seed).integers(2**32, size=(count, 2), dtype=np.uint32)
    return jax.random.wrap_key_data(jnp.asarray(data))


# Distributions with a batch of BATCH, and the shape and dtype of one action.
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
TANH_NORMAL = TABLE["tanh-normal"][0]
every_distribution = pytest.mark.parametrize("distribution, shape, dtype", TABLE.values(), ids=TABLE)


@every_distribution
def test_shapes_and_dtypes(distribution, shape, dtype):
    sampled = sample(distribution, jax.random.key(0))
    for action in (sampled, mode(distribution)):
        assert action.shape == (BATCH, *shape) and action.dtype == dtype
    results = [log_prob(distribution, sampled)]
    if distribution is not TANH_NORMAL:  # its entropy has no closed form
        results.append(entropy(distribution))
    for result in results:
        assert result.shape == (BATCH,) and result.dtype == jnp.float32


@every_distribution
def test_key_per_element_samples_each_element(distribution, shape, dtype):
    """Samples agree under jit, vmap and scan, for single elements, and for a part of the batch."""

    @jax.jit
    def found(distribution, keys):
        _, alone = jax.lax.scan(lambda carry, one: (carry, one[0].sample(one[1])), 0, (distribution, keys))
        part = jax.tree.map(lambda x: x[2:], (distribution, keys))
        each = jax.vmap(lambda element, key: element.sample(key))(distribution, keys)
        return distribution, distribution.sample(keys), alone, each, part[0].sample(part[1])

    returned, together, alone, each, part_samples = found(distribution, key_per_element(BATCH))
    assert jax.tree.structure(returned) == jax.tree.structure(distribution)
    np.testing.assert_allclose(each, together, rtol=1e-6)
    np.testing.assert_allclose(alone, together, rtol=1e-6)
    np.testing.assert_allclose(part_samples, together[2:], rtol=1e-6)


@pytest.mark.parametrize(
    "distribution, shape, dtype",
    [row for row in TABLE.values() if row[0] is not TANH_NORMAL],
    ids=[name for name in TABLE if name != "tanh-normal"],
)
def test_mode_has_highest_probability(distribution, shape, dtype):
    highest = log_prob(distribution, mode(distribution))
    for seed in range(20):
        action = sample(distribution, jax.random.key(seed))
        assert np.all(np.asarray(log_prob(distribution, action)) <= np.asarray(highest) + 1e-6)


@every_distribution
def test_number_of_keys(distribution, shape, dtype):
    with pytest.raises(FdgError, match=r"give one key, or one key .* per element"):
        distribution.sample(key_per_element(BATCH + 1))


@pytest.mark.parametrize("count", [1, 7, 100])
def test_categorical_matches_scipy(count):
    logits = random(BATCH, count)
    distribution = Categorical(logits)
    entropies = np.asarray(entropy(distribution))
    log_probs = np.stack([log_prob(distribution, np.full(BATCH, action)) for action in range(count)], axis=1)
    for row in range(BATCH):
        exact = np.exp(np.asarray(logits[row], np.float64))
        reference = scipy.stats.rv_discrete(values=(np.arange(count), exact / exact.sum()))
        np.testing.assert_allclose(entropies[row], reference.entropy(), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(log_probs[row], reference.logpmf(np.arange(count)), rtol=1e-5, atol=1e-5)


def test_multi_categorical_matches_categoricals():
    logits = random(BATCH, sum(NVEC))
    distribution = MultiCategorical(logits, NVEC)
    action = np.asarray(sample(distribution, jax.random.key(0)))
    parts = [Categorical(x) for x in np.split(np.asarray(logits), np.cumsum(NVEC)[:-1], axis=-1)]
    expected = sum(np.asarray(log_prob(part, action[:, m])) for m, part in enumerate(parts))
    np.testing.assert_allclose(log_prob(distribution, action), expected, rtol=1e-5)
    np.testing.assert_allclose(
        entropy(distribution), sum(np.asarray(entropy(part)) for part in parts), rtol=1e-5
    )
    np.testing.assert_array_equal(mode(distribution), np.stack([mode(part) for part in parts], axis=-1))


def test_normal_matches_scipy():
    mean, log_std = random(BATCH, 3), random(BATCH, 3, seed=1)
    distribution = Normal(mean, log_std)
    action = np.asarray(sample(distribution, jax.random.key(0)))
    log_probs, entropies = np.asarray(log_prob(distribution, action)), np.asarray(entropy(distribution))
    for row in range(BATCH):
        covariance = np.diag(np.exp(2.0 * np.asarray(log_std[row], np.float64)))
        reference = scipy.stats.multivariate_normal(np.asarray(mean[row]), covariance)
        np.testing.assert_allclose(log_probs[row], reference.logpdf(action[row]), rtol=1e-4)
        np.testing.assert_allclose(entropies[row], reference.entropy(), rtol=1e-5)


@every_distribution
def test_kl_matches_sampled_log_ratios(distribution, shape, dtype):
    other = jax.tree.map(lambda x: 0.7 * x + 0.2 * random(*x.shape, seed=2), distribution)

    @jax.jit
    def log_ratios(keys):
        action = jax.vmap(lambda key: distribution.sample(key))(keys)
        return jax.vmap(lambda a: distribution.log_prob(a) - other.log_prob(a))(action)

    # An action that rounds to 1 loses its density: samples of the Gaussians before the tanh are compared.
    if isinstance(distribution, TanhNormal):
        kl = distribution.kl(other)
        distribution, other = (Normal(one.mean, one.log_std, one.shape) for one in (distribution, other))
        np.testing.assert_array_equal(kl, distribution.kl(other))
    found = np.asarray(log_ratios(key_per_element(20_000)), np.float64)
    error = 5 * found.std(0) / np.sqrt(len(found)) + 1e-5
    assert np.all(np.abs(jax.jit(lambda: distribution.kl(other))() - found.mean(0)) < error)
    np.testing.assert_allclose(distribution.kl(distribution), 0.0, atol=1e-6)


def test_masked_kl_by_hand():
    logits, mask = jnp.array([0.3, 5.0, -0.2]), jnp.array([True, False, True])
    fair = masked(Categorical(jnp.zeros(3)), mask)
    kl, slope = jax.value_and_grad(lambda x: fair.kl(masked(Categorical(x), mask)))(logits)
    p = 1 / (1 + np.exp(-0.5))  # probability of the first action
    assert float(kl) == pytest.approx(-0.5 * np.log(2 * p) - 0.5 * np.log(2 * (1 - p)), rel=1e-5)
    np.testing.assert_allclose(slope, [p - 0.5, 0.0, 0.5 - p], rtol=1e-5)
    assert np.isinf(Categorical(jnp.zeros(3)).kl(fair))  # `fair` excludes an action with positive probability


def test_matrix_actions_match_flat_ones():
    mean, log_std = random(BATCH, 6), random(BATCH, 6, seed=1)
    flat, matrix = Normal(mean, log_std), Normal(mean, log_std, (2, 3))
    key = jax.random.key(0)
    actions = np.asarray(sample(matrix, key))
    np.testing.assert_array_equal(actions.reshape(BATCH, 6), sample(flat, key))
    np.testing.assert_allclose(
        log_prob(matrix, actions), log_prob(flat, actions.reshape(BATCH, 6)), rtol=1e-6
    )


@pytest.mark.parametrize("mean, std", [(0.0, 1.0), (1.5, 0.3), (-3.0, 2.0), (6.0, 0.5)])
def test_tanh_normal_density(mean, std):
    """Compares with the numerical derivative of P(normal <= arctanh(action)), in float64."""
    distribution = TanhNormal(np.float32([[mean]]), np.log(np.float32([[std]])))

    def cdf(action):
        return scipy.stats.norm.cdf(np.arctanh(action), mean, std)

    for action in (-0.96, -0.4, 0.0, 0.7, 0.96, 0.996):
        width = 1e-4 * (1.0 - abs(action))
        slope = (cdf(action + width) - cdf(action - width)) / (2.0 * width)
        density = math.exp(log_prob(distribution, np.float32([[action]]))[0])
        assert density == pytest.approx(slope, rel=2e-3, abs=1e-6)


def test_sample_with_log_prob():
    """Small means and deviations: near the bounds, a rounded action does not determine the normal sample."""
    distribution = TanhNormal(0.25 * random(BATCH, 6), 0.25 * random(BATCH, 6, seed=1) - 1.0, (2, 3))
    keys = key_per_element(BATCH)
    action, found = jax.jit(TanhNormal.sample_with_log_prob)(distribution, keys)
    assert np.max(np.abs(action)) < 0.99
    np.testing.assert_allclose(action, sample(distribution, keys), rtol=1e-6)
    np.testing.assert_allclose(found, log_prob(distribution, action), rtol=1e-3)


def test_tanh_normal_with_large_means():
    """tanh rounds to 1, but log(1 - tanh(u)^2) still decreases as 2 (log 2 - |u|)."""

    @jax.jit
    def far_out(mean):
        def log_prob(mean):
            return TanhNormal(mean[None, None], jnp.zeros((1, 1))).sample_with_log_prob(jax.random.key(0))[1][
                0
            ]

        on_the_bound = TanhNormal(jnp.full((1, 1), mean), jnp.zeros((1, 1))).log_prob(jnp.ones((1, 1)))
        return *jax.value_and_grad(log_prob)(mean), jax.random.normal(jax.random.key(0), (1, 1)), on_the_bound

    for mean in (-1e4, -30.0, 30.0, 1e4):
        value, gradient, noise, on_the_bound = (float(x.squeeze()) for x in far_out(np.float32(mean)))
        expected = -0.5 * noise**2 - 0.5 * math.log(2.0 * math.pi) - 2.0 * math.log(2.0)
        expected += 2.0 * abs(mean + noise)
        assert value == pytest.approx(expected, rel=1e-3)  # float32 has three decimals of 1e4 + noise
        assert gradient == pytest.approx(2.0 * np.sign(mean))
        assert math.isfinite(on_the_bound)


def test_stretched_reaches_bounds():
    low, high = (-1.3, 0.1, -0.7), (0.9, 0.2, 1e3)
    space = Box(low, high, (3,))
    actions = stretched(jnp.array([[-1.0] * 3, [0.0] * 3, [1.0] * 3]), space)
    np.testing.assert_allclose(actions[0], low, rtol=1e-6)
    np.testing.assert_allclose(actions[1], (np.array(low) + np.array(high)) / 2.0, rtol=1e-5)
    np.testing.assert_allclose(actions[2], high, rtol=1e-6)
    assert all(bool(space.contains(action)) for action in actions)
    largest = float(np.finfo(np.float32).max)
    assert bool(jnp.all(jnp.isfinite(stretched(actions / 1e3, Box(-largest, largest, (3,))))))


DRAWS = 20_000


def passes_chi_squared_test(actions: np.ndarray, probability: np.ndarray) -> bool:
    """Pearson's chi-squared test at a level of 1e-6; with fixed seeds the result is deterministic."""
    observed = np.bincount(actions, minlength=len(probability))
    return scipy.stats.chisquare(observed, probability * len(actions)).pvalue > 1e-6


@pytest.mark.parametrize("count", [6, 100])
@pytest.mark.parametrize("per_element", [False, True], ids=["one key", "a key per element"])
def test_categorical_frequencies(count, per_element):
    logits = 0.5 * np.asarray(random(count))
    keys = key_per_element(DRAWS) if per_element else jax.random.key(7)
    actions = sample(Categorical(np.broadcast_to(logits, (DRAWS, count))), keys)
    probability = np.exp(np.asarray(logits, np.float64))
    probability /= probability.sum()
    assert passes_chi_squared_test(np.asarray(actions), probability)
    # The test rejects the reversed probabilities.
    assert not passes_chi_squared_test(np.asarray(actions), probability[::-1])


def test_multi_categorical_frequencies():
    logits = 0.5 * np.asarray(random(5))
    distribution = MultiCategorical(np.broadcast_to(logits, (DRAWS, 5)), (2, 3))
    actions = np.asarray(sample(distribution, key_per_element(DRAWS)))
    first, second = (np.exp(np.asarray(x, np.float64)) for x in (logits[:2], logits[2:]))
    joint = np.outer(first / first.sum(), second / second.sum()).ravel()
    assert passes_chi_squared_test(3 * actions[:, 0] + actions[:, 1], joint)


@pytest.mark.parametrize("per_element", [False, True], ids=["one key", "a key per element"])
def test_normal_samples(per_element):
    keys = key_per_element(DRAWS) if per_element else jax.random.key(7)
    mean, std = np.array([1.0, -2.0]), np.array([0.5, 3.0])
    parameters = (np.broadcast_to(np.float32(x), (DRAWS, 2)) for x in (mean, np.log(std)))
    actions = np.asarray(sample(Normal(*parameters), keys))
    for component in range(2):
        reference = scipy.stats.norm(mean[component], std[component])
        assert scipy.stats.kstest(actions[:, component], reference.cdf).pvalue > 1e-6
    assert abs(np.corrcoef(actions.T)[0, 1]) < 5.0 / math.sqrt(DRAWS)


@pytest.mark.parametrize(
    "make",
    [Categorical, lambda logits: MultiCategorical(logits, (2, 3))],
    ids=["categorical", "multi-categorical"],
)
def test_extreme_logits(make):
    @jax.jit
    @jax.value_and_grad
    def objective(logits):
        distribution = make(logits)
        action = distribution.mode()
        return jnp.sum(distribution.log_prob(action) + distribution.entropy())

    for scale in (1e2, 1e4, 1e30):
        value, gradient = objective(np.float32([[scale, -scale, 0.0, scale / 2, -scale / 2]]))
        assert np.isfinite(value) and np.all(np.isfinite(gradient))


# Logits 0, log 2, log 3 with the second masked: probabilities 1/4, 0, 3/4, and entropy
# log(4) / 4 + 3 log(4/3) / 4.
WEIGHTS, ALLOWED = jnp.asarray(np.log(np.float32([[1.0, 2.0, 3.0]]))), jnp.array([[True, False, True]])
MASKED_ENTROPY = 0.5623351


def test_masked_categorical_by_hand():
    distribution = masked(Categorical(WEIGHTS), ALLOWED)
    log_probs = [float(log_prob(distribution, np.array([action]))[0]) for action in range(3)]
    assert log_probs == pytest.approx([math.log(0.25), -math.inf, math.log(0.75)], rel=1e-6)
    assert float(entropy(distribution)[0]) == pytest.approx(MASKED_ENTROPY, rel=1e-6)
    assert distribution.mode().tolist() == [2]
    assert masked(Categorical(WEIGHTS), jnp.array([[True, True, False]])).mode().tolist() == [1]


def test_masked_multi_categorical_by_hand():
    """With its second value masked, the choice of two is certain; the choice of three is as above."""
    logits = np.concatenate([np.float32([[5.0, 9.0]]), WEIGHTS], axis=-1)
    mask = np.concatenate([[[True, False]], ALLOWED], axis=-1)

    def log_prob_and_entropy(logits):
        distribution = masked(MultiCategorical(logits, (2, 3)), mask)
        return distribution.log_prob(jnp.array([[0, 2]]))[0], distribution.entropy()[0]

    found, gradients = jax.jit(lambda x: (log_prob_and_entropy(x), jax.jacrev(log_prob_and_entropy)(x)))(
        logits
    )
    assert [float(x) for x in found] == pytest.approx([math.log(0.75), MASKED_ENTROPY], rel=1e-6)
    of_log_prob, of_entropy = gradients
    np.testing.assert_allclose(of_log_prob, [[0.0, 0.0, -0.25, 0.0, 0.25]], rtol=1e-6)
    np.testing.assert_allclose(of_entropy, [[0.0, 0.0, 0.2059898, 0.0, -0.2059898]], rtol=1e-5, atol=1e-7)
    assert masked(MultiCategorical(logits, (2, 3)), mask).mode().tolist() == [[0, 2]]


@pytest.mark.parametrize(
    "make", [Categorical, lambda x: MultiCategorical(x, (3, 97))], ids=["one", "several"]
)
def test_masked_actions_are_never_sampled(make):
    mask = np.random.default_rng(1).random((DRAWS, 100)) < 0.3
    mask[:, 2] = True
    distribution = masked(make(random(DRAWS, 100)), jnp.asarray(mask))
    action = sample(distribution, key_per_element(DRAWS))
    assert np.all(np.asarray(log_prob(distribution, action)) > -np.inf)


def test_no_allowed_action_keeps_logits():
    """Without allowed actions, results are unmasked: infinities would become NaN when multiplied by zero."""
    none_allowed = jnp.zeros((1, 3), bool)
    distribution = masked(Categorical(WEIGHTS), none_allowed)
    np.testing.assert_array_equal(distribution.logits, WEIGHTS)
    np.testing.assert_array_equal(allowed_only(WEIGHTS, none_allowed), WEIGHTS)


def test_no_mask_is_identity():
    distribution = Categorical(WEIGHTS)
    assert masked(distribution, None) is distribution and allowed_only(WEIGHTS, None) is WEIGHTS


def test_invalid_masks():
    with pytest.raises(FdgError, match=r"a TanhNormal cannot be masked: only discrete actions"):
        masked(TanhNormal(jnp.zeros((1, 2)), jnp.zeros((1, 2))), jnp.ones((1, 2), bool))
    with pytest.raises(FdgError, match=r"an action mask of shape \[1, 2\] for values \[1, 3\]"):
        masked(Categorical(WEIGHTS), jnp.ones((1, 2), bool))


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
    action = sample(distribution, key_per_element(BATCH))
    assert action.shape == (BATCH, *shape)
    assert log_prob(distribution, action).shape == entropy(distribution).shape == (BATCH,)


@pytest.mark.parametrize("space", [object(), Box(0, 9, (2,), "int32")], ids=["unknown", "integers"])
def test_unsupported_space(space):
    with pytest.raises(FdgError, match=r"no distribution over the action space .*: use Discrete"):
        for_space(space)
