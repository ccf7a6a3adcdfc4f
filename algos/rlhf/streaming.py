"""Rollouts in micro-batches, each scored as soon as it is generated; later ones may start early (`ahead`).

The same code serves all cases: one micro-batch with `ahead=0` is one call of
`LanguageAgent._rollout`. Problem `j M + m` of an iteration is in micro-batch `m`, so a batch that is sharded
over devices stays sharded in every micro-batch.

Shapes: `B` prompts of an iteration, `G` responses to each, `M` micro-batches of `b = B / M`
prompts; `R` tokens of a response.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from algos.language.generation import Answers
from algos.rlhf import losses, updates
from algos.rlhf.responses import Responses
from envs.text import Problem, Reward
from fdg.stream import Stream, StreamState

KEPT = StreamState(key=None, clock=None, kept=0, rows=None)  # type: ignore[arg-type]
"""Batch axes of a stream's state: its slots."""


class Rollout(NamedTuple):
    """Responses of some prompts, those to one prompt contiguous."""

    responses: Responses  # [N]; responses without a reward have no `own` tokens
    log_prob: jax.Array  # [N, R] float32, at sampling, before top-k and top-p
    version: jax.Array  # int32, of the parameters that sampled it: [N], in a stream [N, R]
    reward: Reward  # [N]
    age: jax.Array | None  # [N, R] int32, a token's age in updates; None without a stream


def rollouts(
    agent: Any,
    state: Any,
    count: int,
    then: Callable[[Rollout], Any],
    learn: Callable[[Any, Any], tuple[Any, Any]] | None = None,
    sums: Any = (),
) -> tuple[Any, Any, Any]:
    """Generates all micro-batches of `count` (`B`) prompts, and calls `then` (and `learn`) on each.

    `then`: `Rollout [b G] -> rows`, a pytree whose leaves have `b` or `b G` rows. `learn`: `(sums, rows) ->
    (sums, measures)`, called after each micro-batch if there are several, with `sums` as its first carry.
    Returns the rows of all micro-batches (`B` or `B G`); the stream's state; the last sums, and measures
    `[M]`.
    """
    if agent.micro_batches == 1 and not agent.ahead:
        return then(agent._rollout(state, count)), (), ()
    problem, keys = _problems_and_keys(agent, state, count)
    some = count // agent.micro_batches

    def in_parts(x: jax.Array) -> jax.Array:
        by_iteration = x.reshape(agent.ahead + 1, count, *x.shape[1:])
        return jax.vmap(lambda x: updates.parts_of(x, some))(by_iteration)

    def by_prompt(keys: jax.Array) -> jax.Array:
        return in_parts(keys.reshape(-1, agent.responses_per_prompt))

    problem, keys = jax.tree.map(in_parts, problem), by_prompt(keys)  # [a + 1, M, b, ...]

    def one(carry: Any, part: jax.Array) -> tuple[Any, Any]:
        stream, sums = carry
        if agent.ahead:
            rollout, stream = _next_micro_batch(agent, state, problem, keys, stream)
        else:
            rollout = agent.played(
                state, jax.tree.map(lambda x: x[0, part], problem), keys[0, part].reshape(-1)
            )
        rows, measures = then(rollout), ()
        if learn is not None:
            sums, measures = learn(sums, rows)
        return (stream, sums), (rows, measures)

    parts = jnp.arange(agent.micro_batches)
    (stream, sums), (rows, measures) = jax.lax.scan(one, (state.stream, sums), parts)

    def whole(x: jax.Array) -> jax.Array:
        by_prompt = x.reshape(len(x), some, -1, *x.shape[2:])
        return updates.whole_of(by_prompt).reshape(-1, *x.shape[2:])

    return jax.tree.map(whole, rows), stream, (sums, measures)


def first_stream(agent: Any, count: int, parameters: Any, key: jax.Array) -> StreamState | tuple[()]:
    """The stream's state before the first iteration; `()` where `ahead` is 0."""
    if not agent.ahead:
        return ()
    problem = jax.eval_shape(agent.problems, jax.random.split(key, count))
    return stream_of(agent, count, problem, jax.random.split(key, 1), 0, parameters).init(key)


