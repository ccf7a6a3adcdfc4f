"""`--memory` without `--algo`: PPO with a memory is recurrent PPO."""

from collections.abc import Mapping, Sequence
from typing import Any


def with_memory(words: Sequence[str], early: Mapping[str, Any]) -> tuple[list[str], dict[str, Any]]:
    """PPO with a `--memory` is `recurrent_ppo`: the words, and what was read of them, that say so.

    Args:
      words: of a command line, normalised.
      early: what was read of them so far; without `algo`, that of an earlier run or a file stays.

    >>> with_memory(["--memory", "lstm"], {})
    (['--memory', 'lstm', '--algo', 'recurrent_ppo'], {'algo': 'recurrent_ppo'})
    >>> with_memory([], {})
    ([], {})
    >>> with_memory(["--memory=lstm"], {"algo": "ippo"})
    (['--memory=lstm'], {'algo': 'ippo'})
    """
    remembers = any(
        word.partition("=")[0] == "--memory" and (word.partition("=")[2] or after).lower() != "none"
        for word, after in zip(words, (*words[1:], ""), strict=False)  # of no words, none
    )
    goes_on = any(name in early for name in ("resume", "config", "start_from"))
    named = early.get("algo", None if goes_on else "ppo")
    if not remembers or named != "ppo":
        return list(words), dict(early)
    return [*words, "--algo", "recurrent_ppo"], {**early, "algo": "recurrent_ppo"}
