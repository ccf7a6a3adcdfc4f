"""Environments by name: `make`, `names`, `register`; including those of users' modules and packages.

A source of environments is one file with a function `factories() -> {name: factory}`; to add a source, add
an import and an entry of `SOURCES`. The file loads the source's package at first use, not when it is
imported, so a missing or slow package affects only those who use its environments.
"""

import ast
import contextlib
import dataclasses
import inspect
import os
import re
from collections.abc import Callable, Iterable, Mapping
from importlib.util import find_spec
from typing import Any, NamedTuple

from envs import (
    families,
    foreign,
    from_brax,
    from_craftax,
    from_envpool,
    from_gymnasium,
    from_gymnax,
    from_jaxmarl,
    from_jumanji,
    from_octax,
    from_playground,
    from_ray,
    games,
    jaxmarl_brax,
    probe,
    text,
    user_code,
)
from envs.adapters import check_names
from envs.checking import names_with_parameters
from envs.codesign import environment as codesign
from envs.environment import Environment, Vectorized, named_info
from envs.host import HostEnvironment
from envs.spaces import nested_tuple
from envs.text import verifiers
from envs.wrappers import PARAMETERS, apply_wrappers
from fdg.arguments import checked, checked_names, quoted
from fdg.errors import FdgError, listed, one_line, unknown_name, whose_file
from fdg.kinds import as_python

SOURCES = (
    from_gymnax,
    from_brax,
    from_jaxmarl,
    jaxmarl_brax,
    from_craftax,
    from_playground,
    from_octax,
    from_jumanji,
    probe,
    games,
)


_WORD = re.compile(r"[\w+|-]{1,64}")  # matches names in registries, but no paths or modules


class _PrefixSource(NamedTuple):
    """A source whose names have a prefix and are too many to list: `make(prefix + name)`."""

    make: Callable[..., Any]  # (name without the prefix, **overrides)
    trust_reason: Callable[[str, Mapping[str, Any]], str | None]  # (full name, parameters), as `trust_reason`
    absolute: Callable[[str], str] = str  # as `absolute`
    files: Callable[[str, Mapping[str, Any]], dict[str, str]] = lambda *_: {}  # as `files_of`


# Some lambdas only call functions that are defined below.
_PREFIXES: dict[str, _PrefixSource] = {
    from_envpool.PREFIX: _PrefixSource(
        from_envpool.make, lambda name, values: _text_reason(values) or from_envpool.trust_reason(name)
    ),
    text.PREFIX: _PrefixSource(  # tasks for language models, not environments
        text.make, text.trust_reason, lambda name: _absolute_files(name), text.files_of
    ),
    verifiers.PREFIX: _PrefixSource(
        lambda name, **overrides: text.make("verifiers", environment=name, **overrides),
        lambda name, _: f"imports the module {name.removeprefix(verifiers.PREFIX)}",
    ),
    codesign.PREFIX: _PrefixSource(
        codesign.make, codesign.trust_reason, codesign.absolute, codesign.files_of
    ),
    games.from_pgx.PREFIX: _PrefixSource(
        games.make_of_pgx, lambda name, parameters: _text_reason(parameters, _WORD)
    ),
    from_gymnasium.PREFIX: _PrefixSource(from_gymnasium.make, lambda *args: _gymnasium_trust_reason(*args)),
    from_ray.PREFIX: _PrefixSource(
        lambda name, **overrides: _make_fleet(name, **overrides),
        lambda *_: "starts a Ray cluster, or joins one",
    ),
}

# Prefix of host environments -> a function that lists the names of the installed package.
_HOST_NAMES = {from_gymnasium.PREFIX: from_gymnasium.all_names, from_envpool.PREFIX: from_envpool.all_names}

_BUILT_IN: dict[str, Callable[..., Environment]] = {
    name: factory for source in SOURCES for name, factory in source.factories().items()
}
_registered: dict[str, Callable[..., Environment]] = {}  # by `register`


