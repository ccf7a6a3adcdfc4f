import itertools
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from algos import distributions, dqn
from algos.layers import Convolution, features
from algos.networks import (
    actor_critic,
    gaussian_actor,
    policy_and_value,
    q_network,
    select_values,
    twin_critics,
)
from algos.values import Network
from envs import MaskedObservation
from envs.spaces import Box, Discrete, MultiDiscrete, Space
from fdg.errors import FdgError

BATCH = 6


def box(*shape: int, dtype="float32") -> Box:
    return Box(0.0, {"uint8": 255.0, "int32": 9.0}.get(np.dtype(dtype).name, 1.0), shape, dtype)


OBSERVATIONS = {
    "vector": box(4),
    "scalar": box(),
    "matrix": box(3, 5),
    "small grid": box(2, 2, 3),
    "MinAtar": box(10, 10, 4, dtype="bool"),
    "pixels": box(8, 9, 3, dtype="uint8"),
    "integers": box(7, dtype="int32"),
    "discrete": Discrete(5),
    "multi-discrete": MultiDiscrete((3, 2)),
}
FRAMES = box(36, 44, 4, dtype="uint8")  # large enough for DQN's convolutions, which compile slowly
ACTIONS = {
    "discrete": Discrete(3),
    "multi-discrete": MultiDiscrete((2, 5)),
    "box": box(2),
    "scalar box": box(),
    "matrix box": box(2, 3),
}
every_observation = pytest.mark.parametrize("observation_space", OBSERVATIONS.values(), ids=OBSERVATIONS)


def observe(space: Space, batch: int = BATCH, seed: int = 0) -> jax.Array:
    """Random observations: `[batch, *space.shape]` with the space's dtype."""
    rng = np.random.default_rng(seed)
    match space:
        case Discrete(n):
            return jnp.asarray(rng.integers(n, size=batch), jnp.int32)
        case MultiDiscrete(nvec):
            return jnp.asarray(rng.integers(nvec, size=(batch, len(nvec))), jnp.int32)
    if space.dtype == "bool":
        return jnp.asarray(rng.random((batch, *space.shape)) < 0.5)
    largest = {"uint8": 200, "int32": 10, "float32": 1}[space.dtype]
    return jnp.asarray(largest * rng.random((batch, *space.shape)), space.dtype)


def leaves(parameters) -> dict[str, jax.Array]:
    return {
        jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(parameters)
    }


@pytest.mark.parametrize(
    ("observation_space", "action_space"),
    list(zip(OBSERVATIONS.values(), itertools.cycle(ACTIONS.values()), strict=False)),
    ids=OBSERVATIONS,
)
def test_shapes_and_dtypes(observation_space, action_space):
    network = actor_critic(observation_space, action_space)
    parameterization = distributions.for_space(action_space)

    def forward(key, observation):
        parameters = network.init(key, observation)
        output, value = network.apply(parameters, observation)
        return parameters, output, value, parameterization.distribution(output).sample(key)

    # Only shapes: other tests check the arithmetic.
    parameters, output, value, action = jax.eval_shape(forward, jax.random.key(0), observe(observation_space))
    assert output.shape == (BATCH, parameterization.size) and output.dtype == jnp.float32
    assert value.shape == (BATCH,) and value.dtype == jnp.float32
    assert action.shape == (BATCH, *action_space.shape) and action.dtype == action_space.dtype
    assert {leaf.dtype for leaf in jax.tree.leaves(parameters)} == {jnp.dtype(jnp.float32)}


