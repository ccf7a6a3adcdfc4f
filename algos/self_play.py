"""`SelfPlay`: an algorithm that trains against older versions of itself, from any algorithm of one agent.

    ppo = algos.PPO(env=envs.make("game:connect_four"))
    run = fdg.fit(algos.SelfPlay(ppo, size=4, every=10))

The versions are part of the state, so that checkpoints hold them and every distribution policy gives the
same numbers. What is kept of a version is what the algorithm's `actor` reads of its state: parameters,
statistics of observations, but no replay memory.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import fdg
from algos.rollout import Actor
from envs import Vectorized, vectorize
from envs.games import Against, Uniform
from envs.games.game import Position, seen
from fdg import jaxprs
from fdg.arguments import checked_names
from fdg.errors import FdgError, kind_of
from fdg.fragment import with_numbers
from fdg.kinds import reader

_OWN = {"size": int, "every": int, "latest": float}  # fields besides the algorithm


class State(NamedTuple):
    """The algorithm's own state, and the versions that are its opponents."""

    learner: Any  # of the algorithm
    versions: Any  # of each leaf that an actor reads, [size, ...]
    newest: jax.Array  # [] int32: the position of the newest version
    iteration: jax.Array  # [] int32


class Memory(NamedTuple):
    """What the opponent of one game remembers."""

    version: jax.Array  # [] int32: which one plays this game
    remembered: Any  # by the actor of each version, [size, 1, ...]
    begins: jax.Array  # [1] bool: it has not moved yet


