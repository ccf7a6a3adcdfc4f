"""Responses to prompts, their log-probabilities, and the rollout of an iteration in micro-batches.

Each micro-batch gets its rewards as soon as it is generated; later batches may start early (`agent.ahead`).
Problem `j M + m` of an iteration is in micro-batch `m`, so a batch that is sharded over devices stays sharded
in every micro-batch.

Shapes: `B` prompts of an iteration, `G` responses to each, `N = B * G`; `M` micro-batches of `b = B / M`
prompts; `P` tokens of a prompt (left-padded), `R` of a response (right-padded); `a` iterations that the
stream generates ahead (`agent.ahead`).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from algos import registry
from algos.rlhf.objective import masked_mean
from algos.rlhf.updates import join_micro_batches, split_micro_batches
from envs.text import Prompts, Reward


class Responses(NamedTuple):
    """Responses with their prompts."""

    prompts: Prompts  # tokens [N, P] int32, mask [N, P] bool
    tokens: jax.Array  # [N, R] int32
    mask: jax.Array  # [N, R] bool: False for padding
    policy_mask: jax.Array  # [N, R] bool: the policy's tokens; others are a tool's, or a game's


class Rollout(NamedTuple):
    """Responses to some prompts; those to the same prompt are contiguous."""

    responses: Responses  # [N]; responses without a reward have no tokens in `policy_mask`
    log_prob: jax.Array  # [N, R] float32, at sampling, before top-k and top-p
    version: jax.Array  # int32, of the parameters at sampling: [N], in a stream [N, R]
    reward: Reward  # [N]
    age: jax.Array | None  # [N, R] int32, a token's age in iterations; None without a stream


def sequences(responses: Responses) -> tuple[jax.Array, jax.Array]:
    """Tokens `[N, P + R]` int32 of prompts and responses, and segments: 0 for padding, else 1."""
    tokens = jnp.concatenate([responses.prompts.tokens, responses.tokens], axis=1)
    mask = jnp.concatenate([responses.prompts.mask, responses.mask], axis=1)
    return tokens, mask.astype(jnp.int32)


def response_log_probs(
    decoder: Any, parameters: Any, responses: Responses, temperature: float
) -> tuple[jax.Array, jax.Array]:
    """Log-probability of each token of the responses, and the entropy of its distribution.

    Both are `[N, R]` float32, at this temperature, before top-k and top-p; zero outside the mask.
    """
    tokens, segments = sequences(responses)
    last = responses.prompts.tokens.shape[1] - 1  # the last token before the response

    def score_sequences(tokens: jax.Array, segments: jax.Array) -> tuple[jax.Array, jax.Array]:
        start = 0 if decoder.config.packed_rows else last
        hidden = decoder.hidden(parameters, tokens, segments)[:, start:]
        tokens, segments = tokens[:, start:], segments[:, start:]
        return decoder.token_log_probs(parameters, hidden, tokens, segments, temperature)

    token_scores = decoder.on_packed_rows(score_sequences, tokens, segments)
    width = responses.mask.shape[1]
    log_prob, entropy = (jnp.where(responses.mask, x[:, -width:], 0.0) for x in token_scores)
    return log_prob, entropy


def has_reward(responses: Responses) -> jax.Array:
    """True for responses with a reward, `[N]` bool; responses without one have no tokens in `policy_mask`."""
    return jnp.any(responses.policy_mask, axis=1)


def finished(responses: Responses, stop_tokens: tuple[int, ...]) -> jax.Array:
    """Whether each response ends with a stop token instead of being truncated: `[N]` bool."""
    stops = jnp.isin(responses.tokens, jnp.asarray(stop_tokens, jnp.int32)) if stop_tokens else False
    return jnp.any(responses.policy_mask & stops, axis=1)


def length_metrics(
    responses: Responses, stop_tokens: tuple[int, ...], judged: bool = False
) -> dict[str, jax.Array]:
    """Metrics of response lengths; `tokens` counts all tokens but padding, prompts included.

    `judged`: a function or a model gives rewards, so responses may have none; adds their `no_reward_rate`.
    """
    own_tokens = jnp.sum(responses.policy_mask, axis=1, dtype=jnp.int32)
    rewarded = has_reward(responses)
    tokens = jnp.sum(responses.mask, dtype=jnp.int32) + jnp.sum(responses.prompts.mask, dtype=jnp.int32)
    ended = finished(responses, stop_tokens)
    return {
        "tokens": tokens,
        "response_length": masked_mean(own_tokens.astype(jnp.float32), rewarded),
        "response_length_max": jnp.max(own_tokens).astype(jnp.float32),
        "truncation_rate": masked_mean((~ended).astype(jnp.float32), rewarded),
        **({"no_reward_rate": jnp.mean(~rewarded, dtype=jnp.float32)} if judged else {}),
    }


def repeat_rows(x: jax.Array, times: int) -> jax.Array:
    """`[B, ...]` to `[B * times, ...]`, with contiguous copies."""
    if times == 1:
        return x
    return jnp.broadcast_to(x[:, None], (x.shape[0], times, *x.shape[1:])).reshape(-1, *x.shape[1:])


def rollouts(
    agent: Any,
    state: Any,
    count: int,
    then: Callable[[Rollout], Any],
    learn: Callable[[Any, Any], tuple[Any, Any]] | None = None,
    sums: Any = (),
) -> tuple[Any, Any, Any]:
    """Generates all micro-batches of `count` (`B`) prompts, and calls `then` (and `learn`) on each.

    `then` maps a `Rollout [b * G]` to rows: a pytree whose leaves have `b` or `b * G` rows. `learn`
    accumulates sums over micro-batches, such as of gradients: it maps `(sums, rows)` to `(sums, measures)`.
    The argument `sums` has the initial sums.

    Returns the rows of all micro-batches (`B` or `B * G`), the stream's state, and a pair: the last sums, and
    measures `[M]`. With one micro-batch and no `ahead`, `learn` is not called, and the last two are `()`.
    """
    if agent.micro_batches == 1 and not agent.ahead:
        return then(agent._rollout(state, count)), (), ()
    streaming = registry.option("stream")
    problem, keys = streaming.problems_and_keys(agent, state, count)
    size = count // agent.micro_batches

    def in_parts(x: jax.Array) -> jax.Array:
        by_iteration = x.reshape(agent.ahead + 1, count, *x.shape[1:])
        return jax.vmap(lambda x: split_micro_batches(x, size))(by_iteration)

    def by_prompt(keys: jax.Array) -> jax.Array:
        return in_parts(keys.reshape(-1, agent.responses_per_prompt))

    problem, keys = jax.tree.map(in_parts, problem), by_prompt(keys)  # [a + 1, M, b, ...]

    def one_micro_batch(carry: Any, part: jax.Array) -> tuple[Any, Any]:
        stream, sums = carry
        if agent.ahead:
            rollout, stream = streaming.next_micro_batch(agent, state, problem, keys, stream)
        else:
            rollout = agent.play_problems(
                state, jax.tree.map(lambda x: x[0, part], problem), keys[0, part].reshape(-1)
            )
        rows, measures = then(rollout), ()
        if learn is not None:
            sums, measures = learn(sums, rows)
        return (stream, sums), (rows, measures)

    parts = jnp.arange(agent.micro_batches)
    (stream, sums), (rows, measures) = jax.lax.scan(one_micro_batch, (state.stream, sums), parts)

    def join(x: jax.Array) -> jax.Array:
        by_prompt = x.reshape(len(x), size, -1, *x.shape[2:])
        return join_micro_batches(by_prompt).reshape(-1, *x.shape[2:])

    return jax.tree.map(join, rows), stream, (sums, measures)


def loss_mask(agent: Any, rollout: Rollout) -> jax.Array:
    """Loss mask `[N, R]`: the policy's tokens; with `late="mask"`, without tokens that are too old."""
    mask = rollout.responses.policy_mask
    if rollout.age is None or agent.late == "wait":
        return mask
    return mask & (rollout.age <= (agent.ahead if agent.max_age is None else agent.max_age))


def staleness(version: jax.Array, iteration: jax.Array, mask: jax.Array) -> dict[str, jax.Array]:
    """Metrics of the data's age in iterations: the mean, and for a stream also the maximum."""
    age = (iteration - version).astype(jnp.float32)
    if age.ndim == 1:
        return {"staleness": jnp.mean(age)}
    return {"staleness": masked_mean(age, mask), "staleness_max": jnp.max(jnp.where(mask, age, 0.0))}
