"""Optional components of algorithms, as values, and the settings that hold them.

A bonus, normaliser, transform, explorer or memory is a few pure functions that carry their own state.
Algorithms use the settings here, and do not name such values; `algos.registry.OPTIONS` lists their modules.

Shapes: `T` steps of a rollout, `B` environments, `N` rows, `U` gradient steps of an iteration.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp

import fdg
from algos import registry
from algos.distributions import check_two
from algos.networks import Network, by_name
from algos.rollout import Policy, Recollection
from envs import TimeStep, features_and_mask, map_features
from envs.composite import ObservationSpace
from fdg.arguments import check_takes, checked_names
from fdg.settings.fields import hyperparameter, own_value, require, require_not_negative, require_positive
from fdg.settings.given import check_same
from fdg.settings.parts import Part

# --- bonuses on rewards ---

BONUS: dict[str, Any] = {
    "help": "module:name of a bonus on rewards, an algos.Bonus (None: none)",
    "flag": str | None,
    "holds": "bonus",
}


@checked_names
class Bonus(NamedTuple):
    """An additional reward, such as for exploration, as two pure functions.

    `init(observation [B, *obs]) -> state`: a pytree; only shape and dtype of the observation are used.
    `apply(state, time_step [T, B]) -> (state, reward [T, B])`: called after a rollout, before learning or
    storing. `time_step.final_observation` is the observation after each step.
    """

    init: Callable[[Any], Any]
    apply: Callable[[Any, TimeStep], tuple[Any, jax.Array]]

    @staticmethod
    def described() -> str:
        """Its name in messages."""
        return "an algos.Bonus(init, apply), 'module:name' of one"


# --- normalisation of observations and rewards ---


@checked_names
class Normalizer(NamedTuple):
    """Normalisation of observations, as three pure functions.

    `init(observation_space) -> statistics`, a pytree.
    `apply(statistics, observation [..., *obs]) -> observation [..., *obs]`, with the same shapes.
    `update(statistics, observation [T, B, *obs]) -> statistics`, once after each rollout; with several
    agents, and in A3C with its workers, there is another leading axis: count axes from the last.
    """

    init: Callable[[ObservationSpace], Any]
    apply: Callable[[Any, Any], Any]
    update: Callable[[Any, Any], Any]

    @staticmethod
    def described() -> str:
        """Its name in messages."""
        return "an algos.Normalizer(init, apply, update), 'module:name' of one"


@dataclasses.dataclass(frozen=True)
class ObservationNormalizer(Part):
    """Settings of the normalisation of observations."""

    normalize_observation: bool = hyperparameter(False, "normalise observations by running mean and variance")
    normalize: Normalizer | None = own_value(
        "module:name of a normaliser of observations, an algos.Normalizer (None: by --normalize-observation)",
        "normalizer",
    )

    @property
    def used(self) -> bool:
        """Whether observations are normalised."""
        return self.normalize_observation or self.normalize is not None

    @property
    def _normalizer(self) -> Normalizer:
        return by_name("--normalize", self.normalize) or registry.option("running").RUNNING

    def begin(self, space: ObservationSpace, kept: bool = False) -> Any:
        """Initial statistics; None if observations are not normalised, unless they are kept."""
        return self._normalizer.init(space) if self.used or kept else None

    def seen(self, statistics: Any, observation: Any) -> Any:
        """Normalises observations `[..., *obs]` for the networks."""
        if not self.used:
            return observation

        def apply(features: Any) -> Any:
            after = self._normalizer.apply(statistics, features)
            check_same("apply of normalize gives observations", features, after, dtypes=False)
            return after

        return map_features(apply, observation)

    def observed(self, statistics: Any, observation: Any) -> Any:
        """Updates the statistics with observations `[T, B, *obs]`."""
        if not self.used:
            return statistics
        after = self._normalizer.update(statistics, features_and_mask(observation)[0])
        check_same("update of normalize gives statistics", statistics, after)
        return after

    def check(self, algorithm: Any) -> None:
        """Refuses two normalisers, and observations without a mean or variance."""
        require(
            algorithm,
            self.normalize is None or not self.normalize_observation,
            f"normalize_observation=True and normalize={self.normalize!r:.60}: give one of them",
        )
        space = algorithm.env.observation_space
        require(
            algorithm,
            not self.normalize_observation or registry.option("running").has_statistics(space),
            f"normalize_observation=True: {space} has no mean or variance; leave it False",
        )


@dataclasses.dataclass(frozen=True)
class Normalizers(ObservationNormalizer):
    """Settings of the normalisation of observations and rewards."""

    normalize_reward: bool = hyperparameter(
        False, "divide rewards by the running standard deviation of the discounted return"
    )

    def begin_returns(self, shape: tuple[int, ...], kept: bool = False) -> tuple[Any, Any]:
        """Initial statistics of returns, and running returns of environments `shape`.

        Both are None if rewards are not normalised, unless they are kept.
        """
        if not (self.normalize_reward or kept):
            return None, None
        return registry.option("running").init(()), jnp.zeros(shape, jnp.float32)

    def reward(
        self, time_step: TimeStep, running_return: Any, statistics: Any, discount: float | jax.Array
    ) -> tuple[jax.Array, Any, Any]:
        """Normalised rewards `[T, B]`, the running returns `[B]`, and the statistics of returns."""
        if not self.normalize_reward:
            return time_step.reward, running_return, statistics
        reward, done = time_step.reward, time_step.done
        return registry.option("running").scaled(reward, done, running_return, statistics, discount)

    def rollout(
        self, statistics: Any, running: Any, trajectory: Any, discount: float | jax.Array
    ) -> tuple[Any, tuple[Any, ...], tuple[Any, ...]]:
        """Normalises a rollout for the loss; also returns the next running returns and both statistics.

        `statistics` are of observations and returns; `running` begins with the running returns; further
        entries of either are unchanged. `trajectory` is a named tuple with an `observation [T, B, *obs]` and
        a `time_step [T, B]`.
        """
        (observation_statistics, return_statistics, *more), (running_return, *kept) = statistics, running
        time_step = trajectory.time_step
        reward, running_return, return_statistics = self.reward(
            time_step, running_return, return_statistics, discount
        )
        final = self.seen(observation_statistics, time_step.final_observation)
        seen = trajectory._replace(
            observation=self.seen(observation_statistics, trajectory.observation),
            time_step=time_step._replace(reward=reward, final_observation=final),
        )
        observation_statistics = self.observed(observation_statistics, trajectory.observation)
        return seen, (running_return, *kept), (observation_statistics, return_statistics, *more)


# --- transforms of rows between collecting and learning ---


class Transform:
    """A pure function `(rows, parameters, key) -> rows`; any function with these arguments.

    - `rows`: on-policy, a `Trajectory [T, B]` (`algos.on_policy`); with replay, the sampled minibatches
      `[U, N]` of `Transition` (`algos.replay`), or of `Sequences` (`algos.sequences`). The result has the
      same shapes.
    - `parameters`: on-policy, the network's before the update; with replay, everything that an update
      changes. With `staleness` they are newer than those that acted.
    - `key`: one key; split it over the second axis, so that results do not depend on the placement.
    """

    _fields: ClassVar[tuple[str, ...]] = ("__call__",)

    @staticmethod
    def described() -> str:
        """Its name in messages."""
        return "a function of (rows, parameters, key), 'module:name' of one"


@dataclasses.dataclass(frozen=True)
class Transforming(Part):
    """The setting of algorithms that transform rows."""

    transform: Transform | None = own_value(
        "module:name of a function of rows between collecting and learning, an algos.Transform", "transform"
    )

    def rows(self, rows: Any, parameters: Any, key: jax.Array) -> Any:
        """The transformed rows `[T, B, ...]` to learn from."""
        if self.transform is None:
            return rows
        function: Any = by_name("--transform", self.transform)
        check_takes(function, ("rows", "parameters", "key"), "transform")

        @fdg.fragment("buffer", in_axes=(1, None, None), out_axes=1)
        def transform(rows: Any, parameters: Any, key: jax.Array) -> Any:
            after = function(rows, parameters, key)
            check_same(
                "transform gives rows",
                rows,
                after,
                "rows of the structure that it is given (rows._replace(...))",
            )
            return after

        return transform(rows, parameters, jax.random.fold_in(key, 1))


# --- exploration ---


@checked_names
class Explorer(NamedTuple):
    """Exploration in training, as two pure functions over environments.

    `init(action [B, *action]) -> state [B, ...]`: only shape and dtype of the action are used.
    `apply(state [B, ...], policy, start [B], keys [B], progress) -> (state [B, ...], action [B, *action])`:
    `policy` has `mode()` and `sample(keys)`, and for value-based algorithms `logits [B, n]`, the values
    (`-inf`: not allowed). `start` is True where an episode starts; `progress`, `[]` float32, goes from 0 to 1
    over the run. Actions of SAC, TD3 and CrossQ are in [-1, 1].
    """

    init: Callable[[jax.Array], Any]
    apply: Callable[[Any, Any, jax.Array, jax.Array, jax.Array], tuple[Any, jax.Array]]

    @staticmethod
    def described() -> str:
        """Its name in messages."""
        return "an algos.Explorer(init, apply), 'module:name' of one"


@dataclasses.dataclass(frozen=True)
class ExplorerChoice(Part):
    """The user's exploration, if any."""

    explore: Explorer | None = own_value(
        "module:name of an exploration, an algos.Explorer (None: the algorithm's own)", "explorer"
    )

    def begin(self, action: jax.Array) -> Any:
        """Its initial state for actions `[B, *action]`; None without one."""
        return None if self.explore is None else self._explorer.init(action)

    def drawn(
        self,
        policy: Policy,
        sample: Callable[[jax.Array], jax.Array],
        recollection: Recollection | None,
        network: Any,
        keys: jax.Array,
        progress: jax.Array,
        greedy: bool = False,
    ) -> tuple[jax.Array, Any]:
        """Actions `[B, *action]`, and the next memories: the `network`'s, and the explorer's.

        Without an explorer, `sample(keys)` samples actions.
        """
        if recollection is None:
            return (policy.mode() if greedy else sample(keys)), None
        before = recollection.memory.explorer
        if greedy or self.explore is None:
            return (policy.mode() if greedy else sample(keys)), ActorMemory(network, before)
        apply = self._explorer.apply
        check_takes(apply, ("state", "policy", "start", "keys", "progress"), "apply of explore")
        result = apply(before, policy, recollection.start, keys, progress)
        state, action = check_two("apply of explore", result, "give a pair, (state, action)")
        check_same("apply of explore gives state", before, state)
        check_same("apply of explore gives action", jax.eval_shape(policy.mode), action)
        return action, ActorMemory(network, state)

    @property
    def _explorer(self) -> Explorer:
        return by_name("--explore", self.explore)


