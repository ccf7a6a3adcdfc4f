"""Acting for replay: exploration as a value, and rollouts to store.

`explore=` of DQN, C51, QR-DQN, SAC, TD3 and CrossQ takes an `Explorer`, a pair of pure functions, instead of
the algorithm's own exploration. Its state, one for each environment, is carried from step to step.

Letters in shapes: `T` steps of a rollout, `B` environments, `L` steps of a sequence, `C = T / L` sequences.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from algos.distributions import Categorical, check_two
from algos.networks import by_name
from algos.replay import ReplayState, Step
from algos.rollout import Policy, Recollection, episode_metrics, rollout, rollout_with_memory
from envs import Observation
from fdg.arguments import check_takes, checked_names
from fdg.errors import FdgError
from fdg.settings.fields import own_value
from fdg.settings.given import check_same
from fdg.settings.parts import Part


@checked_names
class Explorer(NamedTuple):
    """Exploration in training, as two pure functions over environments.

    `init(action [B, *action]) -> state [B, ...]`: only the action's shape and dtype count.
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
        otherwise: Callable[[jax.Array], jax.Array],
        recollection: Recollection | None,
        keys: jax.Array,
        progress: jax.Array,
    ) -> tuple[jax.Array, Any]:
        """Actions `[B, *action]` and the new state; without an explorer, `otherwise(keys)` samples."""
        if self.explore is None or recollection is None:
            return otherwise(keys), None
        before, apply = recollection.memory.explorer, self._explorer.apply
        check_takes(apply, ("state", "policy", "start", "keys", "progress"), "apply of explore")
        result = apply(before, policy, recollection.start, keys, progress)
        state, action = check_two("apply of explore", result, "give a pair, (state, action)")
        check_same("apply of explore gives state", before, state)
        check_same("apply of explore gives action", jax.eval_shape(policy.mode), action)
        return action, state

    @property
    def _explorer(self) -> Explorer:
        return by_name("--explore", self.explore)


class Remembered(NamedTuple):
    """What an actor carries from step to step."""

    network: Any  # [B, ...]; None of a feed-forward network
    explorer: Any  # [B, ...]; None without an explorer


def boltzmann(temperature: float = 1.0) -> Explorer:
    """Samples actions with probabilities proportional to `exp(value / temperature)`; for learners of values.

    >>> explorer, policy = boltzmann(0.5), Categorical(jnp.array([[0.0, 100.0]]))
    >>> keys, start = jax.random.split(jax.random.key(0), 1), jnp.zeros(1, bool)
    >>> explorer.apply((), policy, start, keys, jnp.float32(0))[1].tolist()
    [1]
    """

    def apply(state, policy, start, keys, progress):
        if not hasattr(policy, "logits"):
            raise FdgError(
                "explore=boltzmann(...) needs values of actions, which DQN, QR-DQN and C51 learn: give"
                " correlated_noise(...) to SAC, TD3 and CrossQ"
            )
        return state, Categorical(policy.logits / temperature).sample(keys)

    return Explorer(lambda action: (), apply)


def correlated_noise(deviation: float = 0.2, decay: float = 0.85) -> Explorer:
    """Adds time-correlated (Ornstein-Uhlenbeck) noise to the best action.

    `noise' = decay * noise + deviation * sqrt(1 - decay ** 2) * normal`, zero where an episode starts
    (Lillicrap et al. 2016, "Continuous control with deep reinforcement learning", arXiv 1509.02971, section
    3, in discrete time). Its stationary standard deviation is `deviation`.
    """

    def init(action):
        if not jnp.issubdtype(action.dtype, jnp.floating):
            raise FdgError(
                f"explore=correlated_noise(...) adds noise to actions, and these are {action.dtype}: give"
                " boltzmann(...) to learners of values"
            )
        return jnp.zeros_like(action)

    def apply(noise, policy, start, keys, progress):
        drawn = jax.vmap(lambda key, one: jax.random.normal(key, one.shape, one.dtype))(keys, noise)
        before = jnp.where(start.reshape(-1, *(1,) * (noise.ndim - 1)), 0.0, noise)
        noise = decay * before + deviation * (1.0 - decay**2) ** 0.5 * drawn
        return noise, jnp.clip(policy.mode() + noise, -1.0, 1.0)

    return Explorer(init, apply)


# --- rollouts for replay: with a memory or without, the bonus on them, and what of them is stored ---


