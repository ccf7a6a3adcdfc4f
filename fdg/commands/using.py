"""The commands that use trained runs: `evaluate`, `answer`, `play`, `export`, `plot`, `collect`, ...

`fdg.compare` and `fdg.diff` are functions, so `fdg compare` and `fdg diff` have no modules of these names.
"""

import contextlib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fdg.commands.cli import RUN, RUNS, Command
from fdg.commands.flags import Flag
from fdg.commands.search_flags import member_of
from fdg.errors import FdgError
from fdg.files import check_results, check_writable, writing
from fdg.running.host_devices import make_host_devices
from fdg.running.program_cache import keep_programs

_CHECKPOINT = Flag("checkpoint", str, "last", "the checkpoint: last, best (by --eval-every), or an iteration")
_TRUST = Flag("trust", bool, False, "import your own modules that the run names")
_MEMBER = Flag(
    "member",
    str | None,
    None,
    "which agents of a sweep: best, or values and a seed, as in learning_rate=1e-3,seed=2 (None: all)",
)
_AGENT = Flag("agent", int, 0, "the index of the agent, if the run has several seeds")
_LABEL = Flag(
    "label",
    tuple[str, ...] | None,
    None,
    "labels of the runs, in order, separated by commas (None: the settings that differ)",
)

COMMANDS: dict[str, Command] = {}  # by name
SUMMARIES: dict[str, str] = {}  # lines of `fdg --help`, for commands that are not modules of `fdg`


def _command(
    description: str, *flags: Flag, positionals: Mapping[str, Any] = RUN, summary: str = ""
) -> Callable[[Callable[[dict[str, Any]], int | None]], Command]:
    """A decorator that makes a function `_NAME` the command NAME.

    `summary` is the line in `fdg --help`; empty if the command is a module of `fdg`, whose docstring is used.
    """

    def register(handler: Callable[[dict[str, Any]], int | None]) -> Command:
        name = handler.__name__.removeprefix("_")
        if summary:
            SUMMARIES[name] = summary
        program = f"{'fdg ' if summary else 'python -m fdg.'}{name}"
        COMMANDS[name] = Command(program, description, flags, handler, positionals)
        return COMMANDS[name]

    return register


@_command(
    "Plays whole episodes with trained agents. Without flags, greedy episodes are those of the"
    " evaluation at the end of training: their return equals eval_return in summary.json.",
    Flag("episodes", int | None, None, "episodes per agent (None: as many as after training)"),
    Flag("actions", str, "both", "greedy (the most probable), sampled (as in training), or both"),
    Flag(
        "seed",
        int | None,
        None,
        "random seed of the episodes (None: that of the evaluation at the end of training)",
    ),
    Flag("env", str | None, None, "another environment, such as CartPole-v1?gravity=20.0"),
    _MEMBER,
    _CHECKPOINT,
    Flag("out", str | None, None, "the file to write, one line per episode (None: RUN/evaluation.jsonl)"),
    _TRUST,
)
def _evaluate(flags: dict[str, Any]) -> None:
    greedy_choices = {"greedy": [True], "sampled": [False], "both": [True, False]}.get(flags["actions"])
    if greedy_choices is None:
        raise FdgError(f"--actions {flags['actions']}: it must be greedy, sampled or both")
    run = _load(flags)
    out = Path(flags["out"] or run.path / "evaluation.jsonl")
    try:
        check_writable(out)
    except FdgError as error:
        fix = ": give another file by --out" if flags["out"] is None else ""
        raise FdgError(f"{error}{fix}") from None
    env = None
    if flags["env"] is not None:
        import envs

        name, overrides = envs.parse(flags["env"])
        env = envs.make(name, **overrides)
    from fdg.training.run_directory import json_line

    print(f"{run!r}", flush=True)
    rows: list[dict[str, Any]] = []
    for greedy in greedy_choices:
        evaluation = run.evaluate(flags["episodes"], greedy=greedy, seed=flags["seed"], env=env)
        print(evaluation, flush=True)
        rows += evaluation.rows()
    if rows:
        with writing(out) as file:
            file.writelines(json_line({"iteration": run.iteration, **row}) for row in rows)
        print(f"each episode: {out}")


