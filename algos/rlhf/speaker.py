"""Uses of a language model in a text task: games, evaluation, answers, export; and the order of problems.

`MEMBERS` are methods of `LanguageAgent`.

Shapes: `N` responses, `P` tokens of a prompt (left-padded), `R` of a response (right-padded).
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from algos import registry
from algos.language.generation import Samples, Sampling, generate
from algos.rlhf import requirements
from algos.rlhf.objective import masked_mean
from algos.rlhf.responses import Responses, repeat_rows
from envs.text import CharacterTokenizer, Message, Problem, Prompts, Reply, Reward, Transcript, is_game, play
from envs.text.task import decode_rows
from fdg.arguments import check_arguments, quoted
from fdg.errors import FdgError

_RESPONSES_AT_ONCE = 256  # in an evaluation
Respond = Callable[[Prompts, jax.Array], Samples]  # (prompts [N], keys [N]) -> responses


def responses_of_transcript(transcript: Transcript) -> tuple[Responses, jax.Array]:
    """Conversations as responses to their first tokens, and log-probabilities of their other tokens.

    The log-probabilities `[N, T - 1]` are those of `transcript.about`; 0 for tokens that the policy did not
    sample.
    """
    tokens, mask, policy_mask = transcript.tokens, transcript.mask, transcript.said
    first = Prompts(tokens[:, :1], mask[:, :1])
    log_prob = jnp.where(policy_mask, transcript.about, 0.0)
    return Responses(first, tokens[:, 1:], mask[:, 1:], policy_mask[:, 1:]), log_prob[:, 1:]


def prompt_up_to_policy(responses: Responses) -> Responses:
    """Moves all tokens before the policy's first one into the prompt.

    A conversation is a response to its first token (`responses_of_transcript`), but readers want to see the
    question. Prompts become as wide as the whole sequence.
    """
    opening = responses.mask & (jnp.cumsum(responses.policy_mask, axis=1) == 0)
    tokens = jnp.concatenate([responses.prompts.tokens, responses.tokens], axis=1)
    prompts = Prompts(tokens, jnp.concatenate([responses.prompts.mask, opening], axis=1))
    return responses._replace(prompts=prompts, mask=responses.mask & ~opening)


def responses_to(
    env: Any,
    problem: Problem,
    keys: jax.Array,
    respond: Respond,
    score: Callable[..., Reward] | None = None,
    hear: Callable[..., Reply] | None = None,
) -> tuple[Responses, jax.Array, Reward]:
    """Responses to problems `[N]`, their log-probabilities `[N, R]` at sampling, and their rewards.

    `respond` generates responses, or the model's turns of a game, with a new key for each turn.
    Log-probabilities are those before top-k and top-p. `score` computes the rewards of a task, and `hear` the
    replies of a game; None: `env` itself.
    """
    if not is_game(env):
        samples = respond(problem.prompts, keys)
        reward = (score or env.reward)(problem.answer, samples.tokens, samples.mask)
        responses = Responses(problem.prompts, samples.tokens, samples.mask, samples.mask)
        return responses, samples.tempered_log_probs, reward

    def speak(prompts: Prompts, turn: int) -> Message:
        samples = respond(prompts, jax.vmap(jax.random.fold_in, (0, None))(keys, turn))
        return Message(samples.tokens, samples.mask, samples.tempered_log_probs)

    transcript = play(env, problem, speak, reply=hear)
    parts = {name.replace(" ", "_"): part for name, part in transcript.reward.parts.items()}
    return *responses_of_transcript(transcript), transcript.reward._replace(parts=parts)


def sampling_of(algorithm: Any, temperature: float | None = None) -> Sampling:
    """How an algorithm samples at a temperature; 0: the most likely tokens; None: as in training."""
    env, is_greedy = algorithm.env, temperature == 0
    return Sampling(
        max_new_tokens=env.response_length,
        temperature=algorithm.temperature if temperature is None else temperature,
        top_k=0 if is_greedy else algorithm.top_k,
        top_p=1.0 if is_greedy else algorithm.top_p,
        stop_tokens=algorithm._stops,
        pad_token=env.tokenizer.pad,
    )


def held_out(
    algorithm: Any, parameters: Any, key: jax.Array, count: int, greedy: bool, per_problem: int = 1
) -> tuple[Responses, Reward]:
    """Responses to `count` held-out problems, `per_problem` responses to each, with their rewards.

    Problems of a file are its first `count` held-out rows; other problems are sampled by the key.
    Responses to the same problem are contiguous.
    """
    env, sampling = algorithm.env, sampling_of(algorithm, 0.0 if greedy else None)
    problem_key, key = jax.random.split(key)
    problem = env.sample(jax.random.split(problem_key, count), "test", *held_out_numbers(env, count))
    problem = jax.tree.map(lambda x: repeat_rows(x, per_problem), problem)
    keys = jax.random.split(key, count * per_problem)

    def respond(prompts: Prompts, keys: jax.Array) -> Samples:
        return generate(algorithm.network, parameters, prompts, keys, sampling, algorithm.slots)

    def play_rows(rows: tuple[Problem, jax.Array]) -> tuple[Responses, Reward]:
        responses, _, reward = responses_to(env, *rows, respond)
        return responses, reward

    return _in_parts(play_rows, (problem, keys))


def held_out_numbers(env: Any, count: int) -> tuple[jax.Array, ...]:
    """The held-out rows of a file for `count` problems: the first ones; empty if problems are sampled."""
    return () if getattr(env, "num_held_out", None) is None else (jnp.arange(count),)


def _in_parts(function: Callable[[Any], Any], rows: Any) -> Any:
    """Applies a function to rows `[N, ...]`, at most `_RESPONSES_AT_ONCE` at a time."""
    parts, rest = divmod(jax.tree.leaves(rows)[0].shape[0], _RESPONSES_AT_ONCE)
    if (parts, rest) <= (1, 0):  # at most `_RESPONSES_AT_ONCE` rows
        return function(rows)
    size = _RESPONSES_AT_ONCE
    full_parts = jax.tree.map(lambda x: x[: parts * size].reshape(parts, size, *x.shape[1:]), rows)
    results = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), jax.lax.map(function, full_parts))
    if not rest:
        return results
    last = function(jax.tree.map(lambda x: x[parts * _RESPONSES_AT_ONCE :], rows))
    return jax.tree.map(lambda *x: jnp.concatenate(x), results, last)


def return_metrics(responses: Responses, reward: Reward) -> dict[str, jax.Array]:
    """Metrics: `return` `[]`, the mean of given rewards; `returns` and `lengths` (in tokens) `[N]`."""
    is_given = jnp.ones(reward.total.shape, bool) if reward.given is None else reward.given
    return {
        "return": masked_mean(reward.total, is_given),
        "returns": reward.total,
        "lengths": jnp.sum(responses.policy_mask, axis=1, dtype=jnp.int32),
    }


def problems_of(
    env: Any, key: jax.Array, iteration: jax.Array, count: int, size: int | None
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """The keys `[count]` of an iteration's problems, and a tuple of their row numbers `[count]` in a file.

    Row numbers are int32; the tuple is empty without a file. `key` is the run's key for data. `size` is the
    number of different problems; None: all rows of a file (`env.num_rows`), else new ones in each iteration.
    """
    rows = getattr(env, "num_rows", None)
    size = size or (rows if rows is not None and rows >= count else None)
    keys = problem_keys(key, iteration, count, size)
    return keys, () if rows is None or size is None else (problem_numbers(key, iteration, count, size),)


def problem_keys(key: jax.Array, iteration: jax.Array, count: int, size: int | None) -> jax.Array:
    """Keys `[count]` of an iteration's problems: new ones, or of `size` problems, each used once per epoch.

    They depend only on the run's `key` and the iteration, so a resumed run gets the same problems.
    """
    if size is None:
        return jax.random.split(jax.random.fold_in(key, iteration), count)
    base_key = jax.random.split(key)[0]
    return jax.vmap(jax.random.fold_in, (None, 0))(base_key, problem_numbers(key, iteration, count, size))


def problem_numbers(key: jax.Array, iteration: jax.Array, count: int, size: int) -> jax.Array:
    """The indices, below `size`, of an iteration's problems: `[count]` int32; arguments as `problem_keys`."""
    first = iteration * count
    epoch, positions = first // size, first % size + jnp.arange(count)

    def order(epoch: jax.Array) -> jax.Array:
        return jax.random.permutation(jax.random.fold_in(key, epoch), size)

    # A batch spans at most two epochs.
    return jnp.concatenate([order(epoch), order(epoch + 1)])[positions]


