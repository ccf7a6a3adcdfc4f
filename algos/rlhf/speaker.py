"""Generates a network's responses to a task's problems, and evaluates them.

Letters in shapes: `N` problems, `P` tokens of a prompt, `R` of a response.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from algos.language.decoder import Decoder
from algos.language.generation import Samples, Sampling, generate
from algos.rlhf.losses import masked_mean
from algos.rlhf.responses import Responses, of_transcript, with_opening
from envs.text import CharacterTokenizer, Message, Problem, Prompts, Reward, is_game, play
from fdg.arguments import quoted
from fdg.errors import FdgError

_AT_ONCE = 256  # responses of an evaluation
Respond = Callable[[Prompts, jax.Array], Samples]  # to prompts [N], by keys [N]


def converse(game: Any, problem: Problem, keys: jax.Array, respond: Respond) -> tuple[Responses, Any, Reward]:
    """Plays a game to its end.

    Args:
      game: has `tokenizer`, `turns` and `reply`, as an `envs.text.TextGame`.
      problem, keys: `[N]`; each turn gets its own key.
      respond: generates the model's turns.

    Returns:
      The conversations as responses, log-probabilities `[N, T]` of the model's tokens at sampling (before
      top-k and top-p), and rewards.
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

    Attributes:
      sampling: how it samples in training.
      slots: responses in flight at once; None: all.
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
        responses = with_opening(responses) if is_game(self.env) else responses
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
                    f"max_new_tokens={max_new_tokens}: give a number from 1 to {context - 1}, for the network"
                    f" has a context of {context} tokens, and the prompt is in it"
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
        """Answers prompts.

        Raises:
          FdgError: a prompt is too long, or has a character outside the vocabulary.
        """
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


def evaluated(responses: Responses, reward: Reward) -> dict[str, jax.Array]:
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

    Args:
      env: a task; `num_rows` is the number of rows of its file.
      key: of the run's data.
      iteration: `[]` int32.
      size: the number of problems; None for all rows of a file, or fresh ones.
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

    # A batch ends at most in the epoch after the one that it begins in.
    return jnp.concatenate([order(epoch), order(epoch + 1)])[within]