@_command(
    "Prints the answers of a trained language model to prompts, or to lines of standard input.",
    Flag("temperature", float, 0.0, "the divisor of logits; 0: the most likely tokens"),
    Flag("max_new_tokens", int | None, None, "largest length of an answer (None: as in training)"),
    Flag("system", str | None, None, "the system message (None: as in training)"),
    Flag("seed", int, 0, "random seed of sampled tokens"),
    _AGENT,
    _MEMBER,
    _CHECKPOINT,
    _TRUST,
    positionals={**RUN, "prompt": {"nargs": "*", "help": "texts (none: each line of standard input)"}},
)
def _answer(flags: dict[str, Any]) -> None:
    prompts = flags.get("prompt") or _input_lines()
    if not prompts:
        raise FdgError(
            'no prompt was given: write fdg answer RUN "1+1=", or give one prompt per line on standard input'
        )
    arguments = {name: flags[name] for name in ("temperature", "max_new_tokens", "system", "seed", "agent")}
    for answer in _load(flags).answer(prompts, **arguments):
        print(answer, flush=True)


def _input_lines() -> list[str]:
    """The lines of standard input (`str.splitlines` would also split at form feeds and U+2028)."""
    try:
        text = sys.stdin.buffer.read().decode(sys.stdin.encoding, sys.stdin.errors or "strict")
    except UnicodeDecodeError as error:
        raise FdgError(
            f"standard input is not {sys.stdin.encoding}: {error.reason} at byte {error.start}"
        ) from None
    return text.replace("\r\n", "\n").removesuffix("\n").split("\n") if text else []


@_command(
    "Plays episodes with a trained agent, and writes them side by side as a video.",
    Flag("out", str | None, None, ".mp4, .gif or .html (None: RUN/video.gif)"),
    Flag("episodes", int, 1, "number of episodes, side by side"),
    Flag("sampled", bool, False, "sample actions as in training, instead of taking the most probable"),
    Flag("seed", int, 0, "random seed of the episodes"),
    Flag("fps", int, 30, "pictures per second"),
    Flag("max_steps", int, 1_000, "steps after which an episode is truncated"),
    _AGENT,
    _MEMBER,
    _CHECKPOINT,
    _TRUST,
)
def _play(flags: dict[str, Any]) -> None:
    run = _load(flags)
    out = flags["out"] or run.path / "video.gif"
    arguments = {name: flags[name] for name in ("episodes", "agent", "seed", "fps", "max_steps")}
    print(run.play(out, greedy=not flags["sampled"], **arguments))


@_command(
    "Writes a trained policy to a file, as a serialised JAX function or as ONNX; writes a language model"
    " to a folder, in Hugging Face's format.",
    Flag(
        "out",
        str | None,
        None,
        "the file, ending in .jax or .onnx; its description is a .json next to it (None: RUN/policy.jax, or"
        " RUN/policy.onnx); for a language model, a folder (None: RUN/exported)",
    ),
    Flag(
        "format",
        str | None,
        None,
        "jax or onnx (None: by the ending of --out); peft writes a language model's adapters alone",
    ),
    Flag("sampled", bool, False, "sample actions by a seed, instead of taking the most probable"),
    _AGENT,
    _MEMBER,
    _CHECKPOINT,
    _TRUST,
)
def _export(flags: dict[str, Any]) -> None:
    loaded = _load(flags)
    extension = flags["format"] if flags["format"] in ("jax", "onnx") else "jax"
    file = "exported" if callable(getattr(loaded.algorithm, "export", None)) else f"policy.{extension}"
    out = flags["out"] or loaded.path / file
    print(loaded.export(out, format=flags["format"], agent=flags["agent"], greedy=not flags["sampled"]))


