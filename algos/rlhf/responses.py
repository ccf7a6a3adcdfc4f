"""Responses to prompts: log-probabilities, generation, evaluation, and the order of problems.

Shapes: `N` responses, `P` tokens of a prompt (left-padded), `R` of a response (right-padded).
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from algos.language.decoder import Decoder
from algos.language.generation import Samples, Sampling, generate
from algos.rlhf.losses import masked_mean
from envs.text import CharacterTokenizer, Message, Problem, Prompts, Reward, Transcript, is_game, play
from fdg.arguments import quoted
from fdg.errors import FdgError

_AT_ONCE = 256  # responses of an evaluation
Respond = Callable[[Prompts, jax.Array], Samples]  # to prompts [N], by keys [N]


class Responses(NamedTuple):
    """Responses with their prompts."""

    prompts: Prompts  # tokens [N, P] int32, mask [N, P] bool
    tokens: jax.Array  # [N, R] int32
    mask: jax.Array  # [N, R] bool: tokens that are there
    own: jax.Array  # [N, R] bool: the policy's tokens; others are a tool's, or a game's


def of_transcript(transcript: Transcript) -> tuple[Responses, jax.Array]:
    """A conversation as a response to its first token, with log-probabilities `[N, T - 1]` of its tokens."""
    tokens, mask, own = transcript.tokens, transcript.mask, transcript.said
    first = Prompts(tokens[:, :1], mask[:, :1])
    log_prob = jnp.where(own, transcript.about, 0.0)
    return Responses(first, tokens[:, 1:], mask[:, 1:], own[:, 1:]), log_prob[:, 1:]


def prompt_up_to_policy(responses: Responses) -> Responses:
    """Moves all tokens before the policy's first one into the prompt.

    A conversation is a response to its first token (`of_transcript`), but readers want to see the question.
    Prompts become as wide as the whole sequence.
    """
    opening = responses.mask & (jnp.cumsum(responses.own, axis=1) == 0)
    tokens = jnp.concatenate([responses.prompts.tokens, responses.tokens], axis=1)
    prompts = Prompts(tokens, jnp.concatenate([responses.prompts.mask, opening], axis=1))
    return responses._replace(prompts=prompts, mask=responses.mask & ~opening)


def sequences(responses: Responses) -> tuple[jax.Array, jax.Array]:
    """Tokens `[N, P + R]` int32 of prompts and responses, and segments: 0 for padding, else 1."""
    tokens = jnp.concatenate([responses.prompts.tokens, responses.tokens], axis=1)
    there = jnp.concatenate([responses.prompts.mask, responses.mask], axis=1)
    return tokens, there.astype(jnp.int32)


def scores(
    decoder: Decoder, parameters: Any, responses: Responses, temperature: float
) -> tuple[jax.Array, jax.Array]:
    """Log-probability of each token of the responses, and the entropy of its distribution.

    Both `[N, R]` float32, zero outside the mask, at this temperature, before top-k and top-p.
    """
    tokens, segments = sequences(responses)
    last = responses.prompts.tokens.shape[1] - 1  # the last token before the response

    def every(tokens: jax.Array, segments: jax.Array) -> tuple[jax.Array, jax.Array]:
        start = 0 if decoder.config.packed_rows else last
        hidden = decoder.hidden(parameters, tokens, segments)[:, start:]
        tokens, segments = tokens[:, start:], segments[:, start:]
        return decoder.token_log_probs(parameters, hidden, tokens, segments, temperature)

    found = decoder.per_token(every, tokens, segments)
    width = responses.mask.shape[1]
    log_prob, entropy = (jnp.where(responses.mask, x[:, -width:], 0.0) for x in found)
    return log_prob, entropy


def hidden_before(decoder: Decoder, parameters: Any, responses: Responses) -> jax.Array:
    """The hidden state before each token of a response: `[N, R, D]`, for value heads."""
    tokens, segments = sequences(responses)
    last = responses.prompts.tokens.shape[1] - 1
    read = functools.partial(decoder.hidden, parameters)
    return decoder.per_token(read, tokens, segments)[:, last:-1]


def has_reward(responses: Responses) -> jax.Array:
    """True for responses with a reward, `[N]` bool: the others have no tokens of the policy."""
    return jnp.any(responses.own, axis=1)


def finished(responses: Responses, stop_tokens: tuple[int, ...]) -> jax.Array:
    """Whether each response ends with a stop token instead of being truncated: `[N]` bool."""
    stops = jnp.isin(responses.tokens, jnp.asarray(stop_tokens, jnp.int32)) if stop_tokens else False
    return jnp.any(responses.own & stops, axis=1)


def lengths(responses: Responses, stop_tokens: tuple[int, ...], judged: bool = False) -> dict[str, jax.Array]:
    """Metrics of response lengths; `tokens` counts all tokens but padding, prompts included.

    `judged`: some responses may have no reward; these are counted.
    """
    own = jnp.sum(responses.own, axis=1, dtype=jnp.int32)
    counted = has_reward(responses)
    there = jnp.sum(responses.mask, dtype=jnp.int32) + jnp.sum(responses.prompts.mask, dtype=jnp.int32)
    ended = finished(responses, stop_tokens)
    return {
        "tokens": there,
        "response_length": masked_mean(own.astype(jnp.float32), counted),
        "response_length_max": jnp.max(own).astype(jnp.float32),
        "truncation_rate": masked_mean((~ended).astype(jnp.float32), counted),
        **({"no_reward_rate": jnp.mean(~counted, dtype=jnp.float32)} if judged else {}),
    }


# --- reward models: a decoder with a scalar head, `{"network": its parameters, "score": [D, 1]}` ---


def with_head(network: Decoder, parameters: Any) -> Any:
    """A reward model with a network's weights, and reward zero for all responses."""
    return {"network": parameters, "score": jnp.zeros((network.config.hidden_size, 1))}


