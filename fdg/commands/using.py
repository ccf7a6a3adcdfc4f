"""The commands that use trained runs: `evaluate`, `answer`, `play`, `export`, `plot`, `collect`, ...

`fdg.compare` and `fdg.diff` are functions, so `fdg compare` and `fdg diff` have no modules of these names.
"""

import contextlib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fdg.commands.command import RUN, RUNS, Command
from fdg.commands.flags import Flag
from fdg.commands.search_flags import member_of
from fdg.errors import FdgError
from fdg.running.host_devices import make_host_devices
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
_LABEL = Flag(
    "label",
    tuple[str, ...] | None,
    None,
    "of the runs, in their order, with commas between (None: what differs between them)",
)

COMMANDS: dict[str, Command] = {}
SUMMARIES: dict[str, str] = {}  # summaries in `fdg --help` of commands that are not modules of `fdg`


def _command(
    description: str, *flags: Flag, positionals: Mapping[str, Any] = RUN, summary: str = ""
) -> Callable[[Callable[[dict[str, Any]], int | None]], Command]:
    """Makes a command of a function `_NAME`."""

    def register(handler: Callable[[dict[str, Any]], int | None]) -> Command:
        name = handler.__name__.removeprefix("_")
        if summary:
            SUMMARIES[name] = summary
        program = f"{'fdg ' if summary else 'python -m fdg.'}{name}"
        COMMANDS[name] = Command(program, description, flags, handler, positionals)
        return COMMANDS[name]

    return register


@_command(
    "Plays whole episodes with trained agents. Without flags, the greedy ones are those that"
    " training ended with, and give the eval_return of summary.json to the last digit.",
    Flag("episodes", int | None, None, "of each agent (None: as many as after training)"),
    Flag("actions", str, "both", "greedy (the most probable), sampled (as in training), or both"),
    Flag("seed", int | None, None, "of the episodes (None: of those after training)"),
    Flag("env", str | None, None, "another environment, such as CartPole-v1?gravity=20.0"),
    _MEMBER,
    _CHECKPOINT,
    Flag("out", str | None, None, "a file, one line an episode (None: RUN/evaluation.jsonl)"),
    _TRUST,
)
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


@_command(
    "Says what a trained language model answers: to each prompt, or each line of standard input.",
    Flag("temperature", float, 0.0, "logits are divided by it; 0: the most likely tokens"),
    Flag("max_new_tokens", int | None, None, "of an answer (None: as many as in training)"),
    Flag("system", str | None, None, "the system message (None: that of training)"),
    Flag("seed", int, 0, "of what is drawn"),
    _AGENT,
    _MEMBER,
    _CHECKPOINT,
    _TRUST,
    positionals={**RUN, "prompt": {"nargs": "*", "help": "texts (none: each line of standard input)"}},
)
def _answer(given: dict[str, Any]) -> None:
    prompts = given.get("prompt") or sys.stdin.read().splitlines()
    if not prompts:
        raise FdgError('no prompt: write fdg answer RUN "1+1=", or one a line to standard input')
    how = {name: given[name] for name in ("temperature", "max_new_tokens", "system", "seed", "agent")}
    for answer in _load(given).answer(prompts, **how):
        print(answer, flush=True)


@_command(
    "Plays episodes with a trained agent, and writes them side by side as a video.",
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
)
def _play(given: dict[str, Any]) -> None:
    out = given["out"] or Path(given["run"]) / "video.gif"
    how = {name: given[name] for name in ("episodes", "agent", "seed", "fps", "max_steps")}
    print(_load(given).play(out, greedy=not given["sampled"], **how))


@_command(
    "Writes a trained policy to a file: a serialised function of JAX's, or ONNX; a language model"
    " to a folder, in Hugging Face's format.",
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
)
def _export(given: dict[str, Any]) -> None:
    loaded = _load(given)
    ending = given["format"] if given["format"] in ("jax", "onnx") else "jax"
    file = "exported" if callable(getattr(loaded.algorithm, "export", None)) else f"policy.{ending}"
    out = given["out"] or Path(given["run"]) / file
    print(loaded.export(out, format=given["format"], agent=given["agent"], greedy=not given["sampled"]))


@_command(
    "Compares runs: a statistic over seeds and its 95% interval. Runs that differ only in their seeds"
    " are one curve. Of a folder of runs, all are taken.",
    Flag("out", str, "comparison.png", "the picture: .png, .svg or .pdf"),
    Flag("metric", str, "episode_return", "of metrics.jsonl"),
    Flag("x", str, "env_steps", "over env_steps or wall_s"),
    Flag("statistic", str, "mean", "over seeds: mean, or iqm (the interquartile mean)"),
    _LABEL,
    positionals=RUNS,
)
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
    except ValueError as error:  # an extension that matplotlib does not know
        raise FdgError(f"--out {out}: {error}") from error
    for label, path in zip(labels, curves.runs_in(given["runs"]), strict=False):
        print(f"{label} = {path}")
    print(curves.returns_table(found))
    print(out)


