"""`SelfPlay`: trains any single-agent algorithm against older versions of itself.

    ppo = algos.PPO(env=envs.make("game:connect_four"))
    run = fdg.fit(algos.SelfPlay(ppo, size=4, every=10))

The versions are part of the state, so checkpoints contain them, and results are equal under every
distribution policy. A version consists of the leaves of the state that the algorithm's `actor` reads:
parameters and statistics of observations, but no replay buffer.
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

_FIELDS = {"size": int, "every": int, "latest": float}  # all fields but `algorithm`


class State(NamedTuple):
    """The algorithm's state, and the versions that are its opponents."""

    learner: Any  # the algorithm's state
    versions: Any  # list of the leaves of `learner` that the actor reads, each [size, ...]
    newest: jax.Array  # [] int32: index of the newest version
    iteration: jax.Array  # [] int32


class Memory(NamedTuple):
    """The opponent's memory in one game."""

    version: jax.Array  # [] int32: the version that plays this game
    memories: Any  # the memory of each version's actor, [size, 1, ...]
    is_first: jax.Array  # [1] bool: True before the opponent's first move


@checked_names
@dataclasses.dataclass(frozen=True)
class SelfPlay:
    """An algorithm whose opponents are older versions of itself.

    For each game an opponent is sampled: with probability `latest` the newest version, else a uniformly
    random stored version. The opponent samples its moves as in training. All versions evaluate each position,
    so a step costs `size` evaluations of the actor. If a version is replaced during a game, the game
    continues with the newer one.

    Attributes:
      algorithm: has `init`, `iterate`, `actor` and a fragment `step` for the environment. Its `env` is an
        `envs.games.Against`, whose opponent plays in evaluations only.
      size: the number of stored versions.
      every: a version is stored after this many iterations.
      latest: probability of the newest version.

    All other attributes are those of the algorithm.

    Raises:
      FdgError: at construction, if a number is out of range, or the algorithm or environment does not fit.
    """

    algorithm: Any
    size: int = 4
    every: int = 10
    latest: float = 0.5

    def __post_init__(self):
        if isinstance(self.algorithm, SelfPlay | type):
            what = f"{self.algorithm!r:.60}" if isinstance(self.algorithm, type) else "a SelfPlay"
            raise FdgError(
                f"SelfPlay: {what} is not an algorithm that it can wrap: give an algorithm such as"
                " algos.PPO(env=env)"
            )
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
                f"SelfPlay: the environment of {name} is '{getattr(env, 'name', env)}', not a game against an"
                " opponent: give envs.make('game:connect_four'), or envs.vectorize(envs.games.Against(game,"
                " opponent))"
            )
        if hasattr(self.algorithm, "player"):
            raise FdgError(f"SelfPlay: {name} already has self-play: leave out SelfPlay")
        for field in ("size", "every"):
            value = getattr(self, field)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise FdgError(f"SelfPlay: {field}={value!r}: give a whole number from 1")
        if not isinstance(self.latest, int | float) or not 0 <= self.latest <= 1:
            raise FdgError(f"SelfPlay: latest={self.latest!r}: give a probability, from 0 to 1")

    def init(self, key: jax.Array) -> State:
        """The initial state; all versions have the initial parameters.

        If the opponent moves first in an initial game, its first move is random.
        """
        learner = self._learner.init(key)
        versions = [jnp.stack([leaf] * self.size) for leaf in self._actor_leaves(learner)]
        return State(learner, versions, jnp.int32(0), jnp.int32(0))

    def iterate(self, state: State) -> tuple[State, dict[str, jax.Array]]:
        """One iteration against the stored versions; after `every` iterations, the learner is stored."""
        step = functools.partial(self.step, state.versions, state.newest)
        learner, metrics = with_numbers(self._learner, {"step": step}).iterate(state.learner)
        iteration = state.iteration + 1
        versions, newest = self.keep(state.versions, state.newest, self._actor_leaves(learner), iteration)
        return State(learner, versions, newest, iteration), metrics

    def actor(self, state: State) -> Actor:
        """Acts with the learner's current parameters, not with a stored version."""
        return self.algorithm.actor(state.learner)

    @checked_names
    def evaluate(self, state: State, key: jax.Array, episodes: int, greedy: bool = True) -> dict[str, Any]:
        """Plays whole games against the opponent of `algorithm.env`; see `algos.evaluation.evaluate`."""
        return self.algorithm.evaluate(state.learner, key, episodes, greedy)

    def check_when_traced(self, state: State) -> None:
        """Calls the algorithm's own check, if it has one."""
        if check := getattr(self.algorithm, "check_when_traced", None):
            check(state.learner)

    def changed(self, **values: Any) -> "SelfPlay":
        """A copy with changed fields of `SelfPlay` or of the algorithm."""
        fields = {name: values.pop(name) for name in _FIELDS if name in values}
        replace = getattr(self.algorithm, "changed", functools.partial(dataclasses.replace, self.algorithm))
        return dataclasses.replace(self, algorithm=replace(**values), **fields)

    def said(self) -> dict[str, Any]:
        """The entries of `config.json` that describe self-play."""
        return {"self_play": " ".join(f"{name}={getattr(self, name)}" for name in _FIELDS)}

    @classmethod
    def from_text(cls, algorithm: Any, text: str) -> "SelfPlay":
        """Parses words NAME=VALUE, as `said` and `--self-play` write them.

        Raises:
          FdgError: a word has another form, its name is not a field, or its value does not fit.
        """
        values: dict[str, Any] = {}
        for word in text.split():
            name, equals, value = word.partition("=")
            if not equals or name not in _FIELDS:
                raise FdgError(
                    f"--self-play: '{word:.60}': write settings such as size=4 every=10 latest=0.5"
                )
            if name in values:
                raise FdgError(f"--self-play: {name} is given twice: give it once")
            try:
                values[name] = reader(_FIELDS[name])(value)
            except ValueError as error:
                raise FdgError(f"--self-play {word:.60}: {value!r:.40} is not {error}") from None
        return cls(algorithm, **values)

    @fdg.fragment("environment", in_axes=(None, None, 0, 0, 0))
    def step(self, versions, newest, keys, env_state, action):
        """Plays the moves `action [B]` and the opponents' replies; returns `(env_state, TimeStep [B])`.

        `versions` and `newest` are those of `State`, from which opponents get their parameters; `keys [B]`.
        """
        env = vectorize(
            Against(self._game, _VersionPlayer(self, versions, newest)), info=self.algorithm.env.info
        )
        return env.step(keys, env_state, action)

    @fdg.fragment("learner", in_axes=None, out_axes=None)
    def keep(self, versions, newest, leaves, iteration):
        """Stores `leaves` as a version every `every` iterations; returns versions, index of the newest."""
        is_due = iteration % self.every == 0
        newest = jnp.where(is_due, (newest + 1) % self.size, newest)
        versions = [
            jnp.where(is_due, version.at[newest].set(leaf), version)
            for version, leaf in zip(versions, leaves, strict=True)
        ]
        return versions, newest

    @property
    def _game(self) -> Any:
        return self.algorithm.env.single.game

    @property
    def _learner(self) -> Any:
        """The algorithm, with an environment whose state contains the opponents' memories."""
        env = vectorize(Against(self._game, _RandomPlayer(self)), info=self.algorithm.env.info)
        return dataclasses.replace(self.algorithm, env=env)

    def _actor_leaves(self, learner: Any) -> list[jax.Array]:
        """A version: the leaves of the algorithm's state that its actor reads."""
        is_read, leaves = _leaves_read_by_actor(self), jax.tree.leaves(learner)
        return [leaf for leaf, read in zip(leaves, is_read, strict=True) if read]

    def _actor_of(self, leaves: list[jax.Array]) -> Actor:
        """The actor of a version; leaves of the state that it does not read are zeros."""
        shapes, structure = jax.tree.flatten(_state_shapes(self._learner))
        remaining = iter(leaves)
        all_leaves = [
            next(remaining) if read else _zeros_like(shape)
            for shape, read in zip(shapes, _leaves_read_by_actor(self), strict=True)
        ]
        return self.algorithm.actor(jax.tree.unflatten(structure, all_leaves))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "algorithm":
            raise AttributeError(name)
        return getattr(self.algorithm, name)