def model_reward(network: Decoder, parameters: Any, responses: Responses) -> jax.Array:
    """The rewards of `Responses [N]` by a reward model: `[N]` float32.

    Linear in the hidden state of the last token, as in `...ForSequenceClassification` with one label.
    """
    tokens, segments = sequences(responses)
    hidden = network.per_token(functools.partial(network.hidden, parameters["network"]), tokens, segments)
    places = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    last = jnp.max(jnp.where(segments > 0, places, 0), axis=1)
    held = jnp.take_along_axis(hidden, last[:, None, None], axis=1)[:, 0]
    at_least = jnp.promote_types(held.dtype, jnp.float32)
    return (held.astype(at_least) @ parameters["score"].astype(at_least))[:, 0]


# --- responses of a network to a task, and their evaluation ---


def converse(game: Any, problem: Problem, keys: jax.Array, respond: Respond) -> tuple[Responses, Any, Reward]:
    """Plays a game to its end.

    `game` has `tokenizer`, `turns` and `reply`, as an `envs.text.TextGame`; each turn of a problem `[N]` gets
    its own key, and `respond` generates the model's turns. Returns the conversations as responses,
    log-probabilities `[N, T]` of the model's tokens at sampling (before top-k and top-p), and rewards.
    """

    def speak(prompts: Prompts, turn: int) -> Message:
        said = respond(prompts, jax.vmap(jax.random.fold_in, (0, None))(keys, turn))
        return Message(said.tokens, said.mask, said.tempered_log_probs)

    transcript = play(game, problem, speak)
    parts = {name.replace(" ", "_"): part for name, part in transcript.reward.parts.items()}
    return *of_transcript(transcript), transcript.reward._replace(parts=parts)