def stream_of(agent: Any, count: int, problem: Problem, keys: Any, first: Any, parameters: Any) -> Stream:
    """The stream of an agent's responses to problems, in order, with one key each.

    `first` is the run's index of the first response; only the dtype of `parameters` is used.
    """
    group = agent.responses_per_prompt
    source = Answers(
        agent.network,
        agent._speaker.sampling,
        problem.prompts,
        keys,
        also=problem.answer,
        group=group,
        first=first,
        records=True,
        dtype=agent.network.logits_dtype(parameters),
    )
    return Stream(source, **sizes(agent, count))


def sizes(agent: Any, count: int) -> dict[str, Any]:
    """Fields of the agent's `Stream`, except its source, for `count` prompts per iteration."""
    group = agent.responses_per_prompt
    most = (count // agent.micro_batches + agent.ahead * count) * group
    return {
        "slots": min(agent.slots or count * group, most),
        "batch": count,
        "micro_batches": agent.micro_batches,
        "ahead": agent.ahead,
        "order": agent.order,
        "late": agent.late,
        "group": group,
    }


def loss_mask(agent: Any, rollout: Rollout) -> jax.Array:
    """Loss mask `[N, R]`: tokens of the policy; with `late="mask"` not those that are too old."""
    own = rollout.responses.own
    if rollout.age is None or agent.late == "wait":
        return own
    return own & (rollout.age <= (agent.ahead if agent.max_age is None else agent.max_age))


def measures(agent: Any, before: Any, after: Any) -> dict[str, jax.Array]:
    """Metrics of a stream over an iteration; none without one."""
    if not agent.ahead:
        return {}
    first, last = before.clock, after.clock
    ticks = jnp.maximum(last.tick - first.tick, 1).astype(jnp.float32)
    live = last.unit >= 0
    return {
        "ticks": ticks,
        "slots_busy": (last.busy - first.busy).astype(jnp.float32) / (ticks * len(last.occupied)),
        "queued": jnp.sum(live & (last.missing == 0), dtype=jnp.int32).astype(jnp.float32),
        "running": jnp.sum(live & (last.missing > 0), dtype=jnp.int32).astype(jnp.float32),
    }


def staleness(version: jax.Array, iteration: jax.Array, own: jax.Array) -> dict[str, jax.Array]:
    """Updates by which the data lags the learner: the mean; of a stream also the maximum."""
    age = (iteration - version).astype(jnp.float32)
    if age.ndim == 1:
        return {"staleness": jnp.mean(age)}
    return {
        "staleness": losses.masked_mean(age, own),
        "staleness_max": jnp.max(jnp.where(own, age, 0.0)),
    }


def _problems_and_keys(agent: Any, state: Any, count: int) -> tuple[Problem, jax.Array]:
    """Problems of this iteration and the `ahead` next ones, `[(a + 1) B]`, and keys of the responses."""
    asked, keys = [], []
    for later in range(agent.ahead + 1):
        then = state._replace(iteration=state.iteration + later) if later else state
        asked.append(agent._problem_keys(then, count))
        keys.append(jax.random.split(agent._iteration_key(then, 1), count * agent.responses_per_prompt))
    if not agent.ahead:
        return agent.problems(*asked[0]), keys[0]
    problem_keys, numbers = jax.tree.map(lambda *x: jnp.concatenate(x), *asked)
    return agent.problems(problem_keys, numbers), jnp.concatenate(keys)


def _next_micro_batch(
    agent: Any, state: Any, problem: Problem, keys: jax.Array, stream: StreamState
) -> tuple[Rollout, StreamState]:
    """The next micro-batch of a stream."""
    flat = lambda x: x.reshape(-1, *x.shape[3:])  # noqa: E731
    rows, age, stream = agent.respond_ahead(
        state.parameters,
        agent._version(state),
        state.iteration * keys[0].size,
        jax.tree.map(flat, problem),
        keys.reshape(-1),
        stream,
    )
    (prompts, answer), said = rows.asked, rows.samples
    reward = agent.score(answer, said.tokens, said.mask)
    responses = Responses(prompts, said.tokens, said.mask, said.mask)
    if reward.given is not None:
        responses = responses._replace(own=responses.own & reward.given[:, None])
    responses, reward = agent.rated(state, responses, reward)
    return Rollout(responses, said.tempered_log_probs, rows.version, reward, age), stream
