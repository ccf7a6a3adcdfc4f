"""Helpers of the tables of mistakes."""

import jax
import jax.numpy as jnp

import algos
import envs
import fdg
import policies
from algos.values import Network
from tests.mistakes import algorithms as broken
from tests.mistakes import environments as faulty
from tests.stream.test_engine import Walk

ENV = envs.vectorize(faulty.Corridor())
SLOTS = fdg.Stream(Walk(), slots=4, batch=4)


def ppo(**changed):
    return algos.PPO(**{"env": ENV, "num_envs": 4, "num_steps": 2, "hidden": (4,), **changed})


def trace_with(env):
    """Traces PPO on an environment that is already batched."""
    return fdg.trace(ppo(env=env))


def attempt(mistake):
    """Calls a function of a table; of a class, traces an instance: an algorithm, or PPO on an environment."""
    if not isinstance(mistake, type):
        mistake()
    elif hasattr(mistake, "reset"):
        trace_with(mistake() if issubclass(mistake, faulty.Batch) else envs.vectorize(mistake()))
    else:
        fdg.trace(mistake())


def network(policy, value):
    """A constant network with outputs of shapes (N, *policy) and (N, *value) for N observations."""

    def apply(parameters, observation):
        n = observation.shape[0]
        return jnp.zeros((n, *policy)), jnp.zeros((n, *value))

    return Network(lambda key, observation: {"w": jnp.zeros(1)}, apply)


def with_net(apply):
    """Traces PPO with a network that has this `apply`."""
    init = lambda key, observation: {"policy": jnp.zeros((1, 2)), "value": jnp.zeros(1)}  # noqa: E731
    return lambda: fdg.trace(ppo(network=Network(init, apply)))


def branches_on_observation(parameters, x):
    x = 2 * x if x.mean() > 0 else x
    return x @ parameters["policy"], x @ parameters["value"]


def logs_observation(parameters, x):
    broken.LOG.append(x)
    return x @ parameters["policy"], x @ parameters["value"]


def unpack(env):
    env, _ = env


def observation_first():
    observation, state = ENV.reset(jax.random.split(jax.random.key(0), 2))
    return ENV.step(jax.random.split(jax.random.key(0), 2), state, jnp.zeros(2, "int32")), observation


def place(algorithm=None, policy=None, devices=2, **more):
    return fdg.place(algorithm or broken.WithFragment(), policy or policies.GPUOnly(), devices, **more)


def run_without_iterations():
    algorithm = ppo()
    engine = fdg.compile(algorithm, policies.GPUOnly(), jax.devices()[:1], num_seeds=2)
    return engine.run(engine.init(0), 0)


def run_from(state):
    return fdg.compile(broken.Counter(), policies.GPUOnly(), jax.devices()[:1]).run(state)


def evaluate(many):
    """Traces `evaluate` on a state of two agents, or of another algorithm."""
    algorithm, keys = ppo(), jax.random.split(jax.random.key(0), 2)

    def value(keys):
        state = jax.vmap(algorithm.init)(keys) if many else {"w": keys}
        return algorithm.evaluate(state, keys[0], 1)

    return jax.eval_shape(value, keys)


class Roleless:
    def place(self, devices):
        return {"actor": 0}