@checked_names
def make(name: str, **overrides: Any) -> Any:
    """Makes the environment called `name`.

    Args:
      name: one of `names()`; `envpool:` or `gymnasium:` and a name of that package; `text:` and one of
        `envs.text.names()`; `codesign:` and `w1`, `w2`, `w3` or a TOML file; or `module:factory`, which is
        imported. A factory is a function or class whose call returns an `Environment`, a `SingleEnvironment`
        (it is vectorized), an `envs.text.TextTask` or an `envs.text.TextProblem`. The prefix `ray:` spreads
        the instances of a host environment over the hosts of a Ray cluster.
      **overrides: parameters of the environment, for instance `max_steps_in_episode=200`: Python numbers,
        strings and tuples. Every environment also takes `info`, names of values to report for each episode
        (`envs.vectorize`), and wrappers (`envs.wrappers`). Wrappers are applied in this order:
        `action_repeat=2`, `hide_observations=("walls",)`, `time_aware=True`, `frame_stack=4`.

    Returns:
      An `Environment` (an `envs.text.TextTask` for `text:`): a frozen, hashable value; the same arguments
      make equal values. No array is allocated.

    Raises:
      UnknownNameError: no environment has this name; the message suggests the nearest.
      FdgError: the environment does not take an override; the message lists those that it takes. Or a user's
        module cannot be imported, or has no such factory.

    >>> make("CartPole-v1") == make("CartPole-v1")
    True
    >>> make("CartPole-v1").action_space
    Discrete(n=2)
    >>> make("CartPole-v1", max_steps_in_episode=200).max_episode_steps
    200
    """
    if not isinstance(name, str):
        reason = foreign.reason_not_adapted(name)
        fix = (
            f"; this value {reason}"
            if reason
            else "; use an Environment object as it is, and give a SingleEnvironment to envs.vectorize"
        )
        raise FdgError(f"envs.make({quoted(name)}): give a name, such as 'CartPole-v1'{fix}")
    if "?" in name and name not in _registered:
        plain, parameters = parse(name)
        keywords = "".join(f", {key}={value!r}" for key, value in {**parameters, **overrides}.items())
        raise FdgError(
            f"envs.make({name!r}): in Python, parameters are keywords: envs.make('{plain}'{keywords})"
        )
    overrides = {key: as_python(value) for key, value in overrides.items()}
    common = {key: overrides[key] for key in _COMMON_PARAMETERS if key in overrides}
    try:
        env = _make_unwrapped(
            name, {key: value for key, value in overrides.items() if key not in common}, common
        )
    except FdgError as error:
        key = next((key for key in overrides if key in _OTHER_LIBRARIES and f"'{key}'" in str(error)), None)
        if key is None:
            raise
        fix = _OTHER_LIBRARIES[key].format(value=overrides[key])
        raise FdgError(f"environment '{name}': no parameter '{key}': {fix}") from error
    env = apply_wrappers(env, common)
    if overrides or _module_of(name) is not None:
        options = "&".join(f"{parameter}={nested_tuple(value)!r}" for parameter, value in overrides.items())
        # A user's text task is found by its problem, since algorithms replace its tokens and lengths.
        named = env if _module_of(name) is None else getattr(env, "problem", env)
        with contextlib.suppress(TypeError):  # not hashable
            names_with_parameters[named] = f"{name}?{options}" if options else name
    return env


_DATA_SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet")  # suffixes of data files
_COMMON_PARAMETERS = (*PARAMETERS, "info")  # parameters that every environment takes

_NUM_ENVS_FIX = (
    "it is a setting of the algorithm: algos.PPO(env=..., num_envs={value!r:.60}), --num-envs {value!r:.60}"
)
_OTHER_LIBRARIES = {  # parameters that other libraries pass to an environment: the fix for each
    "num_envs": _NUM_ENVS_FIX,
    "n_envs": _NUM_ENVS_FIX,
    "seed": "it is a setting of the run: fdg.fit(..., seed={value!r:.60}), --seed {value!r:.60};"
    " reset takes keys",
    "render_mode": "fdg.load(RUN).play('video.mp4') and fdg play RUN draw pictures",
}


def _make_unwrapped(name: str, overrides: dict[str, Any], common: Mapping[str, Any]) -> Any:
    """Makes the environment without wrappers; of the `common` parameters, it takes `info`."""
    info = {key: common[key] for key in ("info",) if key in common}
    for prefix, source in _PREFIXES.items():
        if name.startswith(prefix) and name not in _registered:
            if prefix in (text.PREFIX, verifiers.PREFIX) and common:
                raise FdgError(f"'{name}' is a text task, which takes no {listed(common, 'and')}")
            return source.make(name.removeprefix(prefix), **overrides, **info)
    env = _make_by_factory(name, overrides)
    if not info:
        return env
    names = named_info(info["info"])
    if isinstance(env, HostEnvironment) and isinstance(env.source, from_gymnasium.GymnasiumSource):
        return dataclasses.replace(env, source=dataclasses.replace(env.source, info=names))
    if not isinstance(env, Vectorized):
        raise FdgError(f"environment '{name}' is already vectorized, so info= does not apply: leave it out")
    return dataclasses.replace(env, info=names)