@every_observation
def test_rows_are_independent(observation_space):
    network = actor_critic(observation_space, ACTIONS["box"], hidden=(8,))
    observation, others = (np.array(observe(observation_space, seed=seed)) for seed in range(2))
    others[2] = observation[2]

    @jax.jit
    def outputs(observation, others):
        parameters = network.init(jax.random.key(0), observation)
        return [network.apply(parameters, x) for x in (observation, others, observation[2:3])]

    for outputs_of, changed, single in zip(*outputs(observation, others), strict=True):
        np.testing.assert_allclose(outputs_of[2], changed[2], rtol=1e-6, atol=1e-7)
        np.testing.assert_allclose(outputs_of[2], single[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("observation", ["vector", "MinAtar"])
def test_orthogonal_initialisation(observation):
    space = OBSERVATIONS[observation]
    parameters = jax.jit(actor_critic(space, ACTIONS["discrete"]).init)(jax.random.key(0), observe(space))
    kernels = {name: leaf for name, leaf in leaves(parameters).items() if name.endswith("['kernel']")}
    assert len(kernels) == 6
    for name, kernel in kernels.items():
        scale = math.sqrt(2.0)
        if "head" in name:
            scale = 0.01 if "actor" in name else 1.0
        matrix = np.asarray(kernel.reshape(-1, kernel.shape[-1]), np.float64)
        # The shorter of rows and columns are orthogonal, each of length `scale`.
        gram = matrix @ matrix.T if matrix.shape[0] < matrix.shape[1] else matrix.T @ matrix
        np.testing.assert_allclose(gram, scale**2 * np.eye(len(gram)), atol=1e-5 * scale**2, err_msg=name)
    for name, leaf in leaves(parameters).items():
        if name.endswith("['bias']"):
            np.testing.assert_array_equal(leaf, 0.0, err_msg=name)


def dense(inputs: int, outputs: int) -> int:
    return inputs * outputs + outputs


@pytest.mark.parametrize(
    "observation, action, hidden, expected",
    [
        # two torsos 4 -> 64 -> 64, heads of 3 logits and 1 value
        ("vector", "discrete", None, 2 * (dense(4, 64) + dense(64, 64)) + dense(64, 3) + dense(64, 1)),
        # heads of 2 means and 1 value, and 2 log standard deviations
        ("vector", "box", (8,), 2 * dense(4, 8) + dense(8, 2) + dense(8, 1) + 2),
        # 16 filters of 3 x 3 x 4; 8 x 8 positions remain
        ("MinAtar", "discrete", None, 2 * (dense(36, 16) + dense(1024, 128)) + dense(128, 3) + dense(128, 1)),
        # one-hot: 3 + 2 inputs; 2 + 5 logits
        ("multi-discrete", "multi-discrete", (8,), 2 * dense(5, 8) + dense(8, 7) + dense(8, 1)),
        # 32 filters of 8 x 8 x 4, 64 of 4 x 4 x 32 and 64 of 3 x 3 x 64; 1 x 2 positions remain
        (
            "frames",
            "discrete",
            None,
            2 * (dense(256, 32) + dense(512, 64) + dense(576, 64) + dense(128, 512))
            + dense(512, 3)
            + dense(512, 1),
        ),
        ("matrix", "discrete", (), dense(15, 3) + dense(15, 1)),
    ],
)
def test_number_of_parameters(observation, action, hidden, expected):
    space = OBSERVATIONS.get(observation, FRAMES)
    network = actor_critic(space, ACTIONS[action], hidden=hidden)
    parameters = jax.eval_shape(network.init, jax.random.key(0), observe(space))
    assert sum(leaf.size for leaf in jax.tree.leaves(parameters)) == expected


def test_log_std_is_a_parameter():
    space = OBSERVATIONS["vector"]
    network = actor_critic(space, box(2, 3), initial_log_std=-0.5)
    observation = observe(space)
    parameters = jax.jit(network.init)(jax.random.key(0), observation)
    parameters["log_std"] = parameters["log_std"] + jnp.arange(6.0)
    output, _ = network.apply(parameters, observation)
    np.testing.assert_array_equal(output[:, 6:], np.tile(np.arange(6.0) - 0.5, (BATCH, 1)))


def test_actor_critic_matches_numpy():
    space = OBSERVATIONS["vector"]
    network = actor_critic(space, ACTIONS["discrete"], hidden=(8, 7))
    observation = observe(space)
    parameters = jax.jit(network.init)(jax.random.key(0), observation)

    def trunk(layers):
        x = np.asarray(observation)
        for name in ("Dense_0", "Dense_1"):
            x = np.tanh(x @ np.asarray(layers[name]["kernel"]) + np.asarray(layers[name]["bias"]))
        return x @ np.asarray(layers["head"]["kernel"]) + np.asarray(layers["head"]["bias"])

    output, value = network.apply(parameters, observation)
    np.testing.assert_allclose(output, trunk(parameters["actor"]), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(value, trunk(parameters["critic"])[:, 0], rtol=1e-4, atol=1e-6)


def test_integer_features():
    """In a grid, each channel has one channel per code; with two codes, one channel of 0 and 1."""
    space = Box(((((-1, 0),) * 3),) * 3, ((((1, 1),) * 3),) * 3, (3, 3, 2), "int32")
    seen = jnp.zeros((2, 3, 3, 2), jnp.int32).at[1, 2, 0].set(jnp.array([-1, 1]))
    found = features(seen, space)
    assert found.shape == (2, 3, 3, 4) and found[1, 2, 0].tolist() == [1, 0, 0, 1]
    assert found[0, 0, 0].tolist() == [0, 1, 0, 0]
    assert features(seen, space, convolve=False).shape == (2, 36)
    board = Box(0.0, 2.0, (3, 4), "uint8")  # a grid of one channel is convolved too
    assert features(jnp.ones((1, 3, 4), jnp.uint8), board)[0, 2, 3].tolist() == [0, 1, 0]
    assert features(jnp.array([[0, 2]]), Box(0.0, 2.0, (2,), "int32")).tolist() == [[1, 0, 0, 0, 0, 1]]
    assert features(jnp.full((1, 4, 4, 2), 255, jnp.uint8), box(4, 4, 2, dtype="uint8")).max() == 1
    assert features(jnp.ones((1, 4, 4, 2), bool), box(4, 4, 2, dtype="bool")).max() == 1
    amounts = Box((-100.0, 0.0), (100.0, 200.0), (2,), "int32")
    np.testing.assert_allclose(features(jnp.array([[0, 50]]), amounts), [[0.5, 0.25]])
    assert features(jnp.array([[-3.0, 7.5]]), amounts).tolist() == [[-3.0, 7.5]], "normalised already"
    anything = Box(-(2.0**31), 2.0**31 - 1, (1,), "int32")
    assert features(jnp.array([[1234]]), anything).tolist() == [[1234.0]]


def test_small_images_use_one_convolution():
    network = actor_critic(box(35, 84, 4, dtype="uint8"), ACTIONS["discrete"])
    shapes = jax.eval_shape(network.init, jax.random.key(0), jnp.zeros((1, 35, 84, 4), jnp.uint8))
    assert shapes["actor"]["Convolution_0"]["kernel"].shape == (3, 3, 4, 16)
    assert "Convolution_1" not in shapes["actor"]


@pytest.mark.parametrize("height, width, size, stride", [(10, 7, 3, 1), (23, 20, 8, 4), (9, 12, 4, 2)])
def test_convolution_matches_flax(height, width, size, stride):
    images = jax.random.normal(jax.random.key(1), (2, height, width, 3))
    ours = Convolution(5, size, stride)
    theirs = nn.Conv(5, (size, size), (stride, stride), padding="VALID")
    kernel = jax.random.normal(jax.random.key(0), (size, size, 3, 5))
    parameters = {"params": {"kernel": kernel, "bias": jnp.arange(5.0)}}
    expected = theirs.apply(parameters, images)
    assert expected.shape[1:3] == ((height - size) // stride + 1, (width - size) // stride + 1)
    np.testing.assert_allclose(jax.jit(ours.apply)(parameters, images), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("observation", ["vector", "MinAtar", "discrete"])
def test_gaussian_actor(observation):
    space = OBSERVATIONS[observation]
    network = gaussian_actor(space, box(2, 3))
    seen = observe(space)
    parameters = jax.jit(network.init)(jax.random.key(0), seen)
    output = network.apply(parameters, seen)
    assert output.shape == (BATCH, 12) and output.dtype == jnp.float32
    assert bool(jnp.all(jnp.std(output, axis=0) > 0.0)) or observation == "discrete"
    assert bool(jnp.all(jnp.abs(output) < 0.2))  # initial standard deviations are close to 1
    assert network == gaussian_actor(space, box(2, 3), hidden=None)


def test_equality():
    def make(**changes):
        return actor_critic(OBSERVATIONS["vector"], ACTIONS["discrete"], **changes)

    assert make() == make() and hash(make()) == hash(make())
    assert make(hidden=[8]) == make(hidden=(8,))
    for changes in ({"hidden": (32,)}, {"activation": "relu"}):
        assert make() != make(**changes)


def test_observation_shape():
    network = actor_critic(OBSERVATIONS["vector"], ACTIONS["discrete"])
    parameters = jax.jit(network.init)(jax.random.key(0), jnp.zeros((1, 4)))
    for wrong in (jnp.zeros(4), jnp.zeros((3, 5)), jnp.zeros((2, 3, 4))):
        with pytest.raises(FdgError, match=r"made for observations \[N, 4\] .*: give one leading axis"):
            network.apply(parameters, wrong)


# --- Q-networks ---


def test_q_network_matches_numpy():
    """Dense, layer norm, relu; then a value and three advantages minus their mean."""
    space = OBSERVATIONS["vector"]
    network = q_network(space, ACTIONS["discrete"], hidden=(8,), dueling=True, layer_norm=True)
    observation = observe(space)
    layers = jax.jit(network.init)(jax.random.key(0), observation)["q"]
    x = np.asarray(observation) @ np.asarray(layers["Dense_0"]["kernel"])  # biases are zero, scales one
    x = (x - x.mean(axis=1, keepdims=True)) / np.sqrt(x.var(axis=1, keepdims=True) + 1e-6)
    head = np.maximum(x, 0) @ np.asarray(layers["head"]["kernel"])
    expected = head[:, :1] + head[:, 1:] - head[:, 1:].mean(axis=1, keepdims=True)
    np.testing.assert_allclose(network.apply({"q": layers}, observation), expected, rtol=1e-4, atol=1e-5)


def test_plain_q_network():
    space = OBSERVATIONS["vector"]
    network = q_network(space, ACTIONS["discrete"], hidden=(8,))
    parameters = jax.jit(network.init)(jax.random.key(0), observe(space))
    assert sum(leaf.size for leaf in jax.tree.leaves(parameters)) == dense(4, 8) + dense(8, 3)
    assert network == q_network(space, ACTIONS["discrete"], hidden=[8]) != q_network(space, Discrete(2))


def test_masked_q_values():
    space = OBSERVATIONS["vector"]
    network = q_network(space, ACTIONS["discrete"], hidden=(8,))
    features = observe(space, batch=2)
    parameters = jax.jit(network.init)(jax.random.key(0), features)
    mask = jnp.array([[True, False, True], [True, True, True]])
    values = dqn.action_values(network, parameters, MaskedObservation(features, mask), ACTIONS["discrete"])
    plain = dqn.action_values(network, parameters, features, ACTIONS["discrete"])
    np.testing.assert_array_equal(values, np.where(mask, plain, -np.inf))

    def loss(parameters):
        values = dqn.action_values(
            network, parameters, MaskedObservation(features, mask), ACTIONS["discrete"]
        )
        return jnp.sum(select_values(values, jnp.array([2, 1])))

    for leaf in jax.tree.leaves(jax.jit(jax.grad(loss))(parameters)):
        assert np.all(np.isfinite(leaf))


def test_q_network_needs_discrete_actions():
    with pytest.raises(FdgError, match=r"of Discrete\(n\) or MultiDiscrete\(nvec\), not of Box"):
        q_network(OBSERVATIONS["vector"], ACTIONS["box"])


def test_masked_policy():
    """Equal logits: 1/2 for each of two allowed actions. The network's input excludes the mask."""
    network = Network(
        init=lambda key, observation: {}, apply=lambda _, features: (jnp.zeros((2, 3)), features[:, 0])
    )
    mask = jnp.array([[True, False, True], [True, True, True]])
    observation = MaskedObservation(jnp.array([[5.0], [7.0]]), mask)
    policy, value = policy_and_value(network, {}, observation, Discrete(3))
    np.testing.assert_allclose(policy.log_prob(jnp.array([0, 0])), np.log([1 / 2, 1 / 3]), rtol=1e-6)
    assert policy.log_prob(jnp.array([1, 1]))[0] == -jnp.inf
    assert value.tolist() == [5.0, 7.0]


@pytest.mark.parametrize(
    "network",
    [
        lambda space, **settings: actor_critic(space, ACTIONS["discrete"], **settings),
        lambda space, **settings: q_network(space, Discrete(3), **settings),
        lambda space, **settings: gaussian_actor(space, box(2), **settings),
        lambda space, **settings: twin_critics(space, **settings),
    ],
    ids=["actor_critic", "q_network", "gaussian_actor", "twin_critics"],
)
def test_flattened_images(network):
    """`convolve=False` matches the network for the flattened image, with equal parameters."""
    image, flat = box(5, 5, 2), box(50)
    observation = observe(image)
    actions = (jnp.zeros((BATCH, 2)),) if network(flat) == twin_critics(flat) else ()
    flattened, plain = network(image, convolve=False), network(flat)
    parameters = jax.jit(flattened.init)(jax.random.key(0), observation, *actions)
    rows = observation.reshape(BATCH, 50)
    plain_parameters = jax.jit(plain.init)(jax.random.key(0), rows, *actions)
    assert jax.tree.map(jnp.shape, parameters) == jax.tree.map(jnp.shape, plain_parameters)
    results = flattened.apply(parameters, observation, *actions), plain.apply(parameters, rows, *actions)
    for ours, theirs in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)
