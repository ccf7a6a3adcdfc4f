"""An algorithm and an environment as a user would write them: plain objects in a file of their own.

It has what a compiler could trip over: a role that no policy names, nested fragments, a fragment called
with two shapes, a batch on another axis than 0, state that no fragment touches, and integers, booleans
and keys in the state.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

import fdg

B, T, FEATURES = 16, 6, 3


class State(NamedTuple):
    weight: jax.Array  # [FEATURES] float32
    momentum: jax.Array  # [FEATURES] float32
    position: jax.Array  # [B, FEATURES] float32
    age: jax.Array  # [B] int32
    alive: jax.Array  # [B] bool
    key: jax.Array
    label: jax.Array  # no fragment reads or writes it
    iteration: int


@fdg.fragment("actor", in_axes=(None, 0, 0))
def act(weight, position, keys):
    noise = jax.vmap(jax.random.normal)(keys)
    return position @ weight + 0.1 * noise


@fdg.fragment("environment")
def step(position, age, alive, action):
    position = 0.9 * position + 0.1 * jnp.tanh(action)[:, None] * jnp.ones((1, FEATURES))
    age = jnp.where(alive, age + 1, 0)
    return position, age, (age % 5) != 4, -jnp.sum(jnp.square(position - 1.0), axis=1)


@fdg.fragment("critic_of_taste", in_axes=1, out_axes=1)
def judge(reward):  # [T, B]: the batch is axis 1
    return reward - jnp.mean(reward, axis=0, keepdims=True)


@fdg.fragment("gradient", in_axes=(None, 0, 0), out_axes=None)
def gradient(weight, position, score):
    return jax.grad(lambda w: -jnp.mean((position @ w) * score) + 0.05 * jnp.sum(w**2))(weight)


@fdg.fragment("update", in_axes=None, out_axes=None)
def update(weight, momentum, slope):
    momentum = 0.8 * momentum + slope
    return weight - 0.1 * momentum, momentum


@fdg.fragment("learner", in_axes=(None, None, 1, 1), out_axes=None)
def learn(weight, momentum, positions, scores):
    samples = positions.swapaxes(0, 1).reshape(-1, FEATURES)
    flat = scores.swapaxes(0, 1).reshape(-1)

    def one(carry, _):
        weight, momentum = carry
        return update(weight, momentum, gradient(weight, samples, flat)), None

    return jax.lax.scan(one, (weight, momentum), None, length=3)[0]


class Walker:
    """No base class, no registration."""

    def init(self, key):
        start, key = jax.random.split(key)
        return State(
            weight=jnp.zeros(FEATURES),
            momentum=jnp.zeros(FEATURES),
            position=jax.random.normal(start, (B, FEATURES)),
            age=jnp.arange(B, dtype=jnp.int32),
            alive=jnp.arange(B) % 2 == 0,
            key=key,
            label=jnp.asarray([7, 8, 9], jnp.uint8),
            iteration=0,
        )

    def iterate(self, state):
        key, rollout = jax.random.split(state.key)

        def one(carry, keys):
            position, age, alive = carry
            action = act(state.weight, position, keys)
            after, age, alive, reward = step(position, age, alive, action)
            return (after, age, alive), (position, reward)

        keys = jax.random.split(rollout, (T, B))
        last, (positions, rewards) = jax.lax.scan(one, (state.position, state.age, state.alive), keys)
        bonus = act(state.weight, last[0][: B // 2], keys[0, : B // 2])  # the same fragment, another shape
        scores = judge(rewards)
        weight, momentum = learn(state.weight, state.momentum, positions, scores)
        metrics = {"reward": jnp.mean(rewards), "bonus": jnp.mean(bonus), "alive": jnp.sum(last[2])}
        return State(weight, momentum, *last, key, state.label, state.iteration + 1), metrics
