"""`fdg pack`: packs a run into a folder to share: one checkpoint, metrics, a video, and a card.

The folder is a run directory, so `fdg.load` and the commands accept it, with the same restrictions as for any
run directory (docs/security.md).
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

from fdg import files
from fdg.errors import FdgError, one_line
from fdg.reading import open_regular
from fdg.showing.words import escape_markdown
from fdg.training.checkpoint import copy_checkpoint
from fdg.training.evaluation import Evaluation, can_evaluate
from fdg.training.loading import load
from fdg.training.run_directory import BEST, CHECKPOINTS, DATA, json_line, read_config, read_summary
from fdg.training.statistics import estimate_text
from fdg.training.sweep import Sweep

# Files of a packed run.
CARD = "README.md"
VIDEO = "video.gif"
CURVE = "learning_curve.png"
# Entries of the configuration about the training machine and earlier runs, which are left out.
_PRIVATE = ("command", "resumes", "from", "git_commit")
_MAX_SETTINGS = 40  # maximum settings on the card
_MAX_VIDEO_STEPS = 500  # maximum steps of the video


def pack(
    path: str | Path,
    out: str | Path,
    *,
    checkpoint: str | int = "last",
    trust: bool = False,
    episodes: int | None = None,
) -> Path:
    """Packs a run into a new folder.

    `checkpoint` is "last", "best" or an iteration. `episodes` is the number of episodes per agent for the
    return on the card; None: as many as in the evaluation after training.
    """
    path, out = Path(path), Path(out)
    config = read_config(path, prefix="")
    if not files.is_free(out):
        raise FdgError(f"--out {out} exists already and is not empty: give a new folder")
    files.check_writable(out / CARD)
    if (path / DATA).is_dir():
        raise FdgError(
            f"{path} has data files in {DATA}/, which are not shared: fdg export {path} writes the weights"
        )
    is_iteration = str(checkpoint).isdecimal()
    run = load(path, checkpoint=int(checkpoint) if is_iteration else checkpoint, trust=trust)
    folder = path / (BEST if checkpoint == "best" else CHECKPOINTS) / str(run.iteration)
    with files.explain_os_errors(out), files.filling(out) as target:
        shared = {name: value for name, value in config.items() if name not in _PRIVATE}
        files.write(target / "config.json", json_line(shared, indent=2))
        for name in ("metrics.jsonl", "summary.json", CURVE):
            if os.path.lexists(path / name):
                with files.explain_os_errors(path / name, "packed"):
                    files.check_own(path / name)  # a link in an untrusted run would share another file
                with open_regular(path / name) as reader, files.replacing(target / name) as writer:
                    shutil.copyfileobj(reader, writer)
        copy_checkpoint(folder, target / CHECKPOINTS / str(run.iteration))
        packed = load(target, trust=trust)  # evaluating the copy also checks it
        evaluation = packed.evaluate(episodes) if can_evaluate(packed.algorithm) else None
        video_error = _record_video(packed, target)
        files.write(target / CARD, _card_text(packed, evaluation, video_error, target).encode())
    return out


def _record_video(run: Any, out: Path) -> str:
    """Records a video of the first agent; returns "", or the error if there is no video."""
    try:
        run_to_play = run.member(agent=0) if isinstance(run.algorithm, Sweep) else run
        run_to_play.play(out / VIDEO, max_steps=_MAX_VIDEO_STEPS)
    except FdgError as error:
        return one_line(error)
    return ""


def _card_text(run: Any, evaluation: Evaluation | None, video_error: str, out: Path) -> str:
    """The README in Markdown, after metadata in YAML for Hugging Face's hub."""
    config, summary = run.config, read_summary(out) or {}
    algo, env = str(config["algo"]), str(config["env"])
    seeds = summary.get("seeds") or [run.seed]
    tags = ["reinforcement-learning", "deep-reinforcement-learning", "fdg", "jax", algo, env]
    lines = ["---", "library_name: fdg", "pipeline_tag: reinforcement-learning", "tags:"]
    lines += [f"- {json.dumps(tag)}" for tag in dict.fromkeys(tags)]
    result = "not evaluated"
    if evaluation is not None:
        result = f"{estimate_text(evaluation.mean, evaluation.interval)} over {evaluation.episodes} episodes"
        lines += [
            *("model-index:", f"- name: {json.dumps(algo)}", "  results:", "  - task:"),
            *("      type: reinforcement-learning", "      name: reinforcement-learning", "    dataset:"),
            *(f"      name: {json.dumps(env)}", f"      type: {json.dumps(env)}", "    metrics:"),
            *("    - type: mean_reward", f"      value: {json.dumps(result)}", "      name: mean_reward"),
            "      verified: false",
        ]
    versions = summary.get("versions") or config.get("versions") or {}
    size = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
    rows = {
        "environment": env,
        "algorithm": algo,
        "return": result,
        "seeds": ", ".join(map(str, seeds[:20])) + (" ..." if seeds[20:] else ""),
        "steps of each agent": f"{run.iteration * run.algorithm.steps_per_iteration:,}",
        "iteration": f"{run.iteration:,}"
        + ("" if run.finished or run.stopped else ", of a run that has not ended"),
        "preset": config.get("preset_name") or "none",
        "distribution policy": summary.get("policy") or config.get("policy"),
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "size": f"{size / 2**20:.1f} MiB",
    }
    settings = list(config["hyperparameters"].items())
    parts = [
        "\n".join([*lines, "---"]),
        f"# {escape_markdown(algo)} on {escape_markdown(env)}",
        "Trained with fdg: reinforcement learning whose numbers do not depend on the devices.",
        _markdown_table(("", ""), rows.items()),
        "The return is the mean over whole episodes with the most probable actions; its interval is a 95%"
        " bootstrap interval over agents if there are several, else over episodes.",
        "## Use\n\n```python\nimport fdg\n\n"
        'run = fdg.load("path/to/this/folder")  # or hf://USER/NAME\n'
        "action = run.policy(observation)\nprint(run.evaluate(episodes=100))\n```",
        "Loading reads arrays and JSON, and runs no code of this folder. An environment or algorithm that"
        " is not part of fdg has to be installed, and allowed by `trust=True`.",
        *([f"![learning curve]({CURVE})"] if (out / CURVE).exists() else []),
        f"no video: {escape_markdown(video_error)}" if video_error else f"![the first agent]({VIDEO})",
        "## Settings",
        _markdown_table(("setting", "value"), settings[:_MAX_SETTINGS]),
    ]
    if (num_unlisted := len(settings) - _MAX_SETTINGS) > 0:
        parts.append(f"and {num_unlisted} more in `config.json`")
    return "\n\n".join(parts) + "\n"


def _markdown_table(head: Any, rows: Any) -> str:
    lines = [head, *((name, "" if value is None else value) for name, value in rows)]
    text = [f"| {' | '.join(escape_markdown(cell) for cell in line)} |" for line in lines]
    return "\n".join([text[0], "|---|---|", *text[1:]])
