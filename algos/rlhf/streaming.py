"""Streams: generation that starts responses of later iterations early (`ahead`), and micro-batches.

Shapes: `B` prompts of an iteration, `G` responses to each, `M` micro-batches of `b = B / M`
prompts; `R` tokens of a response; `a` is `ahead`.
"""

import dataclasses
import warnings
from typing import Any, Literal

import jax
import jax.numpy as jnp

import fdg
from algos.language.generation import Answers
from algos.rlhf.responses import Responses, Rollout
from envs.text import Problem, is_game
from fdg.settings.fields import (
    hyperparameter,
    require,
    require_divides,
    require_not_negative,
    require_positive,
)
from fdg.settings.parts import Part
from fdg.stream import Stream, StreamState

_MAX_AHEAD = 200  # each iteration draws the problems of all these batches

# The batch axes of a stream's state: only its slots have a batch axis.
_STREAM_AXES = StreamState(key=None, clock=None, kept=0, rows=None)  # type: ignore[arg-type]


@dataclasses.dataclass(frozen=True)
class Streams(Part):
    """The settings of micro-batches and of generation ahead."""

    micro_batches: int = hyperparameter(
        1,
        "micro-batches of a batch, each scored as soon as its responses are complete; results do not change",
    )
    ahead: int = hyperparameter(
        0,
        "batches whose generation may start early (0: none); tokens are then up to this many iterations old",
    )
    order: Literal["finished", "prompt"] = hyperparameter(
        "finished",
        "which of the responses that started early form a batch; finished: those that are complete first;"
        " prompt: those of the earliest prompts",
    )
    late: Literal["wait", "mask"] = hyperparameter(
        "wait",
        "what to do about tokens that are too many iterations old; wait: finish their responses before"
        " the update; mask: give these tokens no weight in the loss",
    )
    max_age: int | None = hyperparameter(
        None, "largest age of a token in iterations, with late='mask' (None: the value of ahead)"
    )

    def check_fits(self, algorithm: Any) -> None:
        """Refuses settings that do not fit the prompts or the task; warns of settings that have no effect."""
        require_positive(algorithm, "micro_batches")
        count, ahead, env = algorithm._candidates, self.ahead, algorithm.env
        require_divides(algorithm, "micro_batches", count, f"the {count} prompts of an iteration")
        require_not_negative(algorithm, "ahead")
        require(algorithm, ahead <= _MAX_AHEAD, f"ahead={ahead}: give at most {_MAX_AHEAD} batches")
        require(
            algorithm,
            not ahead or not is_game(env),
            f"ahead={ahead}: '{getattr(env, 'name', env)}' is a game, whose turns are played by all responses"
            " together: use ahead=0",
        )
        age = self.max_age
        require(
            algorithm,
            age is None or (age >= 0 and self.late == "mask"),
            f"max_age={age}: it must be 0 or more, and needs late='mask'",
        )
        if self.late == "mask" and (not ahead or (self.order == "prompt" and self.oldest() == ahead)):
            why = "order='prompt', because each batch waits for its own responses: use order='finished'"
            if not ahead:
                why = "ahead=0, because no response starts early: give ahead=1 (--ahead 1)"
            warnings.warn(
                f"late='mask' has no effect with {why}, or leave late out", fdg.FdgWarning, stacklevel=2
            )

    def oldest(self) -> int:
        """The largest age in iterations of a token in the loss, without the policy's staleness."""
        return oldest(self.ahead, self.order, self.late, self.max_age)


def first_stream(agent: Any, count: int, parameters: Any, key: jax.Array) -> StreamState | tuple[()]:
    """The stream's state before the first iteration; `()` if `ahead` is 0."""
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
        agent._sampling,
        problem.prompts,
        keys,
        extra=problem.answer,
        group=group,
        first=first,
        records=True,
        dtype=agent.network.logits_dtype(parameters),
    )
    return Stream(source, **sizes(agent, count))