class Heard(NamedTuple):
    """A game whose replies are computed by a fragment of an algorithm; see `converse`."""

    tokenizer: Any
    turns: int
    reply: Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Speaker:
    """Generates and evaluates responses of a network to a `TextTask` or `TextGame`.

    At most `slots` responses are generated at once; None: all.
    """

    network: Decoder
    env: Any
    sampling: Sampling
    slots: int | None

    def say(self, parameters: Any, prompts: Prompts, keys: jax.Array, greedy: bool = False) -> Samples:
        """Responses to `prompts [N]` by `keys [N]`, sampled as in training, or the most likely tokens."""
        how = self.sampling
        if greedy:
            how = dataclasses.replace(how, temperature=0.0, top_k=0, top_p=1.0)
        return generate(self.network, parameters, prompts, keys, how, self.slots)

    def held_out(
        self, parameters: Any, key: jax.Array, count: int, greedy: bool, each: int = 1
    ) -> tuple[Responses, Reward]:
        """Responses to `count` held-out problems, `each` contiguous ones to each, and their rewards.

        Problems of a file are its first `count` held-out rows, others are sampled by the key.
        """
        problem_key, key = jax.random.split(key)
        problem = self.env.sample(
            jax.random.split(problem_key, count), "test", *held_out_numbers(self.env, count)
        )
        problem = jax.tree.map(lambda x: repeated(x, each), problem)
        keys = jax.random.split(key, count * each)

        def respond(prompts: Prompts, keys: jax.Array) -> Samples:
            return self.say(parameters, prompts, keys, greedy)

        def played(given: tuple[Problem, jax.Array]) -> tuple[Responses, Reward]:
            problem, keys = given
            if is_game(self.env):
                responses, _, reward = converse(self.env, problem, keys, respond)
                return responses, reward
            said = respond(problem.prompts, keys)
            reward = self.env.reward(problem.answer, said.tokens, said.mask)
            return Responses(problem.prompts, said.tokens, said.mask, said.mask), reward

        return _in_parts(played, (problem, keys))

    def examples(self, parameters: Any, key: jax.Array, count: int) -> dict[str, jax.Array]:
        """Held-out problems and sampled responses, for `rows`: arrays with leading axis `count`."""
        responses, reward = self.held_out(parameters, key, count, greedy=False)
        responses = prompt_up_to_policy(responses) if is_game(self.env) else responses
        return {
            "prompt": responses.prompts.tokens,
            "prompt_mask": responses.prompts.mask,
            "response": responses.tokens,
            "response_mask": responses.mask,
            "reward": reward.total,
            **{f"reward_{name}": part for name, part in reward.parts.items()},
        }

    def rows(self, examples: dict[str, Any]) -> list[dict[str, Any]]:
        """The results of `examples` as rows of a table: texts `prompt` and `response`, and rewards."""
        prompts = self._texts(examples["prompt"], examples["prompt_mask"])
        responses = self._texts(examples["response"], examples["response_mask"])
        numbers = {name: examples[name] for name in examples if name.startswith("reward")}
        return [
            {
                "prompt": prompts[i],
                "response": responses[i],
                "tokens": int(examples["response_mask"][i].sum()),
                **{name: float(values[i]) for name, values in numbers.items()},
            }
            for i in range(len(prompts))
        ]

    def asked(
        self, greedy: bool, temperature: float | None, max_new_tokens: int | None, system: str | None
    ) -> "Speaker":
        """The same with other sampling; see `LanguageAgent.answer`."""
        how, env, context = self.sampling, self.env, self.network.config.max_positions
        temperature = 0.0 if temperature is None and greedy else temperature
        if temperature is not None:
            if not 0 <= temperature < math.inf:
                raise FdgError(f"temperature={temperature}: it must be zero or above, and finite")
            how = dataclasses.replace(how, temperature=float(temperature))
        if temperature == 0:
            how = dataclasses.replace(how, top_k=0, top_p=1.0)
        if max_new_tokens is not None:
            if not 0 < max_new_tokens < context:
                raise FdgError(
                    f"max_new_tokens={max_new_tokens}: give a number from 1 to {context - 1}: the"
                    f" context of the network has {context} tokens, and the prompt takes some"
                )
            how = dataclasses.replace(how, max_new_tokens=max_new_tokens)
        if system is not None:
            if isinstance(env.tokenizer, CharacterTokenizer) or not hasattr(env, "system"):
                raise FdgError(
                    f"system={quoted(system)}: a tokenizer of characters has no system messages: leave it out"
                )
            env = dataclasses.replace(env, system=system)
        return dataclasses.replace(self, sampling=how, env=env)

    def answer(self, parameters: Any, prompts: Sequence[Any], seed: int) -> list[str]:
        """Answers prompts."""
        room = self.network.config.max_positions - self.sampling.max_new_tokens
        asked = self.env.prompts_of(list(prompts), longest=room)
        said = self.say(parameters, asked, jax.random.split(jax.random.key(seed), len(prompts)))
        return self.env.texts(said.tokens, said.mask)

    def _texts(self, tokens: Any, mask: Any) -> list[str]:
        rows = zip(np.asarray(tokens), np.asarray(mask), strict=True)
        return [self.env.tokenizer.decode(row[shown].tolist()) for row, shown in rows]


