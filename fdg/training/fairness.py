"""What was unequal between the sides of a comparison, as its readers need to know."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from fdg.errors import FdgError, listed
from fdg.kinds import dataclass_fields, to_json
from fdg.training.curves import Curves
from fdg.training.run_directory import read_config, read_metrics, read_summary

_MOST = 6  # sides, or environments, that a sentence names


def unequal(found: Sequence[Curves]) -> list[str]:
    """Sentences: where the sides differ in budget, seeds, presets, settings by hand, measure, or versions.

    Args:
      found: curves of sides, each with its runs.
    """
    facts = [(one, _facts(one)) for one in found]
    said: dict[str, list[str]] = {}
    for env in dict.fromkeys(one.env for one in found):
        here = {one.label: known for one, known in facts if one.env == env}
        for name, sentence in _SENTENCES.items():
            values = {side: known[name] for side, known in here.items()}
            differ = len({str(value) for value in values.values()}) > 1
            if differ or (name in _ALWAYS and any(values.values())):
                said.setdefault(sentence(values), []).append(env)
    return [f"{text} ({_few(envs, 'and')})" for text, envs in said.items()]


def _facts(one: Curves) -> dict[str, Any]:
    """What should be equal between sides, by name."""
    runs = list(dict.fromkeys(one.runs))
    configs = [read_config(path, prefix="") for path in runs]
    summaries = [read_summary(path) for path in runs]
    steps = {each["hyperparameters"].get("total_steps") or each.get("total_steps") or 0 for each in configs}
    config = configs[0]
    versions = {
        f"{name} {version}"
        for each in configs
        for name, version in (each.get("versions") or {}).items()
        if name in ("fdg", "jax")
    }
    ended = [summary is not None and not summary.get("stopped") for summary in summaries]
    return {
        "steps": " or ".join(f"{count:,}" for count in sorted(steps)),
        "seeds": len(one.seeds),
        "preset": "a preset" if config.get("preset_name") else "none",
        "by hand": _by_hand(config),
        "measure": _measure(one, summaries),
        "staleness": config.get("staleness") or 0,
        "lag": config.get("lag") or 0,
        "sweep": config.get("sweep"),
        "versions": ", ".join(sorted(versions)),
        "unfinished": "" if all(ended) else f"{ended.count(False)} of {len(ended)} runs{_why(runs, ended)}",
    }


def _measure(one: Curves, summaries: Iterable[Mapping[str, Any] | None]) -> str:
    if not one.evaluated:
        return "the last tenth of the training"
    episodes = {summary.get("eval_episodes") for summary in summaries if summary}
    return f"greedy evaluations of {listed(sorted(map(str, episodes)))} episodes"


def _why(runs: Sequence[Any], ended: Sequence[bool]) -> str:
    """Whether a run that has not ended was stopped by a loss that is not finite."""
    from fdg.training.finite import is_vital

    for run, whole in zip(runs, ended, strict=True):
        last = {} if whole else list(read_metrics(run / "metrics.jsonl"))[-1]
        if any(value is None and is_vital(name) for name, value in last.items()):
            return ", ended by a loss that is not finite"
    return ""


def _by_hand(config: Mapping[str, Any]) -> str:
    """Settings that neither the algorithm's defaults nor a preset explain; none of a user's own class."""
    import algos

    try:
        fields = dataclass_fields(algos.get(str(config.get("algo"))))
    except (FdgError, ImportError):
        return ""
    explained = {**(config.get("preset") or {}), **(config.get("follows") or {})}
    defaults = {
        field.name: to_json(field.default) for field in fields if field.name not in ("env", "total_steps")
    }
    given = [
        f"{name}={_shown(value)}"
        for name, value in config["hyperparameters"].items()
        if name in defaults and value != defaults[name] and value != explained.get(name, defaults[name])
    ]
    return f"{', '.join(given[:_MOST])}{f' and {len(given) - _MOST} more' if given[_MOST:] else ''}"


def _shown(value: Any) -> str:
    return re.sub(r"\s+", " ", "/".join(map(str, value)) if isinstance(value, list) else str(value))[:40]


def _few(words: Sequence[Any], last: str) -> str:
    more = f" ({len(words) - _MOST} more)" if len(words) > _MOST else ""
    return listed(words[:_MOST], last) + more


def _each(values: Mapping[str, Any]) -> str:
    """Sides by their value: `ppo 5; a2c and dqn 3`."""
    sides: dict[str, list[str]] = {}
    for side, value in values.items():
        sides.setdefault(str(value), []).append(side)
    return "; ".join(f"{_few(names, 'and')} {value}" for value, names in sides.items())


_SENTENCES: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "steps": lambda values: f"budgets differ, in steps of each seed: {_each(values)}",
    "seeds": lambda values: f"numbers of seeds differ: {_each(values)}",
    "preset": lambda values: f"tuned settings on one side: {_each(values)}",
    "by hand": lambda values: (
        "settings by hand: " + "; ".join(f"{side} has {text}" for side, text in values.items() if text)
    ),
    "measure": lambda values: f"final returns are measured differently: {_each(values)}",
    "staleness": lambda values: f"staleness differs: {_each(values)}",
    "lag": lambda values: f"lag differs, in micro-batches: {_each(values)}",
    "sweep": lambda values: (
        "points of a sweep, of which the best is chosen by its own result: "
        + _few([side for side, text in values.items() if text], "and")
    ),
    "versions": lambda values: f"versions differ: {_each(values)}",
    "unfinished": lambda values: (
        "runs have not ended: " + "; ".join(f"{side} {text}" for side, text in values.items() if text)
    ),
}
_ALWAYS = ("sweep", "unfinished")  # said where all sides have it, too