@_command(
    "Plots runs: a statistic over seeds and its 95% interval. Runs that differ only in their seeds"
    " are one curve. A folder of runs means all of its runs.",
    Flag("out", str, "comparison.png", "the picture to write: .png, .svg or .pdf"),
    Flag("metric", str, "episode_return", "a metric of metrics.jsonl"),
    Flag("x", str, "env_steps", "the x axis: env_steps or wall_s"),
    Flag("statistic", str, "mean", "the statistic over seeds: mean, or iqm (interquartile mean)"),
    _LABEL,
    positionals=RUNS,
)
def _plot(flags: dict[str, Any]) -> None:
    from matplotlib.backend_bases import FigureCanvasBase

    from fdg.training import curves

    out, labels = Path(flags["out"]), flags["label"] or ()
    check_writable(out)
    extension = out.suffix[1:].lower()
    if extension not in FigureCanvasBase.get_supported_filetypes():
        raise FdgError(f"--out {out}: the ending of a plot is .png, .svg or .pdf: write {out}.png")
    arguments = {name: flags[name] for name in ("metric", "x", "statistic")}
    figure, returns = curves.plot_runs(flags["runs"], labels=labels, **arguments)
    with writing(out) as file:
        figure.savefig(file, format=extension, dpi=150)
    for label, path in zip(labels, curves.find_runs(flags["runs"]), strict=False):
        print(f"{label} = {path}")
    print(curves.returns_table(returns))
    print(out)


@_command(
    "Lets a trained agent act, and writes its episodes as a data set in Minari's format."
    " To learn from it: fdg train --algo iql --dataset DIR.",
    Flag("steps", int | None, None, "environment steps, in all environments together"),
    Flag("out", str | None, None, "the folder: a new one, or a data set to extend"),
    Flag("greedy", bool, False, "take the most probable actions, instead of sampling as in training"),
    Flag("labels", str | None, None, "a run whose actions are written instead of the agent's (DAgger)"),
    Flag("replay", bool, False, "write the steps in the run's replay buffer; the agent does not act"),
    Flag("seed", int, 0, "random seed of the episodes"),
    Flag("num_envs", int, 8, "environments that step together"),
    _AGENT,
    _CHECKPOINT,
    _TRUST,
    summary="writes episodes of a trained agent as a data set in Minari's format.",
)
def _collect(flags: dict[str, Any]) -> None:
    import fdg
    from fdg.training.collecting import collect, collect_replay

    for name in ("out",) if flags["replay"] else ("steps", "out"):
        if flags[name] is None:
            raise FdgError(f"--{name} is missing: fdg collect RUN --steps 100000 --out DIR")
    if flags["replay"]:
        for name in ("steps", "labels"):
            if flags[name] is not None:
                raise FdgError(f"--replay and --{name}: leave out one of them")
        print(collect_replay(_load(flags), flags["out"], agent=flags["agent"]))
        return
    run, labels = _load(flags), flags["labels"] and fdg.load(flags["labels"], trust=flags["trust"])
    arguments = {name: flags[name] for name in ("greedy", "seed", "num_envs", "agent")}
    print(collect(run, flags["out"], flags["steps"], labels=labels, **arguments))


@_command(
    "Compares algorithms over environments: final return and area under the curve as interquartile"
    " means with 95% stratified bootstrap intervals, probabilities of improvement, and unequal settings. A"
    " folder of runs means all of its runs.",
    Flag("out", str | None, None, "a folder for Markdown, LaTeX, JSON and pictures (None: only print)"),
    _LABEL,
    positionals=RUNS,
    summary="compares algorithms by environment in tables with intervals, and prints settings that differ.",
)
def _compare(flags: dict[str, Any]) -> None:
    from fdg.training.comparison import FILES, compare

    if flags["out"] is not None:
        check_results(Path(flags["out"]), FILES, " for the comparison")
    comparison = compare(flags["runs"], labels=flags["label"] or ())
    paths = [] if flags["out"] is None else comparison.write(flags["out"])  # before output that may be closed
    print(comparison, *paths, sep="\n")


