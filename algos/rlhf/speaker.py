"""What a text task asks of a network: problems in order, games, evaluation, and answers.

`MEMBERS` are the methods of `LanguageAgent` for the use of a trained network.

Shapes: `N` responses, `P` tokens of a prompt (left-padded), `R` of a response (right-padded).
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import fdg
from algos import registry
from algos.language.decoder import Decoder
from algos.language.generation import Samples, Sampling, generate
from algos.rlhf import requirements
from algos.rlhf.objective import masked_mean
from algos.rlhf.responses import Responses, repeated
from envs.text import CharacterTokenizer, Message, Problem, Prompts, Reward, Transcript, is_game, play
from envs.text.game import checked_reply
from fdg.arguments import quoted
from fdg.errors import FdgError

_AT_ONCE = 256  # responses of an evaluation
Respond = Callable[[Prompts, jax.Array], Samples]  # to prompts [N], by keys [N]


def of_transcript(transcript: Transcript) -> tuple[Responses, jax.Array]:
    """A conversation as a response to its first token, with log-probabilities `[N, T - 1]` of its tokens."""
    tokens, mask, spoken = transcript.tokens, transcript.mask, transcript.said
    first = Prompts(tokens[:, :1], mask[:, :1])
    log_prob = jnp.where(spoken, transcript.about, 0.0)
    return Responses(first, tokens[:, 1:], mask[:, 1:], spoken[:, 1:]), log_prob[:, 1:]


def prompt_up_to_policy(responses: Responses) -> Responses:
    """Moves all tokens before the policy's first one into the prompt.

    A conversation is a response to its first token (`of_transcript`), but readers want to see the question.
    Prompts become as wide as the whole sequence.
    """
    opening = responses.mask & (jnp.cumsum(responses.own, axis=1) == 0)
    tokens = jnp.concatenate([responses.prompts.tokens, responses.tokens], axis=1)
    prompts = Prompts(tokens, jnp.concatenate([responses.prompts.mask, opening], axis=1))
    return responses._replace(prompts=prompts, mask=responses.mask & ~opening)


def converse(game: Any, problem: Problem, keys: jax.Array, respond: Respond) -> tuple[Responses, Any, Reward]:
    """Plays a game to its end.

    `game` has `tokenizer`, `turns` and `reply`, as an `envs.text.TextGame`; each turn of a problem `[N]` gets
    its own key, and `respond` generates the model's turns. Returns the conversations as responses,
    log-probabilities `[N, T]` of the model's tokens at sampling (before top-k and top-p), and rewards.
    """

    def speak(prompts: Prompts, turn: int) -> Message:
        samples = respond(prompts, jax.vmap(jax.random.fold_in, (0, None))(keys, turn))
        return Message(samples.tokens, samples.mask, samples.tempered_log_probs)

    transcript = play(game, problem, speak)
    parts = {name.replace(" ", "_"): part for name, part in transcript.reward.parts.items()}
    return *of_transcript(transcript), transcript.reward._replace(parts=parts)


class Heard(NamedTuple):
    """A game whose replies are computed by a fragment; see `converse`."""

    tokenizer: Any
    turns: int
    reply: Callable[..., Any]


def played(game: Any, problem: Problem, keys: jax.Array, respond: Respond) -> tuple[Responses, Any, Reward]:
    """`converse` in a training program: a game's replies are a fragment."""

    @fdg.fragment("environment")
    def hear(state, tokens, mask):
        """A game's replies to `tokens [N, R]` of its turn: a `Reply [N]`."""
        return checked_reply(game, state, tokens, mask)

    return converse(Heard(game.tokenizer, game.turns, hear), problem, keys, respond)


@dataclasses.dataclass(frozen=True)
class Speaker:
    """Samples responses of a network to a `TextTask` or `TextGame`."""

    network: Decoder
    env: Any
    sampling: Sampling
    slots: int | None  # responses generated at once; None: all

    @classmethod
    def of(cls, algorithm: Any) -> "Speaker":
        """As an algorithm samples in training."""
        env = algorithm.env
        sampling = Sampling(
            max_new_tokens=env.response_length,
            temperature=algorithm.temperature,
            top_k=algorithm.top_k,
            top_p=algorithm.top_p,
            stop_tokens=algorithm._stops,
            pad_token=env.tokenizer.pad,
        )
        return cls(algorithm.network, env, sampling, algorithm.slots)

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

        def played(rows: tuple[Problem, jax.Array]) -> tuple[Responses, Reward]:
            problem, keys = rows
            if is_game(self.env):
                responses, _, reward = converse(self.env, problem, keys, respond)
                return responses, reward
            samples = respond(problem.prompts, keys)
            reward = self.env.reward(problem.answer, samples.tokens, samples.mask)
            return Responses(problem.prompts, samples.tokens, samples.mask, samples.mask), reward

        return _in_parts(played, (problem, keys))


