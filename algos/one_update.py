"""The driver of actor-critics with one update per rollout (A2C, IMPALA): shared methods, and the loss.

`class A2C(Agent, driver=one_update)` gets the `MEMBERS` of this module, unless it defines them itself.

Shapes: `T` steps of a rollout, `B` environments, `N` rows.
"""

import dataclasses
import types
from collections.abc import Callable
from typing import Any

import jax

import fdg
from algos import networks, on_policy
from algos.checks import check_actor_critic
from algos.losses import Decision, Distribution, ProximalLoss
from algos.memories import MemoryKind
from algos.normalize import normalize_rollout
from algos.on_policy import environment_major
from algos.recurrent import check_recurrent_actor_critic, recurrent_actor_critic_of
from algos.replaying import NetworkMemory
from algos.rings import time_major
from algos.rollout import Actor, Recollection, episode_metrics
from algos.sequences import ActorRecord, MemoryNetworks, RolloutSteps
from envs import Observation
from fdg.settings.fields import hyperparameter
from fdg.settings.parts import Part


@dataclasses.dataclass(frozen=True)
class WeightedLoss(Part):
    """The loss of an actor-critic with an entropy bonus."""

    entropy_coefficient: float = hyperparameter(0.01, "weight of the entropy bonus")
    value_coefficient: float = hyperparameter(0.5, "weight of the value loss")

    def of(
        self, policy_loss: jax.Array, value_loss: jax.Array, entropy: jax.Array
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The loss and its terms, scalars.

        >>> WeightedLoss(0.25, 0.5).of(1.0, 4.0, 8.0)[0]
        1.0
        """
        loss = policy_loss + self.value_coefficient * value_loss - self.entropy_coefficient * entropy
        terms = {"policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy}
        return loss, {"loss": loss, **terms}


def weighted_sum(
    policy_loss: jax.Array,
    value_loss: jax.Array,
    entropy: jax.Array,
    value_coefficient: float,
    entropy_coefficient: float,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """`WeightedLoss.of` with the coefficients as arguments, for users' algorithms."""
    return WeightedLoss(entropy_coefficient, value_coefficient).of(policy_loss, value_loss, entropy)


def proximal_loss(
    policy: Distribution,
    value: jax.Array,
    action: jax.Array,
    old_log_prob: jax.Array,
    old_value: jax.Array,
    advantage: jax.Array,
    target: jax.Array,
    **settings: Any,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """`ProximalLoss(**settings).of` with the minibatch's fields as arguments, for users' algorithms."""
    decision = Decision(old_log_prob, old_value)
    minibatch = types.SimpleNamespace(action=action, decision=decision, advantage=advantage, target=target)
    return ProximalLoss(**settings).of(policy, value, minibatch)


def over_time(function: Callable[[Observation], Any], observation: Any) -> Any:
    """Applies a function of rows `[N, *obs]` to observations `[T, B, *obs]`; results are `[T, B, ...]`.

    A network with a memory gets `RolloutSteps` as sequences.
    """
    if isinstance(observation, RolloutSteps):
        num_steps, rows = len(observation.start), observation.sequences()
    else:
        num_steps = jax.tree.leaves(observation)[0].shape[0]
        rows = jax.tree.map(environment_major, observation)
    return jax.tree.map(lambda x: time_major(x, num_steps), function(rows))


def initial_state(self: Any, key: jax.Array) -> on_policy.State:
    """The initial state."""
    return on_policy.begin(self, key, memory=self._memory and self._memory.begin)


def iterate_once(self: Any, state: Any) -> tuple[Any, dict[str, jax.Array]]:
    """One rollout of all environments, and one update on it."""
    if state.recollection is None:
        return on_policy.iteration(self, state, learn=lambda *arguments: self.learn(*arguments[:3]))

    def learn(learned, running, trajectory, key):
        memory = state.recollection.memory
        learned, (*running, _), metrics = self.learn(learned, (*running, memory), trajectory)
        return learned, running, metrics

    return on_policy.iteration(self, state, self.act_with_memory, learn)


@fdg.fragment("actor", in_axes=(None, None, 0, 0, 0), name="remember")
def act_with_memory(self, parameters, statistics, observation, recollection, keys):
    """`act` for a network with a memory: actions, an `ActorRecord`, and the next memory, all `[B]`."""
    sequences = self._memory.as_sequences(observation, recollection)
    action, decision = self.act(parameters, statistics, sequences, keys)
    memory = self._memory.next_memory(parameters, self.normalizers.seen(statistics, sequences))
    return action, ActorRecord(decision, recollection.start, memory), memory


@fdg.fragment("learner", in_axes=(None, 0, 1), out_axes=(None, 0, None), name="learn")
def learn_once(self, learned, running, trajectory):
    """One update of parameters and optimiser on a rollout `[T, B]`, then of the statistics.

    With a memory, the last entry of `running` is the memory before the rollout, `[B, ...]`.
    """
    parameters, optimizer_state, *statistics = learned
    normalized, running, statistics = normalize_rollout(
        self.normalizers, statistics, running, trajectory, self.discount
    )
    if self._memory is not None:
        normalized = self._memory.prepare_rollout(normalized, running[-1])
    gradient, losses = self.gradient(parameters, normalized)
    learned = (*self.update(gradient, optimizer_state, parameters), *statistics)
    return learned, running, {**episode_metrics(trajectory.time_step), **losses}


@fdg.fragment("gradient", in_axes=(None, 1), out_axes=None, name="gradient")
def gradient_of_rollout(self, parameters, trajectory):
    """Gradient of the loss over a rollout `[T, B]`, and the loss's terms."""
    return jax.grad(self.loss, has_aux=True)(parameters, trajectory)


def actor(self: Any, state: on_policy.State) -> Actor:
    """The actor with these parameters and statistics; it carries its own memory."""
    if self._memory is None:
        return on_policy.actor(self, state)

    def act(memory, observation, start, keys, greedy):
        normalized = self.normalizers.seen(state.observation_statistics, observation)
        sequences = self._memory.as_sequences(normalized, Recollection(memory, start))
        policy, _ = self.policy_and_value(state.parameters, sequences)
        return self._choose_actions(policy, keys, greedy), self._memory.next_memory(
            state.parameters, sequences
        )

    return Actor(self._memory.begin, act)


def memory_of(self: Any) -> MemoryNetworks | None:
    """The network with its memory: the user's, or the default by the setting `memory`. None: no memory."""
    if not (
        self.memory if self.network is None else hasattr(networks.user_network(self, "network"), "unroll")
    ):
        return None
    kind = None if self.memory is None else MemoryKind.of(self.memory_settings, self.memory)
    network = recurrent_actor_critic_of(self, kind)
    return MemoryNetworks((network,), self.env.action_space.shape, self.num_steps, burn_in=0)


def check_network(self: Any, state: on_policy.State) -> None:
    """Refuses a network whose outputs do not fit the action space."""
    if self._memory is None:
        check_actor_critic(self, self._network, state.parameters)
    else:
        check_recurrent_actor_critic(self, self._memory.networks[0], state)


# Methods, settings and properties that each class with `driver=one_update` gets.
MEMBERS = {
    "init": initial_state,
    "iterate": iterate_once,
    "actor": actor,
    "act_with_memory": act_with_memory,
    "learn": learn_once,
    "gradient": gradient_of_rollout,
    "updates_per_iteration": property(lambda self: 1),
    "check_when_traced": check_network,
    "policy_and_value": lambda self, parameters, observation: networks.policy_and_value(
        self._network, parameters, observation, self.env.action_space
    ),
    "_memory": property(memory_of),
    "_network": property(
        lambda self: self._memory.network(0) if self._memory else networks.actor_critic_of(self)
    ),
    "memory_settings": NetworkMemory(),
}
