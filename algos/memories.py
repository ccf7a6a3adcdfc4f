"""Memories of recurrent networks: GRU, LSTM, minGRU, and a transformer with a window.

Each is a module: it maps a memory, inputs and episode starts to outputs and the memory after each step. An
episode's start resets the memory. Up to rounding, a whole sequence gives the same results as single steps.

Shapes: `T` steps, `N` memories, `H` units, `F` input features, `W` steps of a window, `L` layers, `M = W - 1`
earlier steps, `S = M + T`.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from algos import networks
from algos.layers import head, hidden_layers
from algos.networks import Bound, RecurrentNetwork
from algos.values import Layers
from envs import features_and_mask
from fdg.errors import FdgError, unknown_name

Kind = Literal["gru", "lstm", "mingru", "transformer"]
KINDS = ("gru", "lstm", "mingru", "transformer")


class Cells(NamedTuple):
    """The memory of an LSTM."""

    cell: jax.Array  # [N, H] float32
    hidden: jax.Array  # [N, H] float32


class Window(NamedTuple):
    """The memory of a transformer: the inputs of each layer at the last M steps."""

    inputs: jax.Array  # [N, L, M, H] float32, the newest last
    valid: jax.Array  # [N, M] bool, True for steps of this episode


@dataclasses.dataclass(frozen=True)
class MemoryKind:
    """A kind of memory and its sizes.

    Attributes:
      kind: "gru" (Cho et al. 2014, arXiv 1406.1078), "lstm" (Hochreiter and Schmidhuber 1997), "mingru" (Feng
        et al. 2024, arXiv 2410.01201), "transformer" (causal, with gates; Parisotto et al. 2019,
        arXiv 1910.06764).
      size: H, the width of the output.
      window: W, steps that each transformer layer attends to, the current one included.
      layers: transformer layers.
      heads: attention heads.

    Raises:
      FdgError: at construction, if the kind is unknown, or sizes do not fit.
    """

    kind: Kind = "gru"
    size: int = 128
    window: int = 32
    layers: int = 1
    heads: int = 4

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise unknown_name("memory", self.kind, KINDS)
        if self.kind != "transformer":
            return
        if self.window < 2 or self.layers < 1 or self.heads < 1:
            raise FdgError(
                f"memory_window={self.window}, memory_layers={self.layers}, memory_heads={self.heads}: a"
                " transformer has a window of at least two steps, a layer and a head"
            )
        if self.size % self.heads:
            raise FdgError(
                f"memory_heads={self.heads} does not divide memory_size={self.size}: use a divisor"
            )

    @classmethod
    def of(cls, sizes: Any, kind: Kind) -> "MemoryKind":
        """The kind of memory with its sizes from an `algos.replaying.NetworkMemory`."""
        return cls(kind, sizes.memory_size, sizes.memory_window, sizes.memory_layers, sizes.memory_heads)

    def empty(self, leading: tuple[int, ...]) -> Any:
        """The initial memory, with these leading axes in place of `N`.

        >>> MemoryKind("transformer", size=8, window=4).empty((3,)).inputs.shape
        (3, 1, 3, 8)
        """
        zeros = jnp.zeros((*leading, self.size), jnp.float32)
        match self.kind:
            case "lstm":
                return Cells(zeros, zeros)
            case "transformer":
                earlier = self.window - 1
                shape = (*leading, self.layers, earlier, self.size)
                return Window(jnp.zeros(shape, jnp.float32), jnp.zeros((*leading, earlier), bool))
        return zeros

    def module(self) -> nn.Module:
        """A module `(memory, inputs [T, N, F], start [T, N]) -> (output [T, N, H], memories [T, N, ...])`."""
        match self.kind:
            case "lstm":
                return ForgetfulLSTM(self.size, name="memory")
            case "mingru":
                return MinGRU(self.size, name="memory")
            case "transformer":
                return WindowedTransformer(self.size, self.window, self.layers, self.heads, name="memory")
        return ForgetfulGRU(self.size, name="memory")


class ForgetfulGRU(nn.Module):
    """A GRU that forgets its memory where an episode starts; equations and gradients in `gru_unroll`.

    Parameters are as in `flax.linen.GRUCell`.
    """

    size: int

    @nn.compact
    def __call__(self, memory: jax.Array, inputs: jax.Array, start: jax.Array) -> tuple[jax.Array, jax.Array]:  # noqa: D102
        cell = nn.GRUCell(self.size, name="gru")
        if self.is_initializing():
            cell(memory, inputs[0])
        memories = gru_unroll(cell.variables["params"], memory, inputs, start)
        return memories, memories


class ForgetfulLSTM(nn.Module):
    """An LSTM that forgets its memory where an episode starts.

    `c' = f * c + i * tanh(g)`, `h' = o * tanh(c')`, with gates `i`, `f` and `o`.

    The gates are sigmoids of linear functions of `x` and `h`; `g` is another linear function of both. The
    forget gate's bias starts at one (Jozefowicz et al. 2015, "An Empirical Exploration of Recurrent Network
    Architectures", section 2.2). Only the product with `h` is sequential.
    """

    size: int

    @nn.compact
    def __call__(self, memory: Cells, inputs: jax.Array, start: jax.Array) -> tuple[jax.Array, Cells]:  # noqa: D102
        steps, count = start.shape
        input_layer = nn.Dense(4 * self.size, use_bias=False, name="inputs")
        input_terms = input_layer(inputs.reshape(steps * count, -1)).reshape(steps, count, -1)
        kernel = self.param("kernel", nn.initializers.orthogonal(), (self.size, 4 * self.size), jnp.float32)
        bias = self.param("bias", nn.initializers.zeros_init(), (4 * self.size,), jnp.float32)
        forget_bias = np.repeat(np.array([0, 1, 0, 0], np.float32), self.size)

        def step(memory: Cells, row: tuple[jax.Array, jax.Array]) -> tuple[Cells, Cells]:
            input_term, start = row
            cell, hidden = (jnp.where(start[:, None], 0.0, x) for x in memory)
            gates = input_term + hidden @ kernel + (bias + forget_bias)[None]
            i, f, g, o = jnp.split(gates, 4, axis=-1)
            cell = jax.nn.sigmoid(f) * cell + jax.nn.sigmoid(i) * jnp.tanh(g)
            next_memory = Cells(cell, jax.nn.sigmoid(o) * jnp.tanh(cell))
            return next_memory, next_memory

        memories = jax.lax.scan(step, memory, (input_terms, start))[1]
        return memories.hidden, memories


class MinGRU(nn.Module):
    """`h' = (1 - z) * h + z * n`, with `z = sigmoid(x W_z + b_z)` and `n = x W_n + b_n`.

    No gate depends on `h`, so a parallel scan computes all steps (Feng et al. 2024, section 3.1).
    """

    size: int

    @nn.compact
    def __call__(self, memory: jax.Array, inputs: jax.Array, start: jax.Array) -> tuple[jax.Array, jax.Array]:  # noqa: D102
        steps, count = start.shape
        flat = inputs.reshape(steps * count, -1)
        update, new = (
            nn.Dense(self.size, name=name)(flat).reshape(steps, count, self.size) for name in ("z", "n")
        )
        z = jax.nn.sigmoid(update)
        keep = jnp.where(start[..., None], 0.0, 1.0 - z)

        # Each step is a linear function of the memory, (factor, term); `compose` applies two of them in turn.
        def compose(earlier: tuple, later: tuple) -> tuple[jax.Array, jax.Array]:
            return earlier[0] * later[0], later[0] * earlier[1] + later[1]

        factors, terms = jax.lax.associative_scan(compose, (keep, z * new))
        memories = factors * memory[None] + terms
        return memories, memories


class WindowedTransformer(nn.Module):
    """Causal attention over the last `window` steps of the episode, in layers with gates (GTrXL).

    Each layer attends to its own inputs at those steps, so several layers look back further. Inputs from the
    memory, before this sequence, have no gradient, as in Transformer-XL (Dai et al. 2019, arXiv 1901.02860,
    section 3.2). Positions enter by a learned bias for each head and distance.
    """

    size: int
    window: int
    layers: int
    heads: int

    @nn.compact
    def __call__(self, memory: Window, inputs: jax.Array, start: jax.Array) -> tuple[jax.Array, Window]:  # noqa: D102
        steps, count = start.shape
        earlier = self.window - 1
        x = nn.Dense(self.size, name="embedding")(inputs.reshape(steps * count, -1))
        x = x.reshape(steps, count, self.size)
        # The index of each step's episode: 0 is the memory's episode, -1 stands for no step.
        episode = jnp.cumsum(start.astype(jnp.int32), axis=0)  # [T, N]
        memory_episode = jnp.where(memory.valid, 0, -1).T  # [M, N]
        source_episode = jnp.concatenate([memory_episode, episode])  # [S, N]
        # Step t is at position M + t, and attends to itself and the M steps before it.
        distance = earlier + np.arange(steps)[:, None] - np.arange(earlier + steps)[None]  # [T, S]
        in_window = (distance >= 0) & (distance < self.window)
        visible = in_window[:, :, None] & (source_episode[None] == episode[:, None])  # [T, S, N]
        histories = []
        for layer in range(self.layers):
            past = jax.lax.stop_gradient(jnp.moveaxis(memory.inputs[:, layer], 1, 0))
            history = jnp.concatenate([past, x])  # [S, N, H]
            histories.append(history)
            block = GatedBlock(self.size, self.heads, name=f"layer_{layer}")
            x = block(x, history, visible, np.clip(distance, 0, earlier), self.window)
        # The memory after step t is positions t + 1 to t + M.
        rows = np.arange(steps)[:, None] + np.arange(1, self.window)[None]  # [T, M]
        inputs_after = jnp.stack([history[rows] for history in histories], axis=2)  # [T, M, L, N, H]
        valid = source_episode[rows] == episode[:, None]  # [T, M, N]
        inputs_after = jnp.where(valid[:, :, None, :, None], inputs_after, 0.0)
        memories = Window(jnp.transpose(inputs_after, (0, 3, 2, 1, 4)), jnp.moveaxis(valid, 1, 2))
        return nn.LayerNorm(name="norm")(x), memories


class GatedBlock(nn.Module):
    """Attention and a dense layer, each with a norm and a gate (Parisotto et al. 2019, section 3.2).

    `x [T, N, H]`, `history [S, N, H]` and its mask `visible [T, S, N]` to `[T, N, H]`.
    """

    size: int
    heads: int

    @nn.compact
    def __call__(  # noqa: D102
        self, x: jax.Array, history: jax.Array, visible: jax.Array, distance: np.ndarray, window: int
    ) -> jax.Array:
        norm = nn.LayerNorm(name="norm_1")
        query = self._split_heads(self._dense(norm(x), "query"))
        key_and_value = self._dense(norm(history), "key_and_value", 2)
        key, value = (self._split_heads(part) for part in jnp.split(key_and_value, 2, axis=-1))
        bias = self.param("distance", nn.initializers.zeros_init(), (self.heads, window), jnp.float32)
        scores = jnp.einsum("tnhd,snhd->nhts", query, key) / math.sqrt(self.size // self.heads)
        scores = scores + bias[:, distance][None]
        scores = jnp.where(jnp.moveaxis(visible, 2, 0)[:, None], scores, -1e9)
        attended = jnp.einsum("nhts,snhd->tnhd", jax.nn.softmax(scores), value).reshape(x.shape)
        x = Gate(self.size, name="gate_1")(x, nn.relu(self._dense(attended, "attended")))
        y = nn.relu(self._dense(nn.LayerNorm(name="norm_2")(x), "dense_1"))
        return Gate(self.size, name="gate_2")(x, nn.relu(self._dense(y, "dense_2")))

    def _dense(self, x: jax.Array, name: str, parts: int = 1) -> jax.Array:
        rows = nn.Dense(parts * self.size, name=name)(x.reshape(-1, x.shape[-1]))
        return rows.reshape(*x.shape[:-1], -1)

    def _split_heads(self, x: jax.Array) -> jax.Array:
        """`[T, N, H]` to `[T, N, heads, H / heads]`."""
        return x.reshape(*x.shape[:2], self.heads, -1)


class Gate(nn.Module):
    """A GRU-style gate between a layer's input `x` and its result `y`; initially mostly `x`.

    `r = sigmoid(y W_r + x U_r)`, `z = sigmoid(y W_z + x U_z - 2)`, `n = tanh(y W_n + (r * x) U_n)`, and
    `(1 - z) * x + z * n` (Parisotto et al. 2019, section 3.2, "Gated-Recurrent-Unit-type gating").
    """

    size: int

    @nn.compact
    def __call__(self, x: jax.Array, y: jax.Array) -> jax.Array:  # noqa: D102
        shape, x, y = x.shape, x.reshape(-1, self.size), y.reshape(-1, self.size)

        def dense(value: jax.Array, gates: int, name: str) -> list[jax.Array]:
            output = nn.Dense(gates * self.size, use_bias=False, name=name)(value)
            return jnp.split(output, gates, axis=-1)

        (yr, yz, yn), (xr, xz) = dense(y, 3, "of_y"), dense(x, 2, "of_x")
        bias = self.param("bias", nn.initializers.constant(2.0), (self.size,), jnp.float32)
        r, z = jax.nn.sigmoid(yr + xr), jax.nn.sigmoid(yz + xz - bias[None])
        n = jnp.tanh(yn + dense(r * x, 1, "of_reset")[0])
        return ((1.0 - z) * x + z * n).reshape(shape)


# --- the GRU over a sequence (Cho et al. 2014, arXiv 1406.1078), and its gradient ---
#
# With inputs `x`, memory `h`, elementwise `*`, and parameters as in `flax.linen.GRUCell`:
#
# `r = sigmoid(x W_ir + b_ir + h W_hr)`, `z = sigmoid(x W_iz + b_iz + h W_hz)`,
# `n = tanh(x W_in + b_in + r * (h W_hn + b_hn))`, `h' = (1 - z) * n + z * h`.
#
# The loop over steps contains only the three products with the memory; the backward loop contains three more.
# The other products are over the whole sequence: with the inputs before the loop, and for the kernels'
# gradients after the backward loop. JAX's own derivative would add up these gradients at every step.


class _Gates(NamedTuple):
    """One array for each equation: of the reset gate `r`, the update gate `z`, and the new memory `n`."""

    r: jax.Array
    z: jax.Array
    n: jax.Array


class _Steps(NamedTuple):
    """Residuals of each step for the backward pass, `[T, N, H]`."""

    memory: jax.Array  # after the step
    gates: _Gates
    memory_term: jax.Array  # h W_hn + b_hn


def gru_unroll(
    parameters: Mapping[str, Any], memory: jax.Array, inputs: jax.Array, start: jax.Array
) -> jax.Array:
    """The memory after each step, `[T, N, H]`; reset where an episode starts.

    `memory [N, H]` float32, before the first step; `inputs [T, N, F]` float32; `start [T, N]` bool.
    """
    flat = inputs.reshape(-1, inputs.shape[-1])
    # Three products, not one of three times the width: XLA on a CPU needs half the time.
    input_terms = (
        flat @ parameters[name]["kernel"] + parameters[name]["bias"][None] for name in ("ir", "iz", "in")
    )
    gates = _Gates(*(x.reshape(*start.shape, -1) for x in input_terms))
    kernels = _Gates(*(parameters[name]["kernel"] for name in ("hr", "hz", "hn")))
    return _recurrence(gates, start, memory, kernels, parameters["hn"]["bias"])


@jax.custom_vjp
def _recurrence(input_terms: _Gates, start: jax.Array, memory: jax.Array, kernels: _Gates, bias: jax.Array):
    """`gru_unroll` from the terms of the inputs, `[T, N, H]` each; `kernels` and `bias` are those of `h`."""
    return _run_steps(input_terms, start, memory, kernels, bias).memory


def _run_steps(input_terms, start, memory, kernels, bias) -> _Steps:
    def step(memory, row):
        input_term, start = row
        memory = jnp.where(start[:, None], 0.0, memory)
        r = jax.nn.sigmoid(input_term.r + memory @ kernels.r)
        z = jax.nn.sigmoid(input_term.z + memory @ kernels.z)
        memory_term = memory @ kernels.n + bias[None]
        n = jnp.tanh(input_term.n + r * memory_term)
        memory = (1.0 - z) * n + z * memory
        return memory, _Steps(memory, _Gates(r, z, n), memory_term)

    return jax.lax.scan(step, memory, (input_terms, start))[1]


def _forward(input_terms, start, memory, kernels, bias):
    """`_recurrence`, and the residuals for its backward pass."""
    steps = _run_steps(input_terms, start, memory, kernels, bias)
    return steps.memory, (start, memory, kernels, steps)


def _backward(residuals, gradient):
    """Gradients of `_recurrence`'s arguments from the gradients of each memory, `[T, N, H]`.

    `d_x` is the gradient of `x`; `d_gates` are the gradients of the sums inside `r`, `z` and `n`.
    """
    start, first, kernels, (memories, (r, z, n), memory_term) = residuals
    before = jnp.where(start[..., None], 0.0, jnp.concatenate([first[None], memories[:-1]]))
    # Derivatives of h' by the sums inside n and z, and of the sum inside n by the sum inside r.
    memory_by_n, memory_by_z = (1.0 - z) * (1.0 - n * n), (before - n) * z * (1.0 - z)
    n_by_r = memory_term * r * (1.0 - r)
    transposed = _Gates(*(kernel.T for kernel in kernels))

    def step(d_memory, row):
        gradient, memory_by_n, memory_by_z, n_by_r, r, z, start = row
        gradient += d_memory
        d_n, d_z = gradient * memory_by_n, gradient * memory_by_z
        d_gates = _Gates(d_n * n_by_r, d_z, d_n)
        d_before = (
            gradient * z
            + d_gates.r @ transposed.r
            + d_gates.z @ transposed.z
            + (d_gates.n * r) @ transposed.n
        )
        return jnp.where(start[:, None], 0.0, d_before), d_gates

    rows = (gradient, memory_by_n, memory_by_z, n_by_r, r, z, start)
    d_first, d_gates = jax.lax.scan(step, jnp.zeros_like(first), rows, reverse=True)
    d_memory_term = d_gates.n * r

    def flat(x):
        return x.reshape(-1, x.shape[-1])

    d_kernels = _Gates(*(flat(before).T @ flat(x) for x in (d_gates.r, d_gates.z, d_memory_term)))
    return d_gates, None, d_first, d_kernels, jnp.sum(flat(d_memory_term), axis=0)


_recurrence.defvjp(_forward, _backward)


# --- networks with a memory ---


def of_module(module: Any) -> RecurrentNetwork:
    """Wraps a Linen module of `(memory, observation, start)` with a method `initial_memory(B) -> memory`."""
    init, memory = Bound(_init, (module,)), Bound(_initial_memory, (module,))
    return RecurrentNetwork(init, memory, networks.of_module(module).apply)


def _init(module: Any, key: jax.Array, observation: Any, *more: jax.Array) -> Any:
    steps, num_envs = jax.tree.leaves(observation)[0].shape[:2]
    start, memory = jnp.zeros((steps, num_envs), bool), module.initial_memory(num_envs)
    return module.init(key, memory, observation, start, *more)["params"]


def _initial_memory(module: Any, num_envs: int) -> Any:
    return module.initial_memory(num_envs)


def step_types(network: RecurrentNetwork, parameters: Any, state: Any, memory: Any = None) -> Any:
    """Shapes and dtypes of the results of `unroll` for one step in all environments of a `state`.

    `state.recollection` is an `algos.rollout.Recollection`: the memory, and where an episode starts. `memory`
    is the network's memory; None: the one in `state.recollection`.
    """
    steps = features_and_mask(state.observation)[0], state.recollection.start
    steps = jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, *x.shape), x.dtype), steps)
    memory = state.recollection.memory if memory is None else memory
    return jax.eval_shape(network.unroll, parameters, memory, *steps)


class MemoryTrunk(nn.Module):
    """Dense layers, a memory, a dense layer and a head, over a sequence.

    `memory [B, ...]`, `inputs [T * B, F]` (or images, `[T * B, H, W, C]`, or several) and `start [T, B]` to
    outputs `[T, B, outputs]` and the memory after each step, `[T, B, ...]`. `extra [T * B, G]` are further
    inputs of the layer after the memory, such as actions. If `memory_kind` is None, there is neither a memory
    nor a layer after it, and no `extra`.

    With `num_agents`, each agent has a memory, and an axis `A` follows each axis `B`: `memory [B, A, ...]`,
    `inputs [T * B * A, F]`, outputs `[T, B, A, outputs]`.
    """

    layers: Layers
    memory_kind: MemoryKind | None
    outputs: int
    head_scale: float
    num_agents: int | None = None

    @nn.compact
    def __call__(  # noqa: D102
        self, memory: Any, inputs: Any, start: jax.Array, extra: jax.Array | None = None
    ) -> tuple[jax.Array, Any]:
        layers, kind = self.layers, self.memory_kind
        steps, *batch = start.shape if self.num_agents is None else (*start.shape, self.num_agents)
        # Only the memory is sequential; other layers take the whole sequence at once.
        x = hidden_layers(inputs, layers, layers.hidden or ())
        if kind is not None:
            count = math.prod(batch)
            memory = jax.tree.map(lambda x: x.reshape(count, *x.shape[len(batch) :]), memory)
            if self.num_agents is not None:
                start = jnp.repeat(start, self.num_agents, axis=1)
            output, memories = kind.module()(memory, x.reshape(steps, count, -1), start)
            memory = jax.tree.map(lambda x: x.reshape(steps, *batch, *x.shape[2:]), memories)
            x = hidden_layers(output.reshape(-1, kind.size), layers, (kind.size,), extra)
        x = head(x, self.outputs, self.head_scale, layers.torso)
        return x.reshape(steps, *batch, self.outputs), memory


def merge_axes(x: jax.Array) -> jax.Array:
    """Flattens the first two axes; a sharding of the first axis becomes a sharding of the rows."""
    return x.reshape(-1, *x.shape[2:])