def sizes(agent: Any, count: int) -> dict[str, Any]:
    """Fields of the agent's `Stream`, except its source, for `count` prompts per iteration."""
    group = agent.responses_per_prompt
    max_slots = (count // agent.micro_batches + agent.ahead * count) * group
    return {
        "slots": min(agent.slots or count * group, max_slots),
        "batch": count,
        "micro_batches": agent.micro_batches,
        "ahead": agent.ahead,
        "order": agent.order,
        "late": agent.late,
        "group": group,
    }


def oldest(ahead: int, order: str, late: str, max_age: int | None) -> int:
    """The largest age in iterations of a token in the loss, without the policy's staleness.

    >>> oldest(2, "finished", "mask", 5), oldest(2, "prompt", "mask", 5), oldest(2, "prompt", "mask", 1)
    (5, 2, 1)
    """
    limit = ahead if max_age is None else max_age
    return limit if ahead and order == "finished" and late == "mask" else min(limit, ahead)


def metrics(agent: Any, before: Any, after: Any) -> dict[str, jax.Array]:
    """Metrics of a stream, from its states before and after an iteration; empty without a stream."""
    if not agent.ahead:
        return {}
    first, last = before.clock, after.clock
    ticks = jnp.maximum(last.tick - first.tick, 1).astype(jnp.float32)
    is_live = last.unit >= 0
    return {
        "ticks": ticks,
        "slots_busy": (last.busy - first.busy).astype(jnp.float32) / (ticks * len(last.occupied)),
        "queued": jnp.sum(is_live & (last.missing == 0), dtype=jnp.int32).astype(jnp.float32),
        "running": jnp.sum(is_live & (last.missing > 0), dtype=jnp.int32).astype(jnp.float32),
    }


def problems_and_keys(agent: Any, state: Any, count: int) -> tuple[Problem, jax.Array]:
    """Problems of this iteration and of the next `ahead` ones, `[(a + 1) * B]`, and keys of the responses."""
    problem_arguments, keys = [], []
    for offset in range(agent.ahead + 1):
        future = state._replace(iteration=state.iteration + offset) if offset else state
        problem_arguments.append(agent._problem_keys(future, count))
        keys.append(jax.random.split(agent._iteration_key(future, 1), count * agent.responses_per_prompt))
    arguments = jax.tree.map(lambda *x: jnp.concatenate(x), *problem_arguments)
    return agent.problems(*arguments), jnp.concatenate(keys)


def next_micro_batch(
    agent: Any, state: Any, problem: Problem, keys: jax.Array, stream: StreamState
) -> tuple[Rollout, StreamState]:
    """The next micro-batch of a stream, with rewards, and the stream's state after it.

    `problem [a + 1, M, b]` and `keys [a + 1, M, b, G]` are those of this iteration and the next `a`.
    """

    @fdg.fragment(
        "actor", in_axes=(None, None, None, None, None, _STREAM_AXES), out_axes=(None, None, _STREAM_AXES)
    )
    def respond_ahead(parameters, version, first, problem, keys, stream):
        """Generates `Recorded [b * G]` for problems `[(a + 1) * B]`.

        `first` is the run's index of the first response. Also returns the age of each token `[b * G, R]` in
        iterations, and the stream's state.
        """
        count = len(keys) // agent.responses_per_prompt // (agent.ahead + 1)
        source = stream_of(agent, count, problem, keys, first, parameters)
        rows, stream = source.take(agent.network.cast(parameters), version, stream)
        return rows, version - rows.version, stream

    def flatten(x: jax.Array) -> jax.Array:
        return x.reshape(-1, *x.shape[3:])

    rows, age, stream = respond_ahead(
        state.parameters,
        agent._version(state),
        state.iteration * keys[0].size,
        jax.tree.map(flatten, problem),
        keys.reshape(-1),
        stream,
    )
    (prompts, answer), samples = rows.asked, rows.samples
    reward = agent.score(answer, samples.tokens, samples.mask)
    responses = Responses(prompts, samples.tokens, samples.mask, samples.mask)
    rollout = Rollout(responses, samples.tempered_log_probs, rows.version, reward, age)
    return agent._with_rewards(state, rollout), stream
