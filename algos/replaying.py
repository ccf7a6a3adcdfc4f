"""What algorithms with replay are given as values: explorations and memories, and the settings of both.

Shapes: `B` environments.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, Literal, NamedTuple

import jax

from algos import registry
from algos.checks import check_two
from algos.rings import Recollection
from algos.values import Network, Policy, by_name
from fdg.arguments import check_takes, checked_names
from fdg.settings.fields import hyperparameter, own_value, require, require_not_negative, require_positive
from fdg.settings.given import check_same
from fdg.settings.parts import Part

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
        own = (
            registry.option("networks").own(algorithm, "network", "actor")
            if hasattr(algorithm, "network")
            else None
        )
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
