"""A decoder-only transformer: parameters, logits of whole sequences, and cached decoding.

Parameters are a plain dict, float32 (letters as in `algos.language.layers`; `F`: width inside a SwiGLU):

    {"embedding": [V, D], "norm": [D], "head": [D, V] (unless tied),
     "layers": {"0": {"attention_norm": [D], "mlp_norm": [D],
                      "attention": {"query": {"kernel": [D, H*h]}, "key", "value", "output", (norms)},
                      "mlp": {"gate": {"kernel": [D, F]}, "up", "down"}}, "1": ...}}

With adapters: `{"base": <that>, "adapters": {"layers": {"0": {"attention": {"query": {"a", "b"}}}}}}`.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from algos import registry
from algos.language import layers
from algos.language.config import DecoderConfig
from algos.language.layers import Weights

# Up to this vocabulary size, embeddings are looked up by a matrix product: then their gradient is also a
# matrix product, not a scatter.
_SMALL_VOCABULARY = 1024
# `packed_rows` (see `DecoderConfig`) of `recompute_cache`, if the config has None: 8 for each 128 sequences,
# so that many devices can divide them.
_PACKED_ROWS, _SEQUENCES = 8, 128
_LOGITS_AT_ONCE = 1 << 20  # numbers [T, V] that `log_probs` computes at a time


class Cache(NamedTuple):
    """Keys and values of prompts, and of up to `C` tokens after each prompt.

    The columns after the prompt are a ring buffer. In each step, all rows write their next token to one
    column, `step % C`, even if they began at different steps. A row that takes a new prompt also continues
    at this column.
    """

    keys: tuple[jax.Array, ...]  # per layer, [N, K, P + C, h]; `values` likewise
    values: tuple[jax.Array, ...]
    prompt: jax.Array  # mask of the prompt [N, P] bool
    position: jax.Array  # [N] int32, of the next token
    generated: jax.Array  # [N] int32, the number of tokens after the prompt
    step: jax.Array  # calls of `decode` so far, [] int32


@dataclasses.dataclass(frozen=True)
class Decoder:
    """A decoder (Llama, Qwen2 or Qwen3) as pure functions of parameters.

    `N` sequences of `T` tokens, vocabulary `V`, width `D`. `segments` [N, T] int32 group tokens: a token
    attends to earlier tokens with its own number; 0 is padding, anywhere.

    >>> decoder = Decoder(DecoderConfig.tiny(17))
    >>> parameters = jax.eval_shape(decoder.init, jax.random.key(0))
    >>> tokens, segments = jnp.zeros((2, 5), jnp.int32), jnp.ones((2, 5), jnp.int32)
    >>> jax.eval_shape(decoder.apply, parameters, tokens, segments).shape
    (2, 5, 17)
    """

    config: DecoderConfig

    def init(self, key: jax.Array) -> Weights:
        """Initial parameters: normal weights (std `initializer_range`), zero biases, ineffective adapters."""
        c = self.config
        count = c.num_layers * 7 + 2  # the linear layers of the blocks, the embedding and the head
        keys = jax.random.split(key, count)

        def normal(key: jax.Array, *shape: int) -> jax.Array:
            return c.initializer_range * jax.random.normal(key, shape)

        kernels = {  # of all blocks, `[L, in, out]`: XLA compiles one random operation, not L
            name: jax.vmap(lambda key, shape=shape: normal(key, *shape))(keys[index:-2:7])
            for index, (name, (_, *shape, _)) in enumerate(c.linear_layers.items())
        }
        blocks: Weights = {}
        for i in range(c.num_layers):
            norms = {"attention_norm": jnp.ones(c.hidden_size), "mlp_norm": jnp.ones(c.hidden_size)}
            block: Weights = {"attention": {}, "mlp": {}, **norms}
            for name, (part, _, outputs, has_bias) in c.linear_layers.items():
                bias = {"bias": jnp.zeros(outputs)} if has_bias else {}
                block[part][name] = {"kernel": kernels[name][i], **bias}
            if c.qk_norm:
                block["attention"] |= {"query_norm": jnp.ones(c.width), "key_norm": jnp.ones(c.width)}
            blocks[str(i)] = block
        base: Weights = {
            "embedding": normal(keys[-2], c.vocab_size, c.hidden_size),
            "layers": blocks,
            "norm": jnp.ones(c.hidden_size),
        }
        if not c.tie_embeddings:
            base["head"] = normal(keys[-1], c.hidden_size, c.vocab_size)
        return self._with_adapters(base, jax.random.fold_in(key, count)) if c.lora_rank else base

    def with_adapters(self, base: Weights, key: jax.Array) -> Weights:
        """Adds adapters, which have no effect yet (`b` is zero), to parameters."""
        # `jax.jit` sorts dicts, and files store tensors in any order; adapters must not depend on either.
        return self._with_adapters(jax.tree.map(lambda x: x, base), key)

    def _with_adapters(self, base: Weights, key: jax.Array) -> Weights:
        """`with_adapters`; random numbers are drawn in the order of the dicts of `base`."""
        c = self.config
        names = [(part, name) for part in ("attention", "mlp") for name in base["layers"]["0"][part]]
        names = [(part, name) for part, name in names if name in c.lora_targets]
        keys = iter(jax.random.split(key, c.num_layers * len(names)))

        def adapter(kernel: jax.Array) -> Weights:
            rows, columns = kernel.shape
            bound = rows**-0.5  # as in PEFT: He et al.'s uniform initialisation with slope sqrt(5)
            a = jax.random.uniform(next(keys), (rows, c.lora_rank), kernel.dtype, -bound, bound)
            return {"a": a, "b": jnp.zeros((c.lora_rank, columns), kernel.dtype)}

        blocks: dict[str, Any] = {}
        for i in range(c.num_layers):
            block: dict[str, Any] = {}
            for part, name in names:
                block.setdefault(part, {})[name] = adapter(base["layers"][str(i)][part][name]["kernel"])
            blocks[str(i)] = block
        return {"base": base, "adapters": {"layers": blocks}}

    @property
    def parameter_rules(self) -> tuple[tuple[str, Any], ...]:
        """How a policy may split the parameters: see `algos.language.sharding`."""
        return registry.option("split parameters").tensor_parallel()

    def cast(self, parameters: Weights) -> Weights:
        """Casts parameters to the compute dtype; use it before a loop that reads them many times."""
        dtype = self._dtype(parameters)
        return jax.tree.map(lambda x: x.astype(dtype), parameters)

    def hidden(
        self, parameters: Weights, tokens: jax.Array, segments: jax.Array, positions: jax.Array | None = None
    ) -> jax.Array:
        """Hidden states after the last norm, which the head takes: [N, T, D], in the compute dtype.

        `tokens` and `segments` are [N, T] int32, where segment 0 is padding. `positions` are [N, T] int32;
        None: they are counted from the start of each segment.
        """
        return self._run_sequences(parameters, tokens, segments, positions)[0]

    def apply(
        self, parameters: Weights, tokens: jax.Array, segments: jax.Array, positions: jax.Array | None = None
    ) -> jax.Array:
        """Logits of the next token at each position: [N, T, V] float32."""
        return self.logits(parameters, self.hidden(parameters, tokens, segments, positions))

    def logits(self, parameters: Weights, hidden: jax.Array) -> jax.Array:
        """Applies the head: hidden states [..., D] to logits [..., V] float32."""
        base = parameters.get("base", parameters)
        head = base["embedding"].T if self.config.tie_embeddings else base["head"]
        dtype = jnp.promote_types(hidden.dtype, jnp.float32)
        return jnp.matmul(hidden, head.astype(hidden.dtype), preferred_element_type=dtype)

    def log_probs(
        self, parameters: Weights, tokens: jax.Array, segments: jax.Array, temperature: float = 1.0
    ) -> jax.Array:
        """Log-probability of each token given earlier ones of its segment: [N, T] float32; 0 for the first.

        Logits are computed for a few positions at a time, and recomputed for the gradient.
        """
        hidden = self.hidden(parameters, tokens, segments)
        return self.token_log_probs(parameters, hidden, tokens, segments, temperature)[0]

    def on_packed_rows(self, function: Any, tokens: jax.Array, segments: jax.Array) -> Any:
        """Calls a function on sequences; if `packed_rows` is set, packs them into rows without their padding.

        `function` maps `(tokens [rows, T], segments [rows, T])` to a pytree of [rows, T, ...]. A row is a
        sequence, or several packed ones with a segment each. `segments` [N, T] int32 are 1 for tokens, 0 for
        padding.
        """
        rows = self.config.packed_rows
        if rows is None:
            return function(tokens, segments)
        return registry.option("packed rows").without_padding(function, tokens, segments, rows)

    def token_log_probs(
        self,
        parameters: Weights,
        hidden: jax.Array,
        tokens: jax.Array,
        segments: jax.Array,
        temperature: float = 1.0,
    ) -> tuple[jax.Array, jax.Array]:
        """`log_probs` from `hidden`, and the entropy of each token's distribution: [N, T] float32."""
        n, t = tokens.shape
        size = min(t, max(1, _LOGITS_AT_ONCE // self.config.vocab_size))  # positions of a chunk
        padding = -t % size
        next_tokens = jnp.pad(tokens[:, 1:], ((0, 0), (0, 1 + padding)))
        chunks = jnp.pad(hidden, ((0, 0), (0, padding), (0, 0))).reshape(n, -1, size, hidden.shape[-1])

        @jax.checkpoint
        def score_chunk(hidden: jax.Array, next_tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
            log_probs = jax.nn.log_softmax(self.logits(parameters, hidden) / temperature)
            chosen = jnp.arange(self.config.vocab_size)[None, None] == next_tokens[..., None]
            entropy = -jnp.sum(jnp.exp(log_probs) * log_probs, axis=-1)
            return jnp.sum(jnp.where(chosen, log_probs, 0.0), axis=-1), entropy

        if chunks.shape[1] == 1:
            scores = score_chunk(chunks[:, 0], next_tokens)
        else:
            stacked = jax.lax.map(
                lambda chunk: score_chunk(*chunk),
                (jnp.moveaxis(chunks, 1, 0), jnp.moveaxis(next_tokens.reshape(n, -1, size), 1, 0)),
            )
            scores = jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1).reshape(n, -1), stacked)
        same_segment = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)
        log_prob, entropy = (
            jnp.pad(jnp.where(same_segment, x[:, : t - 1], 0.0), ((0, 0), (1, 0))) for x in scores
        )
        return log_prob, entropy

    def prefill(
        self, parameters: Weights, tokens: jax.Array, segments: jax.Array, new_tokens: int
    ) -> tuple[jax.Array, Cache]:
        """Logits [N, V] float32 after each prompt, and a cache with room for `new_tokens` (C) more tokens.

        `tokens` [N, P] int32 are left-padded, so the last column has no padding. `segments` [N, P] int32 are
        1 for tokens, 0 for padding.
        """
        hidden, keys, values = self._run_sequences(parameters, tokens, segments, None)
        padding = ((0, 0), (0, 0), (0, max(new_tokens, 1)), (0, 0))
        prompt = segments > 0
        length = jnp.sum(prompt, axis=1, dtype=jnp.int32)
        cache = Cache(
            tuple(jnp.pad(x, padding) for x in keys),
            tuple(jnp.pad(x, padding) for x in values),
            prompt, length, jnp.zeros_like(length), jnp.int32(0),
        )  # fmt: skip
        return self.logits(parameters, hidden[:, -1]), cache

    def recompute_cache(
        self,
        parameters: Weights,
        tokens: jax.Array,
        mask: jax.Array,
        generated: jax.Array,
        length: jax.Array,
        step: jax.Array,
    ) -> Cache:
        """Recomputes the cache of prompts and generated tokens, with new parameters.

        Args:
          tokens, mask: [N, P], of left-padded prompts.
          generated: [N, C] int32, right-padded tokens after each prompt.
          length: [N] int32, the number of generated tokens.
          step: [N] int32, the value of the cache's `step` when each row's first token was decoded. The new
            cache's `step` is 0.
        """
        prompt_width, capacity = tokens.shape[1], generated.shape[1]
        all_mask = jnp.concatenate([mask, jnp.arange(capacity)[None] < length[:, None]], axis=1)

        def keys_and_values(tokens: jax.Array, segments: jax.Array) -> Any:
            pair = self._run_sequences(parameters, tokens, segments, None)[1:]
            return jax.tree.map(lambda x: jnp.swapaxes(x, 1, 2), pair)

        all_tokens = jnp.concatenate([tokens, generated], axis=1)
        rows = self.config.packed_rows or _PACKED_ROWS * max(1, len(tokens) // _SEQUENCES)
        pair = registry.option("packed rows").without_padding(keys_and_values, all_tokens, all_mask, rows)
        keys, values = jax.tree.map(lambda x: jnp.swapaxes(x, 1, 2), pair)
        source = ((jnp.arange(capacity)[None] - step[:, None]) % capacity)[:, None, :, None]

        def in_ring_order(x: jax.Array) -> jax.Array:
            after = jnp.take_along_axis(x[:, :, prompt_width:], source, axis=2)
            return jnp.concatenate([x[:, :, :prompt_width], after], axis=2)

        return Cache(
            tuple(map(in_ring_order, keys)), tuple(map(in_ring_order, values)), mask,
            jnp.sum(all_mask, axis=1, dtype=jnp.int32), length, jnp.int32(0),
        )  # fmt: skip

    def decode(self, parameters: Weights, cache: Cache, token: jax.Array) -> tuple[jax.Array, Cache]:
        """Reads one token [N] int32 per row; returns logits [N, V] float32 of the next one, and the cache."""
        c, prompt_width = self.config, cache.prompt.shape[1]
        base, adapters = _base_and_adapters(parameters)
        capacity = cache.keys[0].shape[2] - prompt_width
        column = cache.step % capacity
        generated = jnp.minimum(cache.generated + 1, capacity)
        # How many steps ago each column after the prompt was written. A row reads the columns that were
        # written since its response began.
        age = (column - jnp.arange(capacity)) % capacity
        mask = jnp.concatenate([cache.prompt, age[None] < generated[:, None]], axis=1)
        if c.sliding_window is not None:
            start = cache.position - cache.generated - prompt_width  # the position of the row's first column
            positions = jnp.concatenate(
                [start[:, None] + jnp.arange(prompt_width)[None], cache.position[:, None] - age[None]], axis=1
            )
            window_mask = mask & (cache.position[:, None] - positions < c.sliding_window)
        x = self._embed(base, token[:, None])
        rotation = layers.rotary(c, cache.position[:, None], cache.position[:, None] + 1, x.dtype)
        keys, values = [], []
        for i in range(c.num_layers):
            slides = c.sliding_window is not None and i >= c.first_sliding_layer
            x, k, v = _block(
                c, base["layers"][str(i)], adapters.get(str(i), {}), x, rotation,
                window_mask if slides else mask, (cache.keys[i], cache.values[i], prompt_width + column),
            )  # fmt: skip
            keys.append(k)
            values.append(v)
        x = layers.rms_norm(base["norm"], x, c.rms_norm_eps)
        cache = cache._replace(
            keys=tuple(keys), values=tuple(values), position=cache.position + 1, generated=generated,
            step=cache.step + 1,
        )  # fmt: skip
        return self.logits(parameters, x[:, 0]), cache

    def logits_dtype(self, parameters: Weights) -> Any:
        """float32, or the parameters' dtype if it is wider."""
        return jnp.promote_types(self._dtype(parameters), jnp.float32)

    def _dtype(self, parameters: Weights) -> Any:
        base = parameters.get("base", parameters)
        return jnp.bfloat16 if self.config.dtype == "bfloat16" else base["embedding"].dtype

    def _embed(self, base: Weights, tokens: jax.Array) -> jax.Array:
        table = base["embedding"].astype(self._dtype(base))
        if self.config.vocab_size <= _SMALL_VOCABULARY and tokens.shape[1] > 1:
            rows = jax.nn.one_hot(tokens, self.config.vocab_size, dtype=table.dtype)
            return jnp.matmul(rows, table, precision=jax.lax.Precision.HIGHEST)
        return table[tokens]

    def _run_sequences(
        self, parameters: Weights, tokens: jax.Array, segments: jax.Array, positions: jax.Array | None
    ) -> tuple[jax.Array, list[jax.Array], list[jax.Array]]:
        """`hidden` of whole sequences, and each layer's keys and values [N, K, T, h]."""
        c = self.config
        base, adapters = _base_and_adapters(parameters)
        if positions is None:
            positions = positions_of(segments)
        t = tokens.shape[1]
        distance = jnp.arange(t)[:, None] - jnp.arange(t)[None]  # how far back each token is
        same_segment = (segments[:, :, None] == segments[:, None, :]) & (segments[:, None, :] > 0)
        mask = same_segment & (distance >= 0)[None]
        window_mask = mask if c.sliding_window is None else mask & (distance < c.sliding_window)[None]
        x = self._embed(base, tokens)
        num_later = positions_of(segments[:, ::-1])[:, ::-1]  # later tokens of the same segment
        rotation = layers.rotary(c, positions, positions + num_later + 1, x.dtype)
        block = jax.checkpoint(_block, static_argnums=0) if c.remat else _block
        keys, values = [], []
        for i in range(c.num_layers):
            x, k, v = block(
                c, base["layers"][str(i)], adapters.get(str(i), {}), x, rotation,
                window_mask if i >= c.first_sliding_layer else mask,
            )  # fmt: skip
            keys.append(k)
            values.append(v)
        return layers.rms_norm(base["norm"], x, c.rms_norm_eps), keys, values


def positions_of(segments: jax.Array) -> jax.Array:
    """Positions [N, T] int32 within each run of equal segments.

    >>> positions_of(jnp.array([[0, 0, 1, 1, 1, 2, 2]])).tolist()
    [[0, 1, 0, 1, 2, 0, 1]]
    """
    places = jnp.arange(segments.shape[1], dtype=jnp.int32)[None]
    starts = jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)))
    return places - jax.lax.cummax(jnp.where(starts, places, 0), axis=1)