@_command(
    "Finds the first iteration, fragment and array whose values differ between two runs. Exit status:"
    " 0: no difference, 1: a difference, 2: an error.",
    Flag("record", str | None, None, "write a recording of one run to this file, for another machine"),
    Flag(
        "iterations",
        int | None,
        None,
        "iterations to replay (None: up to the first metrics that differ, else 1)",
    ),
    Flag(
        "checkpoint",
        int | None,
        None,
        "iteration of the checkpoint to start from; 0: the initial state (None: chosen)",
    ),
    Flag("tolerance", float, 0.0, "x and y are equal where |x - y| <= tolerance * (1 + |y|); 0: equal bits"),
    Flag("limit_mb", int, 64, "with --record: MiB of arrays to store; of further arrays only digests"),
    _AGENT,
    _TRUST,
    positionals={"runs": {"nargs": "+", "metavar": "RUN", "help": "run directories or recordings: two"}},
    summary="finds where two runs diverge: the iteration, the fragment and the array.",
)
def _diff(flags: dict[str, Any]) -> int:
    from fdg.training.difference import diff, record
    from fdg.training.run_directory import device_count, read_config, read_summary

    runs, file = flags["runs"], flags["record"]
    if len(runs) != (1 if file else 2):
        usage = "one run with --record FILE" if file else "two runs, or one run with --record FILE"
        raise FdgError(f"diff takes {usage}, but got {len(runs)}: {' '.join(runs):.200}")
    keep_programs(None)
    count = 1
    for run in runs:
        with contextlib.suppress(FdgError):  # a recording, or an unreadable run, which fails later
            config = read_config(Path(run), prefix="")
            count = max(count, device_count(config, read_summary(Path(run))))
    make_host_devices(count if count <= 1024 else 1)  # an untrusted run may name any number
    arguments = {name: flags[name] for name in ("checkpoint", "agent", "trust")}
    iterations = flags["iterations"]
    if file:
        iterations = 1 if iterations is None else iterations
        print(record(runs[0], file, iterations=iterations, limit_mb=flags["limit_mb"], **arguments))
        return 0
    difference = diff(*runs, iterations=iterations, tolerance=flags["tolerance"], **arguments)
    print(difference)
    return int(difference.differs)


@_command(
    "Packs a run: one checkpoint, its figures, curve and video, and a card (README.md) for Hugging"
    " Face's hub. fdg.load reads the folder, and hf://USER/NAME.",
    Flag("out", str | None, None, "the folder, new or empty (None: RUN-packed, next to the run)"),
    _CHECKPOINT,
    Flag("episodes", int | None, None, "episodes per agent, for the card (None: as many as after training)"),
    Flag("push", str | None, None, "USER/NAME, a repository on Hugging Face's hub (None: no upload)"),
    _TRUST,
    summary="packs a run into a folder to share, with a card, and uploads it to Hugging Face's hub.",
)
def _pack(flags: dict[str, Any]) -> None:
    from fdg.training import hub
    from fdg.training.packing import pack

    keep_programs(None)
    if flags["push"] is not None:
        hub.import_hub(f"--push {flags['push']}", flags["push"])  # before slow work
    out = flags["out"] or f"{flags['run'].rstrip('/')}-packed"
    arguments = {name: flags[name] for name in ("checkpoint", "episodes", "trust")}
    print(pack(flags["run"], out, **arguments))
    if flags["push"] is not None:
        print(hub.upload(Path(out), flags["push"]))


def _load(flags: dict[str, Any]) -> Any:
    """The run that the flags `run`, `checkpoint`, `member`, `env` and `trust` select."""
    keep_programs(None)
    import envs
    from fdg.training.loading import StoredRun

    names = None  # an environment on the command line is trusted
    if "env" in flags:
        names = {"env": None if flags["env"] is None else envs.absolute(flags["env"])}
    checkpoint = int(flags["checkpoint"]) if flags["checkpoint"].isdecimal() else flags["checkpoint"]
    run = StoredRun.open(flags["run"], names, trust=flags["trust"], flags=("env",)).restore(checkpoint)
    return run if flags.get("member") is None else member_of(run, flags["member"])