def held_out_numbers(env: Any, count: int) -> tuple[jax.Array, ...]:
    """The held-out rows of a file for `count` problems: the first ones; empty if problems are sampled."""
    return () if getattr(env, "num_held_out", None) is None else (jnp.arange(count),)


def _in_parts(function: Callable[[Any], Any], rows: Any) -> Any:
    """Applies a function to rows `[N, ...]`, at most `_AT_ONCE` at a time."""
    parts, rest = divmod(jax.tree.leaves(rows)[0].shape[0], _AT_ONCE)
    if (parts, rest) <= (1, 0):
        return function(rows)
    whole = jax.tree.map(lambda x: x[: parts * _AT_ONCE].reshape(parts, _AT_ONCE, *x.shape[1:]), rows)
    results = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), jax.lax.map(function, whole))
    if not rest:
        return results
    last = function(jax.tree.map(lambda x: x[parts * _AT_ONCE :], rows))
    return jax.tree.map(lambda *x: jnp.concatenate(x), results, last)


def return_metrics(responses: Responses, reward: Reward) -> dict[str, jax.Array]:
    """`return` `[]`, the mean of the given rewards; `returns` and `lengths` (in tokens) `[N]`."""
    rated = jnp.ones(reward.total.shape, bool) if reward.given is None else reward.given
    return {
        "return": masked_mean(reward.total, rated),
        "returns": reward.total,
        "lengths": jnp.sum(responses.own, axis=1, dtype=jnp.int32),
    }


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
    """
    if size is None:
        return jax.random.split(jax.random.fold_in(key, iteration), count)
    of_problems = jax.random.split(key)[0]
    return jax.vmap(jax.random.fold_in, (None, 0))(of_problems, problem_numbers(key, iteration, count, size))


def problem_numbers(key: jax.Array, iteration: jax.Array, count: int, size: int) -> jax.Array:
    """Numbers of an iteration's problems out of `size`, `[count] int32`; arguments as for `problem_keys`."""
    first = iteration * count
    epoch, within = first // size, first % size + jnp.arange(count)

    def order(epoch: jax.Array) -> jax.Array:
        return jax.random.permutation(jax.random.fold_in(key, epoch), size)

    # A batch spans at most two epochs.
    return jnp.concatenate([order(epoch), order(epoch + 1)])[within]


# --- methods of `LanguageAgent` ---


def evaluate(
    self: Any, state: Any, key: jax.Array, episodes: int, greedy: bool = True
) -> dict[str, jax.Array]:
    """Responds to held-out problems, by default with the most likely tokens.

    Returns:
      `return` `[]`, the mean reward; `returns` and `lengths` (in tokens) `[episodes]`.
    """
    return return_metrics(*self._speaker.held_out(self._speaking(state), key, episodes, greedy))


def examples(self: Any, state: Any, key: jax.Array, count: int) -> dict[str, jax.Array]:
    """Held-out problems and sampled responses, for `example_rows`: arrays with leading axis `count`."""
    responses, reward = self._speaker.held_out(self._speaking(state), key, count, greedy=False)
    responses = prompt_up_to_policy(responses) if is_game(self.env) else responses
    return {
        "prompt": responses.prompts.tokens,
        "prompt_mask": responses.prompts.mask,
        "response": responses.tokens,
        "response_mask": responses.mask,
        "reward": reward.total,
        **{f"reward_{name}": part for name, part in reward.parts.items()},
    }


def example_rows(self: Any, examples: dict[str, Any]) -> list[dict[str, Any]]:
    """The results of `examples` as rows of a table: texts `prompt` and `response`, and rewards."""

    def texts(what: str) -> list[str]:
        rows = zip(np.asarray(examples[what]), np.asarray(examples[f"{what}_mask"]), strict=True)
        return [self.env.tokenizer.decode(row[shown].tolist()) for row, shown in rows]

    prompts, responses = texts("prompt"), texts("response")
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