def _base_and_adapters(parameters: Weights) -> tuple[Weights, Weights]:
    if "base" not in parameters:
        return parameters, {}
    return parameters["base"], parameters["adapters"]["layers"]


def _with_adapters(weights: Weights, adapters: Weights) -> Weights:
    """A block's weights, with `a` and `b` in those linear layers that have an adapter."""
    if not adapters:
        return weights
    merged = dict(weights)
    for part, each in adapters.items():
        merged[part] = {**weights[part], **{name: {**weights[part][name], **ab} for name, ab in each.items()}}
    return merged


# A jitted function, so that blocks are traced once, not once per layer.
@functools.partial(jax.jit, static_argnums=0)
def _block(
    config: DecoderConfig,
    weights: Weights,
    adapters: Weights,
    x: jax.Array,
    rotation: tuple[jax.Array, jax.Array],
    mask: jax.Array,
    cached: Any = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The output of one block, and its keys and values [N, K, S, h].

    `x` are whole sequences [N, T, D], with `mask` [N, T, T]; or one token per row [N, 1, D], with `mask` [N,
    S]. In the latter case `cached` is (keys, values, column), and the token's key and value are written to
    that column.
    """

    def in_cache(new: jax.Array, index: int) -> jax.Array:
        new = jnp.swapaxes(new, 1, 2)
        if cached is None:
            return new
        return jax.lax.dynamic_update_slice_in_dim(cached[index], new, cached[2], axis=2)

    weights = _with_adapters(weights, adapters)
    scale = config.lora_alpha / config.lora_rank if config.lora_rank else 0.0
    normed = layers.rms_norm(weights["attention_norm"], x, config.rms_norm_eps)
    q, k, v = layers.project_heads(config, weights["attention"], normed, rotation, scale)
    keys, values = in_cache(k, 0), in_cache(v, 1)
    heads = layers.attend(q, keys, values, mask if cached is None else mask[:, None])
    x = x + layers.linear(weights["attention"]["output"], heads, scale)
    normed = layers.rms_norm(weights["mlp_norm"], x, config.rms_norm_eps)
    return x + layers.swiglu(weights["mlp"], normed, scale), keys, values