class State(NamedTuple):
    """The state of an algorithm with replay."""

    learned: Any  # all that an update changes
    observation_statistics: Any  # as of `PPO`; None where observations are not normalised
    replay: ReplayState  # rows of B
    env_state: Any  # leading axis B
    observation: Observation  # [B, *obs]
    key: jax.Array
    iteration: jax.Array  # int32
    bonus: Any = None  # what `Agent.bonus` knows
    recollection: Recollection | None = None  # [B], of networks with a memory, or an explorer


def first_state(
    algorithm: Any,
    learned: Any,
    env_state: Any,
    observation: Any,
    action: jax.Array,
    recollection: Recollection | None,
    key: jax.Array,
) -> State:
    """The initial state; its replay buffer is made for `observation [B, *obs]` and `action [B, *action]`."""
    return State(
        learned=learned,
        observation_statistics=algorithm.normalizers.begin(algorithm.env.observation_space),
        replay=algorithm.buffer.init(observation, action, *stored_memory(recollection)),
        env_state=env_state,
        observation=observation,
        key=key,
        iteration=jnp.int32(0),
        bonus=algorithm._first_bonus(observation),
        recollection=recollection,
    )


class Collected(NamedTuple):
    """The results of a rollout."""

    env_state: Any  # leading axis B
    observation: Any  # [B, *obs], after the last step
    recollection: Recollection | None  # after the last step
    bonus: Any  # what `Agent.bonus` knows
    rows: Any  # [T, B] or [C, B], for `Replay.add`
    observations: Any  # [T, B, *obs], what the actions answered to
    metrics: dict[str, jax.Array]


def collect(
    algorithm: Any, state: Any, act: Callable[..., tuple[jax.Array, Any]], key: jax.Array
) -> Collected:
    """Steps all environments `num_steps` times.

    Args:
      algorithm: an algorithm with a `buffer`.
      state: has `env_state`, `observation`, `recollection` (None without a memory) and `bonus`.
      act: `(observation [B], recollection [B], keys [B]) -> (action [B], memory [B])`.
      key: one key.
    """
    buffer, first = algorithm.buffer, state.recollection
    each = getattr(buffer, "sequence_length", None)
    one_sequence = each == algorithm.num_steps

    def acting(observation: Any, recollection: Any, keys: jax.Array) -> tuple[Any, Any, Any]:
        action, memory = act(observation, recollection, keys)
        # Of a rollout that is one sequence only the first memory is stored.
        if each is None:
            return action, (None, None), memory
        return action, (recollection.start, None if one_sequence else stored(recollection)), memory

    begun = {"key": key, "env_state": state.env_state, "observation": state.observation}
    if first is None:
        env_state, observation, steps = rollout(
            lambda observation, keys: acting(observation, None, keys)[:2], **begun, **algorithm._rolling
        )
        recollection = None
    else:
        env_state, observation, recollection, steps = rollout_with_memory(
            acting, recollection=first, **begun, **algorithm._rolling
        )
    (observations, actions), (start, before), time_steps = steps
    if one_sequence:
        before = jax.tree.map(lambda x: x[None], stored(first))
    elif each is not None:
        before = jax.tree.map(lambda x: x[::each], before)
    bonus, time_steps, paid = algorithm._paid(state.bonus, time_steps)
    rows = buffer.cut(before, start, Step.of(observations, actions, time_steps))
    metrics = {**episode_metrics(time_steps), **paid}
    return Collected(env_state, observation, recollection, bonus, rows, observations, metrics)


def stored(recollection: Recollection) -> Any:
    """The network's memory, which replay stores."""
    memory = recollection.memory
    return memory.network if isinstance(memory, Remembered) else memory


def begin(network_memory: Any, explorer: Any, num_envs: int) -> Recollection | None:
    """The initial memory; None without one."""
    if network_memory is None and explorer is None:
        return None
    return Recollection(Remembered(network_memory, explorer), jnp.ones(num_envs, bool))


def empty(recollection: Recollection | None) -> Any:
    """The memory of an actor without steps so far; `()` without one."""
    return () if recollection is None else recollection.memory


def stored_memory(recollection: Recollection | None) -> tuple[Any, ...]:
    """The memory for `Replay.init`, if the network has one."""
    memory = None if recollection is None else stored(recollection)
    return () if memory is None else (memory,)