def answer(
    self: Any,
    state: Any,
    prompts: Sequence[Any],
    seed: int = 0,
    greedy: bool = True,
    *,
    temperature: float | None = None,
    max_new_tokens: int | None = None,
    system: str | None = None,
) -> list[str]:
    """Answers prompts, given as texts or lists of messages (`[{"role": "user", "content": "1+1="}]`).

    Args:
      greedy: take the most likely tokens, else sample.
      temperature: instead of `greedy`: divides the logits; 0 takes the most likely tokens.
      max_new_tokens: the most tokens of an answer; None for the limit in training.
      system: the system message; None for the task's.

    Raises:
      FdgError: `prompts` is not a list; a prompt is too long, or has a character outside the vocabulary;
        a number is out of range; or the tokenizer has no place for a system message.
    """
    how, env, context = self._speaker.sampling, self.env, self.network.config.max_positions
    temperature = 0.0 if temperature is None and greedy else temperature
    if temperature is not None:
        if not 0 <= temperature < math.inf:
            raise FdgError(f"temperature={temperature}: it must be 0 or more, and finite")
        how = dataclasses.replace(how, temperature=float(temperature))
    if temperature == 0:
        how = dataclasses.replace(how, top_k=0, top_p=1.0)
    if max_new_tokens is not None:
        if not 0 < max_new_tokens < context:
            raise FdgError(
                f"max_new_tokens={max_new_tokens}: give a number from 1 to {context - 1}: prompt and"
                f" response must fit into the network's context of {context} tokens"
            )
        how = dataclasses.replace(how, max_new_tokens=max_new_tokens)
    if system is not None:
        if isinstance(env.tokenizer, CharacterTokenizer) or not hasattr(env, "system"):
            raise FdgError(
                f"system={quoted(system)}: a tokenizer of characters has no system messages: leave it out"
            )
        env = dataclasses.replace(env, system=system)
    asked = env.prompts_of(list(prompts), longest=context - how.max_new_tokens)
    keys = jax.random.split(jax.random.key(seed), len(prompts))
    samples = dataclasses.replace(self._speaker, sampling=how).say(self._speaking(state), asked, keys)
    return env.texts(samples.tokens, samples.mask)


def export(self: Any, state: Any, path: Path) -> None:
    """Writes network (adapters merged) and tokenizer in Hugging Face's format, for `--model`.

    Raises:
      FdgError: it cannot be written, or the tokenizer cannot be exported.
    """
    registry.option("model").save(path, self.network, state.parameters, self.env.tokenizer)


def export_formats(self: Any) -> dict[str, Callable[[Any, Path], None]]:
    """Other export formats by name: `peft`, only the adapters."""

    def adapters_alone(state: Any, path: Path) -> None:
        save = registry.option("model").save_adapters
        save(path, self.network, state.parameters, self.env.tokenizer, self.model)

    return {"peft": adapters_alone}


def check_files(self: Any) -> None:
    """Raises an `FdgError` if initial weights, or a reward model's, are missing; a plan needs none."""
    if self.model is not None:
        registry.option("model").check_there(self.model)
    if getattr(self, "reward_model", None) is not None:
        registry.option("model").check_there(self.reward_model, scores=True)


def fields_from_run(self: Any, earlier: Any) -> dict[str, Any]:
    """Fields that a run takes from the one whose weights it begins with: its alphabet, if wider."""
    return requirements.wider_alphabet(self, getattr(earlier, "env", None))


def reason_incompatible_with(self: Any, earlier: Any) -> str | None:
    """Why weights of another algorithm's run cannot be used, or None."""
    return requirements.other_tokens(self.env, getattr(earlier, "env", None))


# How a run that starts from another run's weights initialises leaves of its state: the reference from the
# weights at the start, the critic from the other's critic or policy, an adapted network from one without.
# The reward model is the one of this configuration.
_WEIGHT_SOURCES: dict[str, tuple[str, ...]] = {
    ".reference": (".parameters",),
    ".critic['network']": (".critic['network']", ".parameters"),
    ".parameters['base']": (".parameters['base']", ".parameters"),
    ".reward_model": (),
}
# The hint of `fdg.train` if all responses of several iterations had the same reward.
_ADVICE = (
    "inspect samples of the policy, or start with supervised fine-tuning: train --algo sft on the same"
    " --env, and give its run directory to --from"
)
MEMBERS: dict[str, Any] = {
    **requirements.MEMBERS,
    "advice_without_rewards": _ADVICE,
    "weight_sources": _WEIGHT_SOURCES,
    "episodes_while_training": 256,  # 0/1 rewards need many, and responses are cheap
    "iterations_without_rewards": 5,
    "answer": answer,
    "check_files": check_files,
    "evaluate": evaluate,
    "example_rows": example_rows,
    "examples": examples,
    "export": export,
    "export_formats": property(export_formats),
    "fields_from_run": fields_from_run,
    "reason_incompatible_with": reason_incompatible_with,
}
