"""Checks of a language-model algorithm: its fields, task and network must fit each other."""

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from algos.rlhf.updates import Rows
from envs.text import CharacterTokenizer, is_game, is_text
from fdg.arguments import quoted
from fdg.settings.fields import (
    make_paths_absolute,
    nearest_divisors,
    require,
    require_positive,
    require_types,
)
from fdg.settings.parts import check_parts

_SIZES = ("num_prompts", "num_minibatches", "micro_batch")  # fields that `fitting_sizes` may change


def divides(count: int, groups: int, num_minibatches: int) -> bool:
    """Whether `updates.epochs` can divide `count` samples of `groups` prompts into equal minibatches."""
    blocks = groups * math.gcd(count // groups, num_minibatches) / num_minibatches
    return blocks >= 1 and blocks.is_integer()


def fits(values: Mapping[str, Any], rows_of: Callable[[Mapping[str, Any]], Rows], oversampling: int) -> bool:
    """Whether an iteration's rows divide into minibatches, and those into micro-batches.

    `values` are an algorithm's fields by name; `oversampling` is the ratio of sampled to learned prompts.
    """
    (count, groups, _), num_minibatches = rows_of(values), values["num_minibatches"]
    if count % num_minibatches or not divides(count, groups, num_minibatches):
        return False
    micro_batch, dataset_size, rows = values["micro_batch"], values["dataset_size"], count // num_minibatches
    has_problems = dataset_size is None or dataset_size >= oversampling * values["num_prompts"]
    return has_problems and (micro_batch is None or micro_batch >= rows or rows % micro_batch == 0)


def fitting_sizes(
    values: Mapping[str, Any],
    named: Collection[str],
    rows_of: Callable[[Mapping[str, Any]], Rows],
    oversampling: int = 1,
) -> dict[str, int]:
    """The smallest changes to sizes that make all of them divide; empty if none are needed, or none suffice.

    It prefers smaller micro-batches, which do not change results, then fewer minibatches, then slightly fewer
    or more prompts. Fields that the user `named` do not change; the other arguments are as for `fits`.

    >>> grpo = lambda v: Rows(v["num_prompts"] * v["group_size"], v["num_prompts"], "responses")
    >>> preset = {"num_prompts": 64, "num_minibatches": 4, "micro_batch": 32, "dataset_size": None}
    >>> fitting_sizes({**preset, "group_size": 5}, ["group_size"], grpo)
    {'micro_batch': 20}
    >>> fitting_sizes({**preset, "group_size": 8, "num_minibatches": 3}, ["num_minibatches"], grpo)
    {'num_prompts': 63, 'micro_batch': 28}
    >>> fitting_sizes({**preset, "group_size": 8, "dataset_size": 50}, ["dataset_size"], grpo)
    {'num_prompts': 50, 'micro_batch': 25}
    """
    if fits(values, rows_of, oversampling):
        return {}
    free = [name for name in _SIZES if name not in named]
    for num_minibatches, num_prompts in _candidates(values, free):
        candidate = {**values, "num_minibatches": num_minibatches, "num_prompts": num_prompts}
        micro_batch = values["micro_batch"]
        if "micro_batch" in free and micro_batch is not None:
            rows = max(1, rows_of(candidate).size // num_minibatches)
            if micro_batch < rows:
                divisors = (size for size in range(micro_batch, 0, -1) if rows % size == 0)
                candidate["micro_batch"] = next(divisors)
        if fits(candidate, rows_of, oversampling):
            return {name: candidate[name] for name in _SIZES if candidate[name] != values[name]}
    return {}


def _candidates(values: Mapping[str, Any], free: Collection[str]) -> Iterator[tuple[int, int]]:
    """Yields numbers of minibatches and of prompts to try, in the order of preference."""
    minibatches, prompts = values["num_minibatches"], values["num_prompts"]
    fewer_minibatches = range(minibatches - 1, 0, -1) if "num_minibatches" in free else ()
    other_prompts = (*range(prompts - 1, 0, -1), *range(prompts + 1, 2 * prompts + 1))
    other_prompts = other_prompts if "num_prompts" in free else ()
    yield minibatches, prompts
    yield from ((fewer, prompts) for fewer in fewer_minibatches)
    yield from ((minibatches, other) for other in other_prompts)
    yield from ((fewer, other) for fewer in fewer_minibatches for other in other_prompts)


def context_length(env: Any) -> int:
    """The longest sequence of a task in tokens: a prompt with its response, or a whole game."""
    turns, reply = getattr(env, "turns", 1), getattr(env, "reply_length", 0)
    return env.prompt_length + turns * (env.response_length + reply)


def check_fields(algorithm: Any) -> None:
    """Checks the task, and the values of fields one by one."""
    check_task(algorithm)
    make_paths_absolute(algorithm)
    require_types(algorithm)
    require_positive(algorithm, "num_prompts", "total_steps", "num_epochs", "num_minibatches")
    temperature = algorithm.temperature
    message = f"temperature={temperature}: it must be above zero; greedy=True takes the likeliest token"
    require(algorithm, temperature > 0, message)
    check_parts(algorithm)
    for name in ("dataset_size", "micro_batch", "slots"):
        if getattr(algorithm, name) is not None:
            require_positive(algorithm, name)


def check_together(algorithm: Any) -> None:
    """Checks the fields, the task and the network against each other."""
    check_capacity(algorithm)
    check_answers(algorithm)
    _ = algorithm._sampling  # its construction checks the settings of sampling
    check_sizes(algorithm)
    for part in ("stream_settings", "reward_settings"):
        if hasattr(algorithm, part):
            getattr(algorithm, part).check_fits(algorithm)


def check_task(algorithm: Any) -> None:
    """Checks that an algorithm's `env` is a text task, and not its name."""
    env = algorithm.env
    if is_text(env):
        return
    name, what = getattr(env, "name", env if isinstance(env, str) else quoted(env)), "no text task"
    task = algorithm.default_env
    if isinstance(env, str) and env.startswith("text:"):
        task, what = env, "a name"
    require(algorithm, False, f"'{name}' is {what}: use envs.make({task!r}) or another text:NAME")


def check_sizes(algorithm: Any) -> None:
    """Checks that the rows of an iteration divide into minibatches, and these into micro-batches."""
    size, number = algorithm.dataset_size, algorithm.num_minibatches
    require(
        algorithm,
        size is None or size >= algorithm.num_prompts,
        f"dataset_size={size} is less than the num_prompts={algorithm.num_prompts} of an iteration",
    )
    count, groups, what = algorithm.rows_of(vars(algorithm))
    if count % number or not divides(count, groups, number):
        evenly = f" ({groups} prompts) evenly" if groups == algorithm.num_prompts else ""
        nearest = nearest_divisors(count, number, functools.partial(divides, count, groups))
        require(
            algorithm,
            False,
            f"num_minibatches={number} does not divide the {count} {what} of an iteration{evenly}: use"
            f" {nearest}",
        )
    if not fits({**vars(algorithm), "dataset_size": None}, algorithm.rows_of, 1):
        size = algorithm.micro_batch
        nearest = nearest_divisors(count // number, size)
        require(
            algorithm,
            False,
            f"micro_batch={size} does not divide the {count // number} {what} of a minibatch: use {nearest}",
        )


def check_initial_network(algorithm: Any) -> None:
    """Checks that there is one source of the network and of its adapters."""
    model, adapters, rank = algorithm.model, algorithm.adapters, algorithm.lora_rank
    message = "model= and decoder= both say what the network is: give one"
    require(algorithm, model is None or algorithm.decoder is None, message)
    message = f"adapters={adapters}: adapters belong to a checkpoint: give its folder too (model=)"
    require(algorithm, adapters is None or model is not None, message)
    message = f"adapters={adapters}: they have a rank of their own: leave lora_rank={rank} out"
    require(algorithm, adapters is None or not rank, message)


def check_answers(algorithm: Any) -> None:
    """Checks that the rows of a file have answers, if they are needed for rewards or to imitate them."""
    unanswered = getattr(getattr(algorithm.env, "problem", None), "unanswered", None)
    require(
        algorithm,
        unanswered is None or not algorithm._needs_answers,
        f"{unanswered}: has no answer, and there is no other reward: give one in each row"
        + ("" if algorithm._imitates else ", or a reward (task.with_reward)"),
    )


def other_alphabets(env: Any, earlier: Any) -> tuple[str, str] | None:
    """The alphabets of a task and of an earlier run's task, if they differ; else None."""
    tokenizers = [getattr(task, "tokenizer", None) for task in (env, earlier)]
    alphabets = [tokenizer.alphabet for tokenizer in tokenizers if isinstance(tokenizer, CharacterTokenizer)]
    return None if len(alphabets) < 2 or alphabets[0] == alphabets[1] else (alphabets[0], alphabets[1])


def wider_alphabet(algorithm: Any, earlier: Any) -> dict[str, str]:
    """The field `tokenizer` with an earlier run's alphabet, if it contains that of this task; else empty."""
    alphabets = other_alphabets(algorithm.env, earlier)
    is_fixed = algorithm.model is not None or algorithm.tokenizer is not None or is_game(algorithm.env)
    if is_fixed or alphabets is None or not set(alphabets[0]) <= set(alphabets[1]):
        return {}
    return {"tokenizer": f"characters={alphabets[1]}"}


def other_tokens(env: Any, earlier: Any) -> str | None:
    """The reason why a task's tokens differ from those of an earlier run; None if they do not."""
    alphabets = other_alphabets(env, earlier)
    if alphabets is None:
        return None
    alphabet, earlier_alphabet = alphabets
    missing = next((character for character in alphabet if character not in earlier_alphabet), None)
    if missing is not None:
        return (
            f"the run has no token for {missing!r} of task '{env.name}': train it on data with that, too, or"
            " with --tokenizer characters=ALPHABET, all characters of both"
        )
    return f"'{env.name}' and the run number characters in other orders: give it the run's tokenizer"


def check_capacity(algorithm: Any) -> None:
    """Checks that the network has the tokens of its task, and a context of the task's length."""
    env, config = algorithm.env, algorithm.network.config
    require(
        algorithm,
        env.tokenizer.vocab_size <= config.vocab_size,
        f"task '{env.name}' has a vocabulary of {env.tokenizer.vocab_size} tokens, and the network one of"
        f" {config.vocab_size}: give the network's own tokenizer (tokenizer=, or env.with_tokenizer)",
    )
    longest = context_length(env)
    fitting = config.max_positions - longest + env.response_length
    require(
        algorithm,
        longest <= config.max_positions,
        f"task '{env.name}' has prompts of up to {env.prompt_length} tokens and responses of"
        f" {env.response_length}, and the network's context is {config.max_positions}: "
        + (f"use max_response={fitting}" if fitting > 0 and not is_game(env) else "shorten the task"),
    )


# --- methods of `LanguageAgent` ---


def preset_name(cls: Any, values: Mapping[str, Any]) -> str | None:
    """The preset for a checkpoint; None without one, where the task's preset is used."""
    if values.get("model") is None:
        return None
    return "checkpoint-lora" if values.get("lora_rank") or values.get("adapters") else "checkpoint"


def change(self: Any, **values: Any) -> Any:
    """A copy with changed fields; the micro-batch is adjusted if it no longer divides."""
    fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
    named = {*fields, *values} - ({"micro_batch"} - values.keys())
    return type(self)(**self.adjust_unnamed({**fields, **values}, named))


def size_changes(cls: Any, values: Mapping[str, Any], named: Collection[str]) -> dict[str, Any]:
    """Changes to fields that are not `named` so that sizes divide: see `fitting_sizes`."""
    for name in (*_SIZES, "group_size", "dataset_size"):
        value = values.get(name, 1)
        is_none = value is None and name in ("micro_batch", "dataset_size")
        if not is_none and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            return {}  # the algorithm then refuses the sizes
    changes = fitting_sizes(values, named, cls.rows_of, cls.oversampling_factor(values))
    heads, kv_heads = values["num_heads"], values["num_kv_heads"]
    if "num_heads" not in named and kv_heads in range(1, 1 << 16) and heads % kv_heads:
        changes["num_heads"] = kv_heads * max(1, round(heads / kv_heads))
    return changes


MEMBERS = {"_sizes": classmethod(size_changes), "changed": change, "preset_name": classmethod(preset_name)}
