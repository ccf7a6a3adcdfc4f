"""The commands that use what was trained: `python -m fdg.evaluate`, `play`, `export` and `plot`."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fdg.arguments import as_flags
from fdg.commands.cli import guarded
from fdg.commands.flags import Flag, Parser, add_flag, normalise
from fdg.commands.sweeping import member_of
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


def evaluate_main(argv: Sequence[str] | None = None) -> int:
    """`python -m fdg.evaluate RUN_DIR`: plays whole episodes, and says what they return.

    Args:
      argv: the flags; those of the process if None.
    """

    def run(argv: Sequence[str]) -> int:
        given = _parsed(
            argv,
            "python -m fdg.evaluate",
            "Plays whole episodes with trained agents. Without flags, the greedy ones are those that training"
            " ended with, and give the eval_return of summary.json to the last digit.",
            FLAGS["evaluate"],
            "run",
        )
        if given["actions"] not in ("greedy", "sampled", "both"):
            raise FdgError(f"--actions {given['actions']}: it must be greedy, sampled or both")
        out = Path(given["out"] or Path(given["run"]) / "evaluation.jsonl")
        loaded = _load(given)
        try:
            check_writable(out)
        except FdgError as error:
            raise FdgError(
                f"{error}: give another file by --out" if given["out"] is None else str(error)
            ) from None
        env = None
        if given["env"] is not None:
            import envs

            name, overrides = envs.parse(given["env"])
            env = envs.make(name, **overrides)
        kinds = {"greedy": [True], "sampled": [False], "both": [True, False]}[given["actions"]]
        print(f"{loaded!r}", flush=True)
        rows: list[dict[str, Any]] = []
        for greedy in kinds:
            found = loaded.evaluate(given["episodes"], greedy=greedy, seed=given["seed"], env=env)
            print(found, flush=True)
            rows += found.rows()
        if rows:
            _write_rows(out, [{"iteration": loaded.iteration, **row} for row in rows])
            print(f"each episode: {out}")
        return 0

    return guarded(_with_flags(run, "evaluate"), argv)


def play_main(argv: Sequence[str] | None = None) -> int:
    """`python -m fdg.play RUN_DIR --out video.mp4`: films trained agents."""

    def run(argv: Sequence[str]) -> int:
        given = _parsed(
            argv,
            "python -m fdg.play",
            "Plays episodes with a trained agent, and writes them side by side as a video.",
            FLAGS["play"],
            "run",
        )
        loaded = _load(given)
        out = loaded.play(
            given["out"] or Path(given["run"]) / "video.gif",
            episodes=given["episodes"],
            agent=given["agent"],
            greedy=not given["sampled"],
            seed=given["seed"],
            fps=given["fps"],
            max_steps=given["max_steps"],
        )
        print(out)
        return 0

    return guarded(_with_flags(run, "play"), argv)


def export_main(argv: Sequence[str] | None = None) -> int:
    """`python -m fdg.export RUN_DIR`: writes the policy for programs that know nothing of its run."""

    def run(argv: Sequence[str]) -> int:
        given = _parsed(
            argv,
            "python -m fdg.export",
            "Writes a trained policy to a file: a serialised function of JAX's, or ONNX; a language model to"
            " a folder, in Hugging Face's format.",
            FLAGS["export"],
            "run",
        )
        loaded = _load(given)
        ending = given["format"] if given["format"] in ("jax", "onnx") else "jax"
        own_way = callable(getattr(loaded.algorithm, "export", None))
        out = loaded.export(
            given["out"] or Path(given["run"]) / ("exported" if own_way else f"policy.{ending}"),
            format=given["format"],
            agent=given["agent"],
            greedy=not given["sampled"],
        )
        print(out)
        return 0

    return guarded(_with_flags(run, "export"), argv)


def plot_main(argv: Sequence[str] | None = None) -> int:
    """`python -m fdg.plot RUN...`: draws and tabulates runs side by side."""

    def run(argv: Sequence[str]) -> int:
        given = _parsed(
            argv,
            "python -m fdg.plot",
            "Compares runs: a statistic over seeds and its 95% interval. Runs that differ only in their seeds"
            " are one curve. Of a folder of runs, all are taken.",
            FLAGS["plot"],
            "runs",
        )
        from fdg.training import curves

        check_writable(Path(given["out"]))
        figure, found = curves.compare(
            given["runs"],
            metric=given["metric"],
            x=given["x"],
            statistic=given["statistic"],
            labels=given["label"] or (),
        )
        out = Path(given["out"])
        try:
            with writing(out):
                figure.savefig(out, dpi=150)
        except FdgError:
            raise
        except ValueError as error:  # an ending that matplotlib does not know
            raise FdgError(f"--out {out}: {error}") from error
        for label, path in zip(given["label"] or (), curves.runs_in(given["runs"]), strict=False):
            print(f"{label} = {path}")
        print(curves.table(found))
        print(out)
        return 0

    return guarded(_with_flags(run, "plot"), argv)


def _with_flags(run: Callable[[Sequence[str]], int], command: str) -> Callable[[Sequence[str]], int]:
    """What runs are told of arguments, said of a command's flags."""

    def told(argv: Sequence[str]) -> int:
        try:
            return run(argv)
        except FdgError as error:
            raise type(error)(as_flags(str(error), [flag.name for flag in FLAGS[command]])) from error

    return told


def _parsed(
    argv: Sequence[str], program: str, description: str, flags: Sequence[Flag], positional: str
) -> dict[str, Any]:
    """All flags by name, and the run directories."""
    parser = Parser(prog=program, description=description, allow_abbrev=False)
    several = positional == "runs"
    parser.add_argument(positional, nargs="+" if several else None, metavar="RUN_DIR", help="run directories")
    for flag in flags:
        add_flag(parser, flag)
    return {**{flag.name: flag.default for flag in flags}, **parser.parse_strictly(normalise(argv))}


def _load(given: dict[str, Any]) -> Any:
    keep_programs(None)
    from fdg.training.loading import load

    chosen = given["checkpoint"]
    run = load(given["run"], checkpoint=int(chosen) if chosen.isdigit() else chosen, trust=given["trust"])
    return run if given.get("member") is None else member_of(run, given["member"])


def _write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    from fdg.training.run_directory import plain

    with writing(path):
        path.write_text("".join(json.dumps(plain(row)) + "\n" for row in rows))