def _make_by_factory(name: str, overrides: dict[str, Any]) -> Any:
    """Makes an environment by a factory of that name: registered, built in, of a package, or imported."""
    factory = _registered.get(name) or _BUILT_IN.get(name)
    if factory is None and name in user_code.entry_points():
        return user_code.make_of_package(name, overrides)
    suggestions = _names_for_other_prefix(name) if factory is None else None
    if factory is None and _module_of(name) is not None and suggestions is None:
        return user_code.make(name, overrides)
    if factory is None and os.path.splitext(name)[1].lower() in _DATA_SUFFIXES:
        raise FdgError(f"environment '{name}' is a file of data: write text:file?path={name}")
    if factory is None:
        raise unknown_name("environment", name, names(), "envs.names()", suggestions or _near_names(name))
    try:
        return factory(**overrides)
    except (TypeError, ValueError, OverflowError) as error:
        if isinstance(error, FdgError) or not overrides:
            raise
        _check_parameters(name, factory, overrides)
        arguments = ", ".join(f"{parameter}={value!r}" for parameter, value in overrides.items())
        raise FdgError(f"environment '{name}' does not take {arguments}: {one_line(error)}") from error


def _check_parameters(name: str, factory: Callable[..., Any], overrides: Mapping[str, Any]) -> None:
    """Raises for parameters that a factory does not take; the message lists the parameters that it takes."""
    try:
        parameters = inspect.signature(factory).parameters
    except (TypeError, ValueError):  # a C function without signature
        return
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        check_names(f"environment '{name}'", overrides, parameters)


# A prefix as users of other libraries write it, a sign, and a name.
_OTHER_PREFIX = re.compile(
    r"(?:gym|gymnasium|gymnax|ale|atari|envpool|mujoco|jaxmarl|mpe|minatar|craftax|brax|jumanji|octax|playground)"
    r"[:/.](?P<task>[^:]+)", re.IGNORECASE
)  # fmt: skip


def _names_for_other_prefix(name: str) -> list[str] | None:
    """Our names for a name with another library's prefix, such as `gym:CartPole-v1`.

    None if the name has no such prefix, or if no name is similar and the user has a module of that name.
    """
    match = _OTHER_PREFIX.fullmatch(name)
    if match is None:
        return None
    task = match["task"].rpartition("/")[2]
    library = name[: match.start("task") - 1].lower()
    full_name = f"{'gymnasium' if library == 'gym' else library}:{task}"
    exact = [candidate for candidate in names() if candidate.lower() in (task.lower(), full_name.lower())]
    if library in ("gym", "gymnasium"):
        return [f"{from_gymnasium.PREFIX}{match['task']}", *exact]
    spec = None if (suggestions := exact or _near_names(task)) else find_spec(library)
    return None if spec is not None and whose_file(spec.origin) == "user" else suggestions


def _near_names(name: str) -> list[str]:
    """Names that differ from `name` only by case or version: built-in names, else names of host environments.

    Of several versions, only the newest. `families` gives the names of packages that are not installed.
    """

    def task(candidate: str) -> str:
        return candidate.rpartition(":")[2].lower()

    def similar(known: Iterable[str]) -> list[str]:
        same_task = [candidate for candidate in known if task(candidate) == name.lower()]
        stem = name.lower().rpartition("-v")[0]
        versions = [candidate for candidate in known if stem and task(candidate).rpartition("-v")[0] == stem]
        return same_task[:1] or sorted(versions, key=lambda candidate: (len(candidate), candidate))[-1:]

    near = similar([candidate for candidate in names() if ":" not in candidate])
    for prefix, all_names in _HOST_NAMES.items() if not near else ():
        installed = [f"{prefix}{candidate}" for candidate in all_names()]
        near += (
            similar(installed)
            if installed
            else [candidate for candidate in families.known_host_names(name) if candidate.startswith(prefix)]
        )
    return near