@_command(
    "Lets a trained agent act, and writes its episodes as a data set in Minari's format."
    " Algorithms learn from it with --dataset: fdg train --algo iql --dataset DIR.",
    Flag("steps", int | None, None, "environment steps, of all environments together"),
    Flag("out", str | None, None, "the folder: new, or a data set to add episodes to"),
    Flag("greedy", bool, False, "the most probable actions, in place of actions drawn as in training"),
    Flag("labels", str | None, None, "a run whose actions are written in place of those taken (DAgger)"),
    Flag("seed", int, 0, "of the episodes"),
    Flag("num_envs", int, 8, "environments stepped together"),
    _AGENT,
    _CHECKPOINT,
    _TRUST,
    summary="makes a data set of what a trained agent does, in Minari's format.",
)
def _collect(given: dict[str, Any]) -> None:
    import fdg
    from fdg.training.collecting import collect

    for name in ("steps", "out"):
        if given[name] is None:
            raise FdgError(f"--{name} is missing: fdg collect RUN --steps 100000 --out DIR")
    run, labels = _load(given), given["labels"] and fdg.load(given["labels"], trust=given["trust"])
    how = {name: given[name] for name in ("greedy", "seed", "num_envs", "agent")}
    print(collect(run, given["out"], given["steps"], labels=labels, **how))


@_command(
    "Compares algorithms over environments: final return and area under the curve as interquartile"
    " means with 95% stratified bootstrap intervals, probabilities of improvement, and what was unequal. Of a"
    " folder of runs, all are taken.",
    Flag("out", str | None, None, "a folder for Markdown, LaTeX, JSON and pictures (None: print alone)"),
    _LABEL,
    positionals=RUNS,
    summary="tables of algorithms by environment, with intervals, and what was unequal between them.",
)
def _compare(given: dict[str, Any]) -> None:
    from fdg.training.comparison import check_folder, compare

    if given["out"] is not None:
        check_folder(given["out"])
    found = compare(given["runs"], labels=given["label"] or ())
    print(found)
    if given["out"] is not None:
        for path in found.write(given["out"]):
            print(path)


@_command(
    "Finds the first iteration, fragment and array whose values differ between two runs. Exit status:"
    " 0 for no difference, 1 for one, 2 for a mistake.",
    Flag("record", str | None, None, "write a recording of one run to this file, for another machine"),
    Flag("iterations", int | None, None, "how many to replay (None: as many as the metrics say, else 1)"),
    Flag("checkpoint", int | None, None, "of which iteration to start from, 0 for init (None: chosen)"),
    Flag("tolerance", float, 0.0, "x and y are equal where |x - y| <= tolerance * (1 + |y|); 0: equal bits"),
    Flag("limit_mb", int, 64, "of --record: mebibytes of arrays to keep; of the others digests alone"),
    _AGENT,
    _TRUST,
    positionals={"runs": {"nargs": "+", "metavar": "RUN", "help": "run directories or recordings: two"}},
    summary="finds where two runs part: the iteration, the fragment and the array.",
)
def _diff(given: dict[str, Any]) -> int:
    from fdg.training.difference import diff, record

    runs, file = given["runs"], given["record"]
    if len(runs) != (1 if file else 2):
        wanted = "one run, to be recorded" if file else "two of them, or one and --record FILE"
        raise FdgError(f"diff takes {wanted}, and got {len(runs)}: {' '.join(runs):.200}")
    keep_programs(None)
    make_host_devices(max(map(_devices_of, runs)))
    if file:
        how = {name: given[name] for name in ("checkpoint", "agent", "trust", "limit_mb")}
        print(
            record(runs[0], file, iterations=1 if given["iterations"] is None else given["iterations"], **how)
        )
        return 0
    found = diff(
        *runs, **{name: given[name] for name in ("iterations", "checkpoint", "tolerance", "agent", "trust")}
    )
    print(found)
    return int(found.differs)


def _devices_of(run: str) -> int:
    """The number of host devices of a run; 1 for a recording or an unreadable run, which fails later."""
    from fdg.training.run_directory import read_config, read_summary

    with contextlib.suppress(FdgError):
        config = read_config(Path(run), prefix="")
        chosen = config.get("devices") or config.get("devices_chosen")
        chosen = chosen or len((read_summary(Path(run)) or {}).get("devices") or ())
        return chosen if isinstance(chosen, int) and 1 <= chosen <= 1024 else 1
    return 1


@_command(
    "Packs a run: one checkpoint, its figures, curve and video, and a card (README.md) for Hugging"
    " Face's hub. fdg.load takes the folder, and hf://USER/NAME.",
    Flag("out", str | None, None, "the folder, new or empty (None: RUN-packed, next to the run)"),
    _CHECKPOINT,
    Flag("episodes", int | None, None, "of each agent, for the card (None: as many as after training)"),
    Flag("push", str | None, None, "USER/NAME, a repository of Hugging Face's hub (None: nowhere)"),
    _TRUST,
    summary="packs a run into a folder to share, with a card, and puts it on Hugging Face's hub.",
)
def _pack(given: dict[str, Any]) -> None:
    from fdg.training import hub
    from fdg.training.packing import pack

    keep_programs(None)
    if given["push"] is not None:
        hub.check_name(given["push"])  # before anything slow
    out = given["out"] or f"{given['run'].rstrip('/')}-packed"
    how = {name: given[name] for name in ("checkpoint", "episodes", "trust")}
    print(pack(given["run"], out, **how))
    if given["push"] is not None:
        print(hub.upload(Path(out), given["push"]))


def _load(given: dict[str, Any]) -> Any:
    keep_programs(None)
    import envs
    from fdg.training.loading import load_with_names

    named = None  # naming the run's environment in a command with that flag trusts it
    if "env" in given:
        named = {"env": None if given["env"] is None else envs.absolute(given["env"])}
    checkpoint = int(given["checkpoint"]) if given["checkpoint"].isdecimal() else given["checkpoint"]
    run = load_with_names(given["run"], named, checkpoint=checkpoint, trust=given["trust"], flags=("env",))
    return run if given.get("member") is None else member_of(run, given["member"])