# --- methods of `LanguageAgent` ---


def evaluate(
    self: Any, state: Any, key: jax.Array, episodes: int, greedy: bool = True
) -> dict[str, jax.Array]:
    """Responds to held-out problems, by default with the most likely tokens.

    Returns:
      `return` `[]`, the mean reward; `returns` and `lengths` (in tokens) `[episodes]`.
    """
    return return_metrics(*held_out(self, self._responding_parameters(state), key, episodes, greedy))


def examples(self: Any, state: Any, key: jax.Array, count: int) -> dict[str, jax.Array]:
    """Held-out problems and sampled responses, for `example_rows`: arrays with leading axis `count`."""
    responses, reward = held_out(self, self._responding_parameters(state), key, count, greedy=False)
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
    prompts, responses = (
        decode_rows(self.env.tokenizer, examples[what], examples[f"{what}_mask"])
        for what in ("prompt", "response")
    )
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
      temperature: overrides `greedy`: divides the logits; 0 takes the most likely tokens.
      max_new_tokens: the maximum number of tokens of an answer; None for the limit in training.
      system: the system message; None for the task's.

    Raises:
      FdgError: `prompts` is not a list; a prompt is too long, or has a character outside the vocabulary;
        a setting has a wrong type or is out of range; the tokenizer has no place for a system message; or the
        task is a game.
    """
    settings = {"temperature": temperature, "max_new_tokens": max_new_tokens, "system": system, "seed": seed}
    check_arguments(answer, settings)
    env, context = self.env, self.network.config.max_positions
    if is_game(env):
        raise FdgError(f"'{env.name}' is a game, which asks its own prompts: use evaluate, or examples")
    temperature = 0.0 if temperature is None and greedy else temperature
    if temperature is not None:
        if not 0 <= temperature < math.inf:
            raise FdgError(f"temperature={temperature}: it must be 0 or more, and finite")
        temperature = float(temperature)
    sampling = sampling_of(self, temperature)
    if max_new_tokens is not None:
        if not 0 < max_new_tokens < context:
            raise FdgError(
                f"max_new_tokens={max_new_tokens}: give a number from 1 to {context - 1}: prompt and"
                f" response must fit into the network's context of {context} tokens"
            )
        sampling = dataclasses.replace(sampling, max_new_tokens=max_new_tokens)
    if system is not None:
        if isinstance(env.tokenizer, CharacterTokenizer) or not hasattr(env, "system"):
            raise FdgError(
                f"system={quoted(system)}: a tokenizer of characters has no system messages: leave it out"
            )
        env = dataclasses.replace(env, system=system)
    is_many = np.iterable(prompts) and not isinstance(prompts, str | Mapping)
    encoded = env.prompts_of([*prompts] if is_many else prompts, longest=context - sampling.max_new_tokens)
    keys = jax.random.split(jax.random.key(seed), len(encoded.tokens))
    parameters = self._responding_parameters(state)
    samples = generate(self.network, parameters, encoded, keys, sampling, self.slots)
    return env.texts(samples.tokens, samples.mask)


def export(self: Any, state: Any, path: Path) -> None:
    """Writes network (adapters merged) and tokenizer in Hugging Face's format, for `--model`.

    Raises:
      FdgError: it cannot be written, or the tokenizer cannot be exported.
    """
    registry.option("model").save(path, self.network, state.parameters, self.env.tokenizer)


def export_formats(self: Any) -> dict[str, Callable[[Any, Path], None]]:
    """Other export formats by name: `peft`, only the adapters."""

    def export_adapters(state: Any, path: Path) -> None:
        save = registry.option("model").save_adapters
        save(path, self.network, state.parameters, self.env.tokenizer, self.model)

    return {"peft": export_adapters}


def check_files(self: Any) -> None:
    """Raises an `FdgError` if the weights of the initial network or of the reward model are missing."""
    if self.model is not None:
        registry.option("model").check_weights_exist(self.model)
    if getattr(self, "reward_model", None) is not None:
        registry.option("model").check_weights_exist(self.reward_model, scores=True)


def fields_from_run(self: Any, earlier: Any) -> dict[str, Any]:
    """Fields that a run takes from the earlier run whose weights it starts with: its alphabet, if larger."""
    return requirements.wider_alphabet(self, getattr(earlier, "env", None))


def reason_incompatible_with(self: Any, earlier: Any) -> str | None:
    """The reason why the weights of an earlier run cannot be used; None if they can."""
    return requirements.other_tokens(self.env, getattr(earlier, "env", None))


# For a run that starts from another run's weights: leaves of its state, each with the leaves of the other
# state that may initialise it; the first that exists does. The reference starts with the policy's weights,
# the critic with the critic's or the policy's, and the base of adapters with those of a network without
# adapters. The reward model is not taken from the other run.
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