# Up to an `&` outside quotation marks; an opening quotation mark follows punctuation or a space.
_OPTION = re.compile(r"""(?:(?<=[=(\[{,:\s])(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")|[^&])+""")

_UNMARKED = re.compile(r"([^\s=&;,]+)[\s&;,]+([A-Za-z_]\w*=.*)")  # parameters after a sign other than `?`
_WRONG_SEPARATOR = re.compile(r"(.+?)[,;?\s]+[A-Za-z_]\w*=")  # two parameters with a wrong sign between them


def parse(text: str) -> tuple[str, dict[str, Any]]:
    """Parses an environment's name with parameters: `NAME?PARAMETER=VALUE&PARAMETER=VALUE`.

    Values are Python numbers, tuples, `True`, `False` and `None`; anything else is a string, quoted or not.

    Raises:
      FdgError: the text after the question mark is not a list of parameters.

    >>> parse("gymnasium:Hopper-v5?restarts=2&frame_skip=8")
    ('gymnasium:Hopper-v5', {'restarts': 2, 'frame_skip': 8})
    """
    if not isinstance(text, str):
        raise FdgError(f"environment {text!r}: give its name, a string such as 'CartPole-v1'")
    name, mark, options = text.partition("?")
    overrides = {}
    if not mark and (match := _UNMARKED.fullmatch(text)):
        raise FdgError(f"environment '{text}': parameters begin with ?: write '{match[1]}?{match[2]}'")
    for option in _OPTION.findall(options) or [""] if mark else ():
        parameter, equals, value = option.partition("=")
        if not (parameter.isidentifier() and equals):
            fix = f"{option}=VALUE" if option.isidentifier() else "steps=200"
            raise FdgError(f"environment '{text}': '{option}' is not PARAMETER=VALUE: write {name}?{fix}")
        if (pair := _WRONG_SEPARATOR.match(value)) and not isinstance(_parse_value(pair[1]), str):
            fix = f"{name}?{parameter}={pair[1]}&{value[pair.end(1) :].lstrip(',;? ')}"
            raise FdgError(f"environment '{text}': parameters are joined by &: write {fix}")
        if parameter in overrides:
            raise FdgError(f"environment '{text}': {parameter} is given twice: give it once")
        overrides[parameter] = _parse_value(value)
    return name, overrides


def absolute(name: str) -> str:
    """The name of an environment with absolute paths of its files, so that it works in any folder.

    >>> absolute("text:file?path=/data/sums.jsonl&instruction=Add."), absolute("CartPole-v1")
    ('text:file?path=/data/sums.jsonl&instruction=Add.', 'CartPole-v1')
    """
    return next((x.absolute(name) for prefix, x in _PREFIXES.items() if name.startswith(prefix)), name)


def files_of(name: str, parameters: Mapping[str, Any]) -> dict[str, str]:
    """The files that an environment reads, by the parameter of `make` that gives each path.

    >>> files_of("text:file", {"path": "sums.jsonl"}), files_of("codesign:mine.toml", {})
    ({'path': 'sums.jsonl'}, {'path': 'mine.toml'})
    """
    files = (x.files(name, parameters) for prefix, x in _PREFIXES.items() if name.startswith(prefix))
    return next(files, {})


def _absolute_files(name: str) -> str:
    """The name of a text task with absolute paths of its files, quoted where `parse` needs it.

    >>> _absolute_files("text:file?path='/data/sums.jsonl'&split=1"), _absolute_files("text:file?path='/a&b'")
    ('text:file?path=/data/sums.jsonl&split=1', "text:file?path='/a&b'")
    """
    before, mark, options = name.partition("?")
    parts = []
    for option in _OPTION.findall(options):
        parameter, equals, value = option.partition("=")
        if parameter in text.FILES:
            path = os.path.abspath(str(_parse_value(value)))
            value = path if "&" not in path and _parse_value(path) == path else repr(path)
        parts.append(parameter + equals + value)
    return before + mark + "&".join(parts)


def _parse_value(text: str) -> Any:
    """Parses a Python number, tuple, boolean or None, and `inf`; returns any other text unchanged."""
    try:
        value = float(text) if text in ("inf", "-inf") else ast.literal_eval(text)
        hash(value)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return text
    return value