@checked_names
@dataclasses.dataclass(frozen=True)
class SelfPlay:
    """An algorithm whose opponents are older versions of itself.

    For each game an opponent is drawn: with probability `latest` the newest version, else any of those kept,
    all equally probable. It samples its moves as in training. All versions evaluate each position, so a step
    costs `size` evaluations of the actor. A game whose version is replaced continues with the newer one.

    Attributes:
      algorithm: with `init`, `iterate`, `actor` and a fragment `step` for its environment. Its `env` is an
        agent against an opponent (`envs.games.Against`), used in evaluations only.
      size, every: versions that are kept; iterations from one to the next.
      latest: probability of the newest version.

    All other attributes are those of the algorithm.

    Raises:
      FdgError: (construction) a number out of range, or an algorithm or environment that does not fit.
    """

    algorithm: Any
    size: int = 4
    every: int = 10
    latest: float = 0.5

    def __post_init__(self):
        if isinstance(self.algorithm, SelfPlay | type):
            given = f"{self.algorithm!r:.60}" if isinstance(self.algorithm, type) else "a SelfPlay"
            raise FdgError(f"SelfPlay: {given} is no algorithm to wrap: give one such as algos.PPO(env=env)")
        env = getattr(self.algorithm, "env", None)
        name = type(self.algorithm).__name__
        for method in ("init", "iterate", "actor", "step"):
            if not callable(getattr(self.algorithm, method, None)):
                raise FdgError(
                    f"SelfPlay: {kind_of(self.algorithm)} has no method {method}: give an algorithm such as"
                    " algos.PPO(env=envs.make('game:connect_four'))"
                )
        if not isinstance(env, Vectorized) or not isinstance(env.single, Against):
            raise FdgError(
                f"SelfPlay: the environment of {name} is '{getattr(env, 'name', env)}', no game against an"
                " opponent: give envs.make('game:connect_four'), or envs.vectorize(envs.games.Against(game,"
                " opponent))"
            )
        if hasattr(self.algorithm, "player"):
            raise FdgError(f"SelfPlay: {name} plays against itself already: train it as it is")
        for field in ("size", "every"):
            value = getattr(self, field)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise FdgError(f"SelfPlay: {field}={value!r}: give a whole number from 1")
        if not isinstance(self.latest, int | float) or not 0 <= self.latest <= 1:
            raise FdgError(f"SelfPlay: latest={self.latest!r}: give a probability, from 0 to 1")

    def init(self, key: jax.Array) -> State:
        """The state before the first iteration; all versions are the first parameters.

        Where the opponent begins one of the first games, its first move is a random one.
        """
        learner = self._learner.init(key)
        versions = [jnp.stack([leaf] * self.size) for leaf in self._read(learner)]
        return State(learner, versions, jnp.int32(0), jnp.int32(0))

    def iterate(self, state: State) -> tuple[State, dict[str, jax.Array]]:
        """One iteration of the algorithm against the versions, of which its result may become the newest."""
        step = functools.partial(self.step, state.versions, state.newest)
        learner, metrics = with_numbers(self._learner, {"step": step}).iterate(state.learner)
        iteration = state.iteration + 1
        versions, newest = self.keep(state.versions, state.newest, self._read(learner), iteration)
        return State(learner, versions, newest, iteration), metrics

    def actor(self, state: State) -> Actor:
        """How the newest parameters act."""
        return self.algorithm.actor(state.learner)

    @checked_names
    def evaluate(self, state: State, key: jax.Array, episodes: int, greedy: bool = True) -> dict[str, Any]:
        """Plays whole games against the opponent of `algorithm.env`; see `algos.rollout.evaluate`."""
        return self.algorithm.evaluate(state.learner, key, episodes, greedy)

    def check_when_traced(self, state: State) -> None:
        """As of the algorithm."""
        if check := getattr(self.algorithm, "check_when_traced", None):
            check(state.learner)

    def changed(self, **values: Any) -> "SelfPlay":
        """A copy with other values of its own fields, and of the algorithm's."""
        own = {name: values.pop(name) for name in _OWN if name in values}
        change = getattr(self.algorithm, "changed", functools.partial(dataclasses.replace, self.algorithm))
        return dataclasses.replace(self, algorithm=change(**values), **own)

    def said(self) -> dict[str, Any]:
        """The entries of `config.json` that describe this, in addition to those of the algorithm."""
        return {"self_play": " ".join(f"{name}={getattr(self, name)}" for name in _OWN)}

    @classmethod
    def from_text(cls, algorithm: Any, text: str) -> "SelfPlay":
        """Makes it from words NAME=VALUE, as `said` and `--self-play` have them.

        Raises:
          FdgError: a word is not of this form, its name is no field, or its value does not fit.
        """
        values: dict[str, Any] = {}
        for word in text.split():
            name, equals, value = word.partition("=")
            if not equals or name not in _OWN:
                raise FdgError(f"--self-play: '{word:.60}': write any of size=4 every=10 latest=0.5")
            try:
                values[name] = reader(_OWN[name])(value)
            except ValueError as error:
                raise FdgError(f"--self-play {word:.60}: {value!r:.40} is not {error}") from None
        return cls(algorithm, **values)

    @fdg.fragment("environment", in_axes=(None, None, 0, 0, 0))
    def step(self, versions, newest, keys, env_state, action):
        """`keys [B]`, `action [B]` -> the games' next state and a `TimeStep [B]`, versions replying."""
        env = vectorize(Against(self._game, _Versions(self, versions, newest)), info=self.algorithm.env.info)
        return env.step(keys, env_state, action)

    @fdg.fragment("learner", in_axes=None, out_axes=None)
    def keep(self, versions, newest, leaves, iteration):
        """The versions, every `every` iterations with new parameters, and the newest's position."""
        due = iteration % self.every == 0
        newest = jnp.where(due, (newest + 1) % self.size, newest)
        kept = [
            jnp.where(due, version.at[newest].set(leaf), version)
            for version, leaf in zip(versions, leaves, strict=True)
        ]
        return kept, newest

    @property
    def _game(self) -> Any:
        return self.algorithm.env.single.game

    @property
    def _learner(self) -> Any:
        """The algorithm, in an environment whose state has room for what opponents remember."""
        env = vectorize(Against(self._game, _Absent(self)), info=self.algorithm.env.info)
        return dataclasses.replace(self.algorithm, env=env)

    def _read(self, learner: Any) -> list[jax.Array]:
        is_read, leaves = _is_read(self), jax.tree.leaves(learner)
        return [leaf for leaf, read in zip(leaves, is_read, strict=True) if read]

    def _actor_of(self, leaves: list[jax.Array]) -> Actor:
        shapes, structure = jax.tree.flatten(_shapes(self._learner))
        given = iter(leaves)
        whole = [
            next(given) if read else _zeros(shape) for shape, read in zip(shapes, _is_read(self), strict=True)
        ]
        return self.algorithm.actor(jax.tree.unflatten(structure, whole))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "algorithm":
            raise AttributeError(name)
        return getattr(self.algorithm, name)


