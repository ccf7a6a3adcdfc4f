"""Modules that a run's `config.json` names: imported only when somebody says so.

Whoever resumes or loads a run that another made would otherwise run that other's code, or whatever lies under
its name in the current folder. See docs/decisions/029-a-run-imports-nothing-unasked.md.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fdg.errors import FdgError

NETWORKS = ("network", "actor_network", "critic_network")  # hyperparameters that may name a module

_OURS = ("algos", "envs", "policies", "fdg")


def check_trusted(
    file: Path, config: Mapping[str, Any], named: Mapping[str, Any] | None = None, trust: bool = False
) -> None:
    """Refuses to import what only a configuration names. What is imported already runs no more.

    Args:
      file: of the configuration, for messages.
      config: its configuration.
      named: what the caller names itself: `algo`, `env`, `policy` or a network, of the same values.
      trust: the caller allows all of it.

    Raises:
      FdgError: a module that nobody but the configuration names; says what to say.
    """
    hyperparameters = config.get("hyperparameters")
    inner = hyperparameters if isinstance(hyperparameters, Mapping) else {}
    for name in ("algo", "env", "policy", *NETWORKS):
        value = config.get(name) or inner.get(name)
        module = _module(name, value)
        if trust or module is None or module in sys.modules or (named or {}).get(name) == value:
            continue
        raise FdgError(
            f"{file} names the module '{module}' ({name} {value}), which would be imported"
            f" and run: name it too, --{name.replace('_', '-')} {value}, or say --trust (Python: trust=True)"
        )


def _module(name: str, value: Any) -> str | None:
    """The module of somebody else's that a value names, None if it names none.

    >>> _module("algo", "mine.deep:Walk"), _module("algo", "ppo"), _module("algo", "algos.ppo:PPO")
    ('mine.deep', None, None)
    >>> _module("env", "gymnasium:mine:Maze-v0"), _module("env", "gymnasium:Hopper-v5?frame_skip=8")
    ('mine', None)
    >>> _module("env", "brax:ant:spring"), _module("env", "mine:maze?size=3")
    (None, 'mine')
    >>> _module("env", "ray:gymnasium:mine:Maze-v0"), _module("env", "ray:envpool:Pong-v5")
    ('mine', None)
    """
    import envs

    if not isinstance(value, str):
        return None
    text = value.partition("?")[0]
    module, colon, _ = text.partition(":")
    if name == "env":
        module = colon = envs.module_of(text) or ""
    return module if colon and module.partition(".")[0] not in _OURS else None