def names() -> tuple[str, ...]:
    """The names that `make` accepts, registered ones last, but without those that are too many to list.

    These have a prefix, such as `envpool:`, `gymnasium:` or `text:`.

    >>> "CartPole-v1" in names()
    True
    """
    return (*_BUILT_IN, *(name for name in user_code.entry_points() if name not in _BUILT_IN), *_registered)


def trust_reason(name: str, parameters: Mapping[str, Any]) -> str | None:
    """Why only the user, and never a file alone, may ask for `make(name, **parameters)`; None if a file may.

    The reason is what `make` does: it imports a module; starts or joins other processes; downloads; or passes
    a text to another package's code, which may open it as a module, a file or a command.

    >>> trust_reason("CartPole-v1", {"gravity": 9.0}), trust_reason("text:sorting", {})
    (None, None)
    >>> trust_reason("gymnasium:mine:Maze-v0", {})
    'imports the module mine'
    >>> trust_reason("gymnasium:Hopper-v5", {"xml_file": "mine.xml"})
    "passes the text xml_file='mine.xml' to code that may open or run it"
    """
    parameters = {key: value for key, value in parameters.items() if key not in _COMMON_PARAMETERS}
    if name in _DOWNLOADS:
        return "downloads its data"
    if name in _BUILT_IN:
        return _text_reason(parameters, _WORD)
    if name in _registered or name in user_code.entry_points():
        return _text_reason(parameters)
    for prefix, source in _PREFIXES.items():
        if name.startswith(prefix):
            return source.trust_reason(name, parameters)
    module = _module_of(name)
    return None if module is None else f"imports the module {module}"


def _gymnasium_trust_reason(name: str, parameters: Mapping[str, Any]) -> str | None:
    """As `trust_reason`, for a name with Gymnasium's prefix."""
    module, colon, _ = name.removeprefix(from_gymnasium.PREFIX).rpartition(":")
    return f"imports the module {module}" if colon else _text_reason(parameters)


def names_module(name: str) -> bool:
    """Whether a name is `module:factory`, without a prefix."""
    return not name.startswith(tuple(_PREFIXES)) and _module_of(name) is not None


def _module_of(name: str) -> str | None:
    """The user's module in a name `module:factory`; None for other names."""
    return user_code.module_of(name, (*_BUILT_IN, *user_code.entry_points()))


# names of environments that download data
_DOWNLOADS = frozenset(name for source in SOURCES for name in getattr(source, "DOWNLOADS", ()))


def _text_reason(parameters: Mapping[str, Any], allowed: re.Pattern | None = None) -> str | None:
    """The `trust_reason` of parameters: the first text among their values that does not match `allowed`."""

    def is_plain(value: Any) -> bool:
        if isinstance(value, str):
            return allowed is not None and allowed.fullmatch(value) is not None
        if isinstance(value, tuple):
            return all(map(is_plain, value))
        return value is None or isinstance(value, bool | int | float)

    for parameter, value in parameters.items():
        if not is_plain(value):
            return f"passes the text {parameter}={value!r:.60} to code that may open or run it"
    return None


def _make_fleet(name: str, **overrides: Any) -> Any:
    """A fleet of workers, which make the environment `name` (without the prefix `ray:`)."""
    return from_ray.make(name, make, **overrides)


def name_with_parameters(env: Any) -> str | None:
    """The `NAME?PARAMETER=VALUE` of an environment that `make` returned; None if its name is enough."""
    try:
        return names_with_parameters.get(getattr(env, "problem", env))
    except TypeError:  # not hashable
        return None


@checked
def register(name: str, factory: Callable[..., Environment]) -> None:
    """Registers a factory: `make(name, **overrides)` returns `factory(**overrides)`.

    Registering a name again replaces its factory, so that a notebook cell can run twice.

    Args:
      name: a name that no built-in environment has.
      factory: returns an `Environment`, such as `vectorize(single)`; equal arguments must give equal values.

    Raises:
      FdgError: a built-in environment has this name.

    Example::

        envs.register("recall", lambda delay=8: envs.vectorize(probe.Memory(delay)))
        env = envs.make("recall", delay=2)
    """
    if name in _BUILT_IN:
        raise FdgError(f"environment '{name}' is built in and cannot be replaced; register another name")
    _registered[name] = factory