@dataclasses.dataclass(frozen=True)
class _RandomPlayer:
    """A `Player` that makes random moves; it makes the opponents' first moves in the initial state."""

    self_play: SelfPlay

    def begin(self, key: jax.Array) -> Memory:
        """An empty memory for each version's actor."""
        shapes = _memory_shapes(self.self_play.algorithm)
        memories = jax.tree.map(lambda x: jnp.zeros((self.self_play.size, *x.shape), x.dtype), shapes)
        return Memory(jnp.int32(0), memories, jnp.ones(1, bool))

    def choose(self, key: jax.Array, memory: Memory, position: Position) -> tuple[jax.Array, Memory]:
        """A random legal move."""
        return Uniform(self.self_play._game).choose(key, memory, position)


@dataclasses.dataclass(frozen=True, eq=False)
class _VersionPlayer(_RandomPlayer):
    """A `Player` that plays each game with one of the versions."""

    versions: list[jax.Array]
    newest: jax.Array

    __eq__, __hash__ = object.__eq__, object.__hash__  # arrays have no hash

    def begin(self, key: jax.Array) -> Memory:
        """Samples the version that plays."""
        newest_key, index_key = jax.random.split(key)
        is_newest = jax.random.uniform(newest_key) < self.self_play.latest
        index = jax.random.randint(index_key, (), 0, self.self_play.size, jnp.int32)
        return super().begin(key)._replace(version=jnp.where(is_newest, self.newest, index))

    def choose(self, key: jax.Array, memory: Memory, position: Position) -> tuple[jax.Array, Memory]:
        """The move of the version that plays; the moves of other versions are computed and discarded."""
        observation = jax.tree.map(lambda x: x[None], seen(self.self_play._game, position))

        def act(leaves: list[jax.Array], memories: Any) -> tuple[jax.Array, Any]:
            actor = self.self_play._actor_of(leaves)
            action, memories = actor.act(memories, observation, memory.is_first, key[None], False)
            return action[0], memories

        actions, memories = jax.vmap(act)(self.versions, memory.memories)
        memory = Memory(memory.version, memories, jnp.zeros_like(memory.is_first))
        return actions[memory.version].astype(jnp.int32), memory


