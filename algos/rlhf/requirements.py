"""Checks of an algorithm's fields, task and network against each other."""

from collections.abc import Callable, Mapping
from typing import Any

from algos.language.config import DecoderConfig
from algos.rlhf import updates
from algos.rlhf.following import Rows, fits
from envs.text import CharacterTokenizer, is_game
from fdg.settings.fields import require


def check_sizes(algorithm: Any, rows_of: Callable[[Mapping[str, Any]], Rows]) -> None:
    """Checks that the rows of an iteration divide into minibatches, and these into micro-batches.

    Raises:
      FdgError: they do not; names the size.
    """
    size, number = algorithm.dataset_size, algorithm.num_minibatches
    require(
        algorithm,
        size is None or size >= algorithm.num_prompts,
        f"dataset_size={size} is less than the num_prompts={algorithm.num_prompts} of an iteration",
    )
    count, groups, what = rows_of(vars(algorithm))
    require(
        algorithm,
        count % number == 0 and updates.divides(count, groups, number),
        f"num_minibatches={number} does not divide the {count} {what} of an iteration"
        + (f" ({groups} prompts) evenly" if groups == algorithm.num_prompts else ""),
    )
    require(
        algorithm,
        fits({**vars(algorithm), "dataset_size": None}, rows_of, 1),
        f"micro_batch={algorithm.micro_batch} does not divide the {count // number} {what} of a minibatch",
    )


def check_beginning(algorithm: Any) -> None:
    """Checks that there is one source of the network and of its adapters.

    Raises:
      FdgError: two fields contradict each other, or one is missing; names them.
    """
    model, adapters, rank = algorithm.model, algorithm.adapters, algorithm.lora_rank
    both = "model= and decoder= both say what the network is: give one"
    require(algorithm, model is None or algorithm.decoder is None, both)
    alone = f"adapters={adapters}: they are those of a checkpoint: give its folder too (model=)"
    require(algorithm, adapters is None or model is not None, alone)
    ranked = f"adapters={adapters}: they have a rank of their own: leave lora_rank={rank} out"
    require(algorithm, adapters is None or not rank, ranked)


def check_answers(algorithm: Any, needed: bool, imitated: bool) -> None:
    """Checks that the rows of a file have answers.

    Args:
      algorithm: the algorithm.
      needed: whether it learns from answers, or compares with them.
      imitated: whether it imitates answers.

    Raises:
      FdgError: a row has none; names it.
    """
    unanswered = getattr(getattr(algorithm.env, "problem", None), "unanswered", None)
    require(
        algorithm,
        unanswered is None or not needed,
        f"{unanswered}: has no answer, and nothing else says what a response is worth: give one in each row"
        + ("" if imitated else ", or a reward (task.with_reward)"),
    )


def other_tokens(env: Any, earlier: Any) -> str | None:
    """The first character whose token differs between a task and an earlier run's, or None."""
    both = [getattr(task, "tokenizer", None) for task in (env, earlier)]
    alphabets = [one.alphabet for one in both if isinstance(one, CharacterTokenizer)]
    if len(alphabets) < 2 or alphabets[0] == alphabets[1]:
        return None
    differ = sorted(set(alphabets[0]) ^ set(alphabets[1])) or ["their order"]
    return (
        f"task '{env.name}' has tokens for other characters than the run's, such as {differ[0]!r}: export"
        " that run and begin with it by --model, or train it on data of these characters"
    )


def check_room(algorithm: Any, config: DecoderConfig, longest: int) -> None:
    """Checks that a network has the tokens of its task, and a context of `longest` tokens.

    Raises:
      FdgError: it has not; says what would fit.
    """
    env = algorithm.env
    require(
        algorithm,
        env.tokenizer.vocab_size <= config.vocab_size,
        f"task '{env.name}' has a vocabulary of {env.tokenizer.vocab_size} tokens, and the network one of"
        f" {config.vocab_size}: give the network's own tokenizer (tokenizer=, or env.with_tokenizer)",
    )
    room = config.max_positions - longest + env.response_length
    require(
        algorithm,
        longest <= config.max_positions,
        f"task '{env.name}' has prompts of up to {env.prompt_length} tokens and responses of"
        f" {env.response_length}, and the network's context is {config.max_positions}: "
        + (f"use max_response={room}" if room > 0 and not is_game(env) else "shorten the task"),
    )