def held_out_numbers(env: Any, count: int) -> tuple[jax.Array, ...]:
    """The held-out rows of a file for `count` problems: the first ones; empty if problems are sampled."""
    return () if getattr(env, "num_held_out", None) is None else (jnp.arange(count),)


def _in_parts(function: Callable[[Any], Any], given: Any) -> Any:
    """Applies a function to rows `[N, ...]`, at most `_AT_ONCE` at a time."""
    parts, rest = divmod(jax.tree.leaves(given)[0].shape[0], _AT_ONCE)
    if (parts, rest) <= (1, 0):
        return function(given)
    whole = jax.tree.map(lambda x: x[: parts * _AT_ONCE].reshape(parts, _AT_ONCE, *x.shape[1:]), given)
    found = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), jax.lax.map(function, whole))
    if not rest:
        return found
    last = function(jax.tree.map(lambda x: x[parts * _AT_ONCE :], given))
    return jax.tree.map(lambda *x: jnp.concatenate(x), found, last)


def return_metrics(responses: Responses, reward: Reward) -> dict[str, jax.Array]:
    """`return` `[]`, the mean of the given rewards; `returns` and `lengths` (in tokens) `[N]`."""
    given = jnp.ones(reward.total.shape, bool) if reward.given is None else reward.given
    return {
        "return": masked_mean(reward.total, given),
        "returns": reward.total,
        "lengths": jnp.sum(responses.own, axis=1, dtype=jnp.int32),
    }


def repeated(x: jax.Array, times: int) -> jax.Array:
    """`[B, ...]` to `[B * times, ...]`, with contiguous copies."""
    if times == 1:
        return x
    return jnp.broadcast_to(x[:, None], (x.shape[0], times, *x.shape[1:])).reshape(-1, *x.shape[1:])


def problems_of(
    env: Any, key: jax.Array, iteration: jax.Array, count: int, size: int | None
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """The keys `[count]` of an iteration's problems, and `(row numbers [count] int32,)` of a file or `()`.

    `key` is of the run's data; `size` is the number of problems, None for all rows of a file
    (`env.num_rows`), or fresh ones.
    """
    rows = getattr(env, "num_rows", None)
    size = size or (rows if rows is not None and rows >= count else None)
    keys = problem_keys(key, iteration, count, size)
    return keys, () if rows is None or size is None else (problem_numbers(key, iteration, count, size),)


def problem_keys(key: jax.Array, iteration: jax.Array, count: int, size: int | None) -> jax.Array:
    """Keys `[count]` of an iteration's problems, fresh ones, or out of `size`, each used once in an epoch.

    Both depend only on the run's `key` and the iteration, so a resumed run gets the same problems.

    >>> key = jax.random.key(0)
    >>> words = lambda i: {tuple(w) for w in jax.random.key_data(problem_keys(key, i, 2, 4)).tolist()}
    >>> words(0) | words(1) == words(2) | words(3), len(words(0) | words(1))
    (True, 4)
    """
    if size is None:
        return jax.random.split(jax.random.fold_in(key, iteration), count)
    of_problems = jax.random.split(key)[0]
    return jax.vmap(jax.random.fold_in, (None, 0))(of_problems, problem_numbers(key, iteration, count, size))


def problem_numbers(key: jax.Array, iteration: jax.Array, count: int, size: int) -> jax.Array:
    """The numbers of an iteration's problems out of `size`, `[count] int32`; arguments as for `problem_keys`.

    >>> key = jax.random.key(0)
    >>> sorted(n for i in (0, 1) for n in problem_numbers(key, i, 2, 4).tolist())
    [0, 1, 2, 3]
    """
    first = iteration * count
    epoch, within = first // size, first % size + jnp.arange(count)

    def order(epoch: jax.Array) -> jax.Array:
        return jax.random.permutation(jax.random.fold_in(key, epoch), size)

    # A batch spans at most two epochs.
    return jnp.concatenate([order(epoch), order(epoch + 1)])[within]