@functools.cache
def _key_shape() -> Any:
    return jax.eval_shape(lambda: jax.random.key(0))


@functools.lru_cache(maxsize=64)
def _state_shapes(algorithm: Any) -> Any:
    return jax.eval_shape(algorithm.init, _key_shape())


@functools.lru_cache(maxsize=64)
def _memory_shapes(algorithm: Any) -> Any:
    return jax.eval_shape(lambda state: algorithm.actor(state).memory(1), _state_shapes(algorithm))


@functools.lru_cache(maxsize=64)
def _leaves_read_by_actor(self_play: SelfPlay) -> tuple[bool, ...]:
    """For each leaf of the algorithm's state, whether the actor reads it."""
    shapes, structure = jax.tree.flatten(_state_shapes(self_play._learner))

    def act(leaves: list[jax.Array], memory: Any, key: jax.Array) -> Any:
        actor = self_play.algorithm.actor(jax.tree.unflatten(structure, leaves))
        position = self_play._game.init(key)
        observation = jax.tree.map(lambda x: x[None], seen(self_play._game, position))
        return actor.act(memory, observation, jnp.ones(1, bool), key[None], False)

    traced = jax.make_jaxpr(act)(shapes, _memory_shapes(self_play.algorithm), _key_shape())
    return tuple(jaxprs.inputs_read(traced)[: len(shapes)])


def _zeros_like(shape: Any) -> jax.Array:
    if jnp.issubdtype(shape.dtype, jax.dtypes.prng_key):
        return jnp.broadcast_to(jax.random.key(0), shape.shape)
    return jnp.zeros(shape.shape, shape.dtype)