@dataclasses.dataclass(frozen=True)
class _Absent:
    """A `Player` in the place of older versions while there are none: it moves at random."""

    of: SelfPlay

    def begin(self, key: jax.Array) -> Memory:
        """An empty memory of each version's actor."""
        one = _memory(self.of.algorithm)
        remembered = jax.tree.map(lambda x: jnp.zeros((self.of.size, *x.shape), x.dtype), one)
        return Memory(jnp.int32(0), remembered, jnp.ones(1, bool))

    def choose(self, key: jax.Array, memory: Memory, position: Position) -> tuple[jax.Array, Memory]:
        """A random legal move."""
        return Uniform(self.of._game).choose(key, memory, position)


@dataclasses.dataclass(frozen=True, eq=False)
class _Versions(_Absent):
    """A `Player`: for each game one of the versions."""

    versions: list[jax.Array]
    newest: jax.Array

    __eq__, __hash__ = object.__eq__, object.__hash__  # it holds arrays

    def begin(self, key: jax.Array) -> Memory:
        """Draws the version that plays."""
        first, second = jax.random.split(key)
        is_newest = jax.random.uniform(first) < self.of.latest
        drawn = jax.random.randint(second, (), 0, self.of.size, jnp.int32)
        return super().begin(key)._replace(version=jnp.where(is_newest, self.newest, drawn))

    def choose(self, key: jax.Array, memory: Memory, position: Position) -> tuple[jax.Array, Memory]:
        """The move of the version that plays; the others' are worked out and dropped."""
        observation = jax.tree.map(lambda x: x[None], seen(self.of._game, position))

        def one(leaves: list[jax.Array], remembered: Any) -> tuple[jax.Array, Any]:
            actor = self.of._actor_of(leaves)
            action, remembered = actor.act(remembered, observation, memory.begins, key[None], False)
            return action[0], remembered

        actions, remembered = jax.vmap(one)(self.versions, memory.remembered)
        memory = Memory(memory.version, remembered, jnp.zeros_like(memory.begins))
        return actions[memory.version].astype(jnp.int32), memory


@functools.cache
def _a_key() -> Any:
    return jax.eval_shape(lambda: jax.random.key(0))


@functools.lru_cache(maxsize=64)
def _shapes(algorithm: Any) -> Any:
    return jax.eval_shape(algorithm.init, _a_key())


@functools.lru_cache(maxsize=64)
def _memory(algorithm: Any) -> Any:
    return jax.eval_shape(lambda state: algorithm.actor(state).memory(1), _shapes(algorithm))


@functools.lru_cache(maxsize=64)
def _is_read(of: SelfPlay) -> tuple[bool, ...]:
    """Whether the algorithm's actor reads each leaf of its state."""
    shapes, structure = jax.tree.flatten(_shapes(of._learner))

    def act(leaves: list[jax.Array], memory: Any, key: jax.Array) -> Any:
        actor = of.algorithm.actor(jax.tree.unflatten(structure, leaves))
        position = of._game.init(key)
        observation = jax.tree.map(lambda x: x[None], seen(of._game, position))
        return actor.act(memory, observation, jnp.ones(1, bool), key[None], False)

    traced = jax.make_jaxpr(act)(shapes, _memory(of.algorithm), _a_key())
    return tuple(jaxprs.inputs_read(traced)[: len(shapes)])


def _zeros(shape: Any) -> jax.Array:
    if jnp.issubdtype(shape.dtype, jax.dtypes.prng_key):
        return jnp.broadcast_to(jax.random.key(0), shape.shape)
    return jnp.zeros(shape.shape, shape.dtype)