class ActorMemory(NamedTuple):
    """The memories of an actor."""

    network: Any  # [B, ...]; None for a feed-forward network
    explorer: Any  # [B, ...]; None without an explorer


# --- memories ---


class Head(NamedTuple):
    """The outputs of a default recurrent network."""

    outputs: int
    scale: float = 1.0  # of initial weights
    dueling: tuple[int, ...] | None = None  # numbers of actions of each choice
    of_actions: bool = False  # a pair of critics, which also take actions


class NoMemory:
    """The functions of `algos.sequences.WithMemory` for networks without a memory."""

    replay: ClassVar[dict[str, Any]] = {}  # arguments of `ReplayChoice.of`

    def begin(self, num_envs: int) -> Any:
        """The initial memory, `[B, ...]`; None without one."""
        return None

    def network(self, part: int) -> Network | None:
        """The network of a `part`, over rows of sequences; None without a memory."""
        return None

    def parameters(self, actor: Any, critics: Any) -> Any:
        """The parameters for acting: the actor's, and with a memory also the critics'."""
        return actor

    def of_actor(self, acting: Any) -> Any:
        """Selects the actor's parameters from those for acting."""
        return acting

    def seen(self, observation: Any, recollection: Recollection | None) -> Any:
        """Observations `[B, *obs]` as inputs of the networks."""
        return observation

    def after(self, acting: Any, seen: Any) -> Any:
        """The memory after the observations `seen`."""
        return None

    def check(self, parameters: Any, state: Any, outputs: int) -> None:
        """Refuses a network whose number of outputs is not `outputs`."""


