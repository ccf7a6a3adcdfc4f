"""The commands that use what was trained: `python -m fdg.evaluate`, `answer`, `play`, `export` and `plot`."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fdg.commands.command import RUN, RUNS, Command
from fdg.commands.flags import Flag
from fdg.commands.search_flags import member_of
from fdg.errors import FdgError
from fdg.running.program_cache import keep_programs
from fdg.training.writable import check_writable, writing

_CHECKPOINT = Flag("checkpoint", str, "last", "which: last, best (of --eval-every), or an iteration")
_TRUST = Flag("trust", bool, False, "import modules of your own that the run names")
_MEMBER = Flag(
    "member",
    str | None,
    None,
    "agents of a sweep: best, or a point's values, with one's seed: learning_rate=1e-3,seed=2 (None: all)",
)
_AGENT = Flag("agent", int, 0, "which, of several seeds")

# Of each command, by its name; each takes run directories beside them.
FLAGS: Mapping[str, Sequence[Flag]] = {
    "evaluate": (
        Flag("episodes", int | None, None, "of each agent (None: as many as after training)"),
        Flag("actions", str, "both", "greedy (the most probable), sampled (as in training), or both"),
        Flag("seed", int | None, None, "of the episodes (None: of those after training)"),
        Flag("env", str | None, None, "another environment, such as CartPole-v1?gravity=20.0"),
        _MEMBER,
        _CHECKPOINT,
        Flag("out", str | None, None, "a file, one line an episode (None: RUN/evaluation.jsonl)"),
        _TRUST,
    ),
    "answer": (
        Flag("temperature", float, 0.0, "logits are divided by it; 0: the most likely tokens"),
        Flag("max_new_tokens", int | None, None, "of an answer (None: as many as in training)"),
        Flag("system", str | None, None, "the system message (None: that of training)"),
        Flag("seed", int, 0, "of what is drawn"),
        _AGENT,
        _MEMBER,
        _CHECKPOINT,
        _TRUST,
    ),
    "play": (
        Flag("out", str | None, None, ".mp4, .gif or .html (None: RUN/video.gif)"),
        Flag("episodes", int, 1, "how many, side by side"),
        Flag("sampled", bool, False, "actions drawn as in training, in place of the most probable"),
        Flag("seed", int, 0, "of the episodes"),
        Flag("fps", int, 30, "pictures a second"),
        Flag("max_steps", int, 1_000, "an episode that is longer is cut"),
        _AGENT,
        _MEMBER,
        _CHECKPOINT,
        _TRUST,
    ),
    "export": (
        Flag(
            "out",
            str | None,
            None,
            "the file, .jax or .onnx (None: RUN/policy.jax, or RUN/policy.onnx); its description, .json,"
            " goes next to it; of a language model, the folder (None: RUN/exported)",
        ),
        Flag(
            "format",
            str | None,
            None,
            "jax or onnx (None: by the ending of --out); of a language model peft, its adapters alone",
        ),
        Flag("sampled", bool, False, "actions drawn from a seed, in place of the most probable"),
        _AGENT,
        _MEMBER,
        _CHECKPOINT,
        _TRUST,
    ),
    "plot": (
        Flag("out", str, "comparison.png", "the picture: .png, .svg or .pdf"),
        Flag("metric", str, "episode_return", "of metrics.jsonl"),
        Flag("x", str, "env_steps", "over env_steps or wall_s"),
        Flag("statistic", str, "mean", "over seeds: mean, or iqm (the interquartile mean)"),
        Flag(
            "label",
            tuple[str, ...] | None,
            None,
            "of the runs, in their order, with commas between (None: what differs between them)",
        ),
    ),
}


ABOUT: Mapping[str, str] = {
    "evaluate": "Plays whole episodes with trained agents. Without flags, the greedy ones are those that"
    " training ended with, and give the eval_return of summary.json to the last digit.",
    "answer": "Says what a trained language model answers: to each prompt, or each line of standard input.",
    "play": "Plays episodes with a trained agent, and writes them side by side as a video.",
    "export": "Writes a trained policy to a file: a serialised function of JAX's, or ONNX; a language model"
    " to a folder, in Hugging Face's format.",
    "plot": "Compares runs: a statistic over seeds and its 95% interval. Runs that differ only in their seeds"
    " are one curve. Of a folder of runs, all are taken.",
}


def _evaluate(given: dict[str, Any]) -> None:
    if given["actions"] not in ("greedy", "sampled", "both"):
        raise FdgError(f"--actions {given['actions']}: it must be greedy, sampled or both")
    out = Path(given["out"] or Path(given["run"]) / "evaluation.jsonl")
    loaded = _load(given)
    try:
        check_writable(out)
    except FdgError as error:
        fix = ": give another file by --out" if given["out"] is None else ""
        raise FdgError(f"{error}{fix}") from None
    env = None
    if given["env"] is not None:
        import envs

        name, overrides = envs.parse(given["env"])
        env = envs.make(name, **overrides)
    from fdg.training.run_directory import json_line

    kinds = {"greedy": [True], "sampled": [False], "both": [True, False]}[given["actions"]]
    print(f"{loaded!r}", flush=True)
    rows: list[dict[str, Any]] = []
    for greedy in kinds:
        found = loaded.evaluate(given["episodes"], greedy=greedy, seed=given["seed"], env=env)
        print(found, flush=True)
        rows += found.rows()
    if rows:
        with writing(out):
            out.write_bytes(b"".join(json_line({"iteration": loaded.iteration, **row}) for row in rows))
        print(f"each episode: {out}")


def _answer(given: dict[str, Any]) -> None:
    prompts = given.get("prompt") or sys.stdin.read().splitlines()
    if not prompts:
        raise FdgError('no prompt: write fdg answer RUN "1+1=", or one a line to standard input')
    how = {name: given[name] for name in ("temperature", "max_new_tokens", "system", "seed", "agent")}
    for answer in _load(given).answer(prompts, **how):
        print(answer, flush=True)


def _play(given: dict[str, Any]) -> None:
    out = given["out"] or Path(given["run"]) / "video.gif"
    how = {name: given[name] for name in ("episodes", "agent", "seed", "fps", "max_steps")}
    print(_load(given).play(out, greedy=not given["sampled"], **how))


def _export(given: dict[str, Any]) -> None:
    loaded = _load(given)
    ending = given["format"] if given["format"] in ("jax", "onnx") else "jax"
    file = "exported" if callable(getattr(loaded.algorithm, "export", None)) else f"policy.{ending}"
    out = given["out"] or Path(given["run"]) / file
    print(loaded.export(out, format=given["format"], agent=given["agent"], greedy=not given["sampled"]))


def _plot(given: dict[str, Any]) -> None:
    from fdg.training import curves

    out, labels = Path(given["out"]), given["label"] or ()
    check_writable(out)
    how = {name: given[name] for name in ("metric", "x", "statistic")}
    figure, found = curves.compare(given["runs"], labels=labels, **how)
    try:
        with writing(out):
            figure.savefig(out, dpi=150)
    except FdgError:
        raise
    except ValueError as error:  # an ending that matplotlib does not know
        raise FdgError(f"--out {out}: {error}") from error
    for label, path in zip(labels, curves.runs_in(given["runs"]), strict=False):
        print(f"{label} = {path}")
    print(curves.table(found))
    print(out)


def _load(given: dict[str, Any]) -> Any:
    keep_programs(None)
    import envs
    from fdg.training.loading import load_with_names

    chosen, trust = given["checkpoint"], given["trust"]
    chosen = int(chosen) if chosen.isdigit() else chosen
    named = None  # a command that has a flag for the environment: naming that of the run trusts it
    if "env" in given:
        named = {"env": None if given["env"] is None else envs.absolute(given["env"])}
    run = load_with_names(given["run"], named, checkpoint=chosen, trust=trust, flags=("env",))
    return run if given.get("member") is None else member_of(run, given["member"])


_PROMPT = {"prompt": {"nargs": "*", "help": "texts (none: each line of standard input)"}}
COMMANDS: Mapping[str, Command] = {
    name: Command(f"python -m fdg.{name}", ABOUT[name], FLAGS[name], act, takes)
    for name, act, takes in (
        ("evaluate", _evaluate, RUN),
        ("answer", _answer, {**RUN, **_PROMPT}),
        ("play", _play, RUN),
        ("export", _export, RUN),
        ("plot", _plot, RUNS),
    )
}
