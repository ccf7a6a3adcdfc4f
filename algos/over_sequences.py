"""Networks with a memory as feed-forward networks whose observations are sequences.

A loss that applies a network to the observations of transitions `[N]` applies it to sequences unchanged: its
rows are then the steps of all sequences, `[N * L]`.

Letters in shapes: `N` sequences, `K` steps of burn-in, `L` steps that are learned from, `T = K + L`.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from algos.given import Network
from algos.recurrent import RecurrentNetwork
from envs import Observation, features_and_mask


class Observed(NamedTuple):
    """Observations of sequences, `K` steps of burn-in and `L` that are learned from, for `over_sequences`."""

    memory: Any  # [N, *memory] before the first step
    burn_in: Any  # (observation [N, K, *obs], start [N, K])
    observation: Observation  # [N, L, *obs]
    start: jax.Array  # [N, L] bool
    final: Any = None  # [N, L, *obs], what windows led to, to be valued in place of `observation`
    last: Any = None  # [N, L] int32, the last step of each window, after whose memory `final` comes


def over_sequences(network: RecurrentNetwork, part: int | None = None) -> Network:
    """A network with a memory as one without, whose observations are sequences, `Observed [N]`.

    `apply` gives an output for each step after the burn-in, `[N * L, ...]`, as a feed-forward network does
    for rows. So a loss over transitions is a loss over sequences, and gradients flow through the memory from
    the first step after the burn-in on (R2D2, section 3). What follows the observation, such as actions
    `[N * L, ...]`, goes to `unroll` as further arguments, `[T, B, ...]`.

    Args:
      network: with a memory.
      part: where several networks remember, which of their memories is this one's; None: there is one.
    """
    return Network(_InitRows(network), _ApplyOverSequences(network, part))


def one_step(observation: Observation, memory: Any, start: jax.Array) -> Observed:
    """Observations `[N, *obs]` as sequences of one step, each after a memory of its own."""
    first, begins = jax.tree.map(lambda x: x[:, None], (observation, start))
    nothing = jax.tree.map(lambda x: x[:, :0], (first, begins))
    return Observed(memory, nothing, first, begins)


def memory_after(network: RecurrentNetwork, parameters: Any, observed: Observed, *more: jax.Array) -> Any:
    """The memory after the last step of sequences: `[N, ...]`."""
    features, _ = separated(observed)
    return jax.tree.map(lambda x: x[-1], _unrolled(network, parameters, features, *more)[1])


def separated(observation: Any) -> tuple[Any, jax.Array | None]:
    """`envs.features_and_mask`, of `Observed` too: features, and masks of the rows `[N * L, ...]`."""
    if not isinstance(observation, Observed):
        return features_and_mask(observation)
    earlier, begins = observation.burn_in
    features, mask = features_and_mask(observation.observation)
    found = observation._replace(observation=features, burn_in=(features_and_mask(earlier)[0], begins))
    if observation.final is not None:
        final, mask = features_and_mask(observation.final)
        found = found._replace(final=final)
    return found, None if mask is None else _rows(mask)


def _unrolled(network: RecurrentNetwork, parameters: Any, observed: Observed, *more: Any) -> tuple[Any, Any]:
    """Outputs `[L, N, ...]` of the steps after the burn-in, and memories after each."""
    memory, (earlier, begins) = observed.memory, observed.burn_in
    time_first = _time_first
    if begins.shape[1]:
        held = jax.lax.stop_gradient(parameters)
        # Whatever else the network takes changes no memory.
        none = [jnp.zeros((begins.shape[1], *x.shape[1:]), x.dtype) for x in more]
        earlier = jax.tree.map(time_first, earlier)
        *_, memories = network.unroll(held, memory, earlier, time_first(begins), *none)
        memory = jax.lax.stop_gradient(jax.tree.map(lambda x: x[-1], memories))
    observation = jax.tree.map(time_first, observed.observation)
    *output, memories = network.unroll(parameters, memory, observation, time_first(observed.start), *more)
    return output[0] if len(output) == 1 else tuple(output), memories


@dataclasses.dataclass(frozen=True)
class _ApplyOverSequences:
    network: RecurrentNetwork
    part: int | None = None

    def __call__(self, parameters: Any, observed: Observed, *more: jax.Array) -> Any:
        if self.part is not None:
            observed = observed._replace(memory=observed.memory[self.part])
        count, length = observed.start.shape
        steps = [_time_first(x.reshape(count, length, *x.shape[1:])) for x in more]
        output, memories = _unrolled(self.network, parameters, observed, *steps)
        if observed.final is None:
            return jax.tree.map(lambda x: _rows(_time_first(x)), output)
        memories = jax.tree.map(_time_first, memories)
        if observed.last is not None:
            memories = jax.tree.map(
                lambda x: jax.vmap(lambda steps, at: steps[at])(x, observed.last), memories
            )
        final, memories = jax.tree.map(_rows, (observed.final, memories))
        begins = jnp.zeros((1, count * length), bool)
        final = jax.tree.map(lambda x: x[None], final)
        *output, _ = self.network.unroll(parameters, memories, final, begins, *(x[None] for x in more))
        rows = jax.tree.map(lambda x: x[0], output)
        return rows[0] if len(rows) == 1 else tuple(rows)


@dataclasses.dataclass(frozen=True)
class _InitRows:
    network: RecurrentNetwork

    def __call__(self, key: jax.Array, observation: Any, *more: jax.Array) -> Any:
        return self.network.init(key, *jax.tree.map(lambda x: x[None], (observation, *more)))


def _time_first(x: jax.Array) -> jax.Array:
    """`[N, L, ...]` to `[L, N, ...]`, and back."""
    return x.swapaxes(0, 1)


def _rows(x: jax.Array) -> jax.Array:
    """Steps `[N, L, ...]` as rows `[N * L, ...]`: a split of the sequences stays a split of the rows."""
    return x.reshape(-1, *x.shape[2:])