NO_MEMORY = NoMemory()


@dataclasses.dataclass(frozen=True)
class MemorySizes(Part):
    """The sizes of a memory, as an algorithm's fields."""

    memory_size: int = hyperparameter(128, "width of the memory, and of the layer after it")
    memory_window: int = hyperparameter(
        32, "context of a transformer in steps, with the current one", only_with="memory=transformer"
    )
    memory_layers: int = hyperparameter(1, "layers of a transformer", only_with="memory=transformer")
    memory_heads: int = hyperparameter(
        4, "heads of a transformer's attention", only_with="memory=transformer"
    )


@dataclasses.dataclass(frozen=True)
class MemoryChoice(MemorySizes):
    """The kind of memory, and the sequences for learning."""

    memory: Literal["gru", "lstm", "mingru", "transformer"] | None = hyperparameter(
        None, "kind of memory: a GRU, an LSTM, ... (None: no memory)"
    )
    sequence_length: int | None = hyperparameter(
        None,
        "length of stored and sampled sequences, for backpropagation through time; None: a whole"
        " rollout (with memory)",
        only_with="memory",
    )
    burn_in: int = hyperparameter(
        0,
        "steps before a sampled sequence that only recompute its memory, a multiple of sequence_length",
        only_with="memory",
    )

    def of(self, algorithm: Any) -> "NoMemory":
        """The memories of an algorithm's networks: the user's network, or the defaults for `memory`."""
        own = algorithm._own("network", "actor") if hasattr(algorithm, "network") else None
        if self.memory is None if own is None else not hasattr(own, "unroll"):
            return NO_MEMORY
        return registry.option("memory").with_memory(algorithm, own)

    def check(self, algorithm: Any) -> None:
        """Refuses sizes that do not fit."""
        require_positive(algorithm, "memory_size")
        if self.memory is not None:
            registry.option("kinds of memory").MemoryKind.of(self, self.memory)
        length, steps = self.sequence_length, algorithm.num_steps
        require(
            algorithm,
            length is None or (length > 0 and steps % length == 0),
            f"sequence_length={length} does not divide num_steps={steps}: choose a divisor",
        )
        require_not_negative(algorithm, "burn_in")
