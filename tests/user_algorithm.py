"""Algorithms and environments as users write them: plain objects.

`Walker` has edge cases of data: a role that no policy names, nested fragments, a fragment called with two
shapes, a batch on another axis than 0, state that no fragment uses, and integers, booleans and keys in the
state. `Gardener` has edge cases of control flow.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

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
    """An algorithm without base class or registration."""

    def __init__(self, num_envs=B):
        self.num_envs = num_envs

    def init(self, key):
        B = self.num_envs
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
        B = self.num_envs
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


# --- Gardener: unusual loops ---

SEASONS, DAYS, PLANTS = 2, 3, 2


@dataclasses.dataclass(frozen=True)
class Garden:
    """Plants that grow with water, with an environment interface of this file."""

    rate: float = 0.2

    def reset(self, keys):  # [B] -> height [B, PLANTS] float32, soil [B] int32
        height = 0.1 * jax.vmap(lambda key: jax.random.uniform(key, (PLANTS,)))(keys)
        return height, jnp.arange(len(keys), dtype=jnp.int32) % 3

    @fdg.fragment("environment")
    def grow(self, height, soil, water, keys):
        weather = jax.vmap(lambda key: jax.random.uniform(key, (PLANTS,)))(keys)
        sensitivity = jnp.asarray(SENSITIVITY)  # a constant captured in a fragment
        height = height + self.rate * (water[:, None] * sensitivity[None] + weather - height)
        return height, (soil + 1) % 3, jnp.sum(height, axis=1), height[:, 0] > 0.5


SENSITIVITY = np.asarray([0.7, -0.4], np.float32)
PRICES = np.linspace(0.5, 1.5, PLANTS, dtype=np.float32)


@fdg.fragment("actor", in_axes=(None, 0, 0))
def pour(weight, height, soil):
    return jnp.tanh(height @ weight["w"] + weight["b"] * soil)


@fdg.fragment("environment")
def taste(height, later):
    return 0.5 * later + jnp.mean(height, axis=1)


@fdg.fragment("actor", in_axes=(None, 0))
def expect(weight, height):
    return height @ weight["w"]


@fdg.fragment("learner", in_axes=(0, 0))
def surprise(expected, seen):
    return seen - expected


@fdg.fragment("gradient", in_axes=(None, 0, 0), out_axes=None)
def slope_of(weight, height, target):
    return jax.grad(lambda weight: jnp.mean(jnp.square(expect(weight, height) + weight["b"] - target)))(
        weight
    )


@fdg.fragment("update", in_axes=None, out_axes=None)
def descend(weight, slope):
    return jax.tree.map(lambda x, d: x - 0.05 * d, weight, slope)


@fdg.fragment("learner", in_axes=(None, 0, 0), out_axes=None)
def tend(weight, height, target):
    return descend(weight, slope_of(weight, height, target))


@jax.custom_vjp
def _priced(weight, height):
    return pour(weight, height, jnp.zeros(height.shape[0], jnp.int32)) + surprise(height[:, 0], height[:, 1])


_priced.defvjp(lambda weight, height: (_priced(weight, height), None), lambda _, g: (None, None))


@dataclasses.dataclass(frozen=True)
class Gardener:
    """Fragments of every role in nested, reversed and single-trip loops, in calls of all kinds.

    Its iteration also has: keys stacked by a loop, two carries initialised by one array, an unchanged carry,
    constants captured in and between fragments, one array as two leaves of the state, a leaf as metric,
    a Python number as result.
    """

    num_envs: int = 12
    garden: Garden = Garden()

    def init(self, key):
        keys = jax.random.split(key, self.num_envs)
        height, soil = self.garden.reset(keys)
        return {
            "weight": {"w": jnp.zeros(PLANTS), "b": jnp.float32(0.1)},
            "height": height,
            "soil": soil,
            "ripe": jnp.zeros(self.num_envs, bool),
            "keys": keys,
            "harvest": jnp.zeros(self.num_envs),
            "harvest_again": jnp.zeros(self.num_envs),
            "rent": jnp.float32(0.0),
            "season": 0,
            "owner": jnp.asarray([1, 2], jnp.uint8),
        }

    def iterate(self, state):
        prices = jnp.asarray(PRICES)  # a constant captured between fragments

        def day(carry, number):
            height, soil, ripe, keys, harvest, weight = carry  # `weight` is an unchanged carry
            keys = jax.vmap(jax.random.fold_in, (0, None))(keys, number)
            water = pour(weight, height, soil)
            height, soil, harvest, ripe = self.garden.grow(height, soil, water, keys)
            return (height, soil, ripe, keys, harvest, weight), (height, keys)

        def season(carry, number):
            weight, garden, total, best = carry
            *garden, harvest, _ = jax.lax.scan(
                day, (*garden, jnp.zeros(self.num_envs), weight), number + jnp.arange(DAYS)
            )[0]
            return (tend(weight, garden[0], harvest), tuple(garden), total + harvest, best), harvest

        def back(later, height):
            target = taste(height, later)
            return surprise(expect(state["weight"], height), target), target

        @jax.jit
        def appraise(weight, height):  # a call of fragments on several groups
            return surprise(expect(weight, height * prices[None]), taste(height, height[:, 0]))

        garden = state["height"], state["soil"], state["ripe"], state["keys"]
        nothing = jnp.zeros(self.num_envs)
        (weight, garden, total, best), harvests = jax.lax.scan(
            season, (state["weight"], garden, nothing, nothing), jnp.arange(SEASONS)
        )
        # A loop of one trip, with fragments on several groups; its keys are stacked.
        last, (heights, keys) = jax.lax.scan(day, (*garden, nothing, weight), jnp.arange(1))
        rows = jnp.concatenate([heights, heights * 0.5 + best[None, :, None]])
        target, targets = jax.lax.scan(back, harvests[-1], rows, reverse=True)
        worth = (
            appraise(weight, last[0]) + jax.checkpoint(appraise)(weight, rows[0]) + _priced(weight, rows[1])
        )
        weight = tend(weight, last[0], target + 0.1 * jnp.sum(targets, axis=0) + worth)
        season_number = state["season"] + 1
        state = {
            "weight": weight,
            "height": last[0],
            "soil": last[1],
            "ripe": last[2],
            "keys": keys[-1],
            "harvest": total,
            "harvest_again": total,
            "rent": jnp.float32(2.5),
            "season": season_number,
            "owner": state["owner"],
        }
        return state, {"harvest": jnp.mean(total), "season": season_number, "ripe": jnp.sum(last[2])}
