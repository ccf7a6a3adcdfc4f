"""Hostile run directories: real ones with random changes, as by an attacker or a faulty disk."""

import hashlib
import json
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fdg.commands.cli import train_main
from tests.hostile import driver
from tests.hostile.payloads import EVIL, FIELDS, payload, value

SMALL = "--devices 1 --eval-episodes 0 --num-envs 4 --hidden 4 --total-steps"
# Commands of the real runs that hostile directories start from.
RUNS = {
    "ppo": f"--algo ppo --num-steps 4 --num-minibatches 2 --num-epochs 1 {SMALL} 32",
    "memory": f"--algo ppo --memory gru --num-steps 4 --num-minibatches 2 --num-epochs 1 {SMALL} 32",
    "dqn": f"--algo dqn --num-steps 4 --buffer-size 64 --batch-size 8 --learning-starts 16 {SMALL} 64",
    "sac": f"--algo sac --env Pendulum-v1 --num-steps 2 --buffer-size 64 --batch-size 8 {SMALL} 64",
    "sweep": f"--algo a2c --num-steps 4 --sweep learning_rate=1e-3,1e-2 --num-seeds 2 {SMALL} 32",
    "lagging": f"--algo ppo --policy single_learner_coarse --staleness 1 --num-steps 4 --num-minibatches 2"
    f" --num-epochs 1 {SMALL} 32".replace("--devices 1", "--devices 2"),
    "text": "--algo grpo --env text:sorting?length=3 --hidden-size 8 --num-layers 1 --num-heads 2"
    " --num-prompts 2 --group-size 2 --num-minibatches 1 --devices 1 --eval-episodes 2 --total-steps 8",
    "search": f"--algo a2c --optuna 2 --search num_steps=2,4 {SMALL} 32",
}
QUICK = ("ppo", "sweep")  # the runs that the test suite trains


def train_all(folder: Path, names: Sequence[str] = tuple(RUNS)) -> dict[str, Path]:
    """Trains the real runs in subfolders of `folder`."""
    made = {}
    for name in names:
        made[name] = folder / name
        if not (made[name] / "summary.json").exists() and not (made[name] / "search.json").exists():
            shutil.rmtree(made[name], ignore_errors=True)
            status = train_main([*RUNS[name].split(), "--out", str(made[name])])
            if status != 0:
                raise SystemExit(f"the run {name} ended with status {status}")
    return made


def plant(folder: Path, mark: Path) -> None:
    """Writes the modules that hostile files name; an import or call of one creates the file `mark`."""
    (folder / "evilpkg").mkdir()
    for file in ("evilmod.py", "evilpkg/__init__.py", "evilpkg/sub.py", "evil.py"):
        (folder / file).write_text(EVIL.format(mark=mark))


def hostile(
    runs: dict[str, Path], folder: Path, number: int, seed: int, mark: Path
) -> tuple[Path, list[str]]:
    """Creates a hostile run directory.

    Args:
      runs: real run directories.
      folder: parent of the new directory `run`.
      number: with `seed`, determines the directory.
      seed: of all directories.
      mark: a file that payloads would write.

    Returns:
      The directory, and descriptions of its changes.
    """
    draw = random.Random(f"{seed}-{number}")
    name = draw.choice(list(runs))
    path = folder / "run"
    shutil.copytree(runs[name], path)
    changes = [f"of {name}"]
    for _ in range(draw.choice((1, 1, 2, 3, 4))):
        change = draw.choices(
            (_config, _config_text, _metrics, _checkpoint, _summary, _journal), (76, 8, 4, 7, 3, 2)
        )[0]
        changes.append(change(path, draw, mark))
    return path, changes


def _put(value: Any, place: Sequence[Any], new: Any) -> None:
    for key in place[:-1]:
        value = value[key]
    value[place[-1]] = new


def _config(path: Path, draw: random.Random, mark: Path) -> str:
    file = path / "config.json"
    try:
        config = json.loads(file.read_text())
        places = driver.places(config)
    except (ValueError, OSError, RecursionError):
        return "config.json: left"
    if not places or not isinstance(config, dict):
        return "config.json: left"
    new = value(draw, mark)
    kind = draw.random()
    if kind < 0.4:  # fields with names
        names = [("algo",), ("env",), ("policy",), ("hyperparameters", draw.choice(FIELDS))]
        place = draw.choice(names)
    elif kind < 0.65:
        place = draw.choice(places)
    elif kind < 0.9:
        part = draw.choice(((), (), ("hyperparameters",), ("policy_fields",)))
        place = (*part, draw.choice(FIELDS))
    else:
        place = draw.choice(places)
        parent = config
        for key in place[:-1]:
            parent = parent[key]
        del parent[place[-1]]
        _write(file, config)
        return f"config.json: without {place}"
    try:
        _put(config, place, new)
    except (TypeError, LookupError):
        config[str(place[-1])] = new
    _write(file, config)
    return f"config.json: {place} = {new!r:.200}"


def _write(file: Path, value: Any) -> None:
    try:
        file.write_text(json.dumps(value, indent=2))
    except RecursionError:
        file.write_text("[" * 100_000)


def _config_text(path: Path, draw: random.Random, mark: Path) -> str:
    file = path / draw.choice(("config.json", "config.json", "summary.json", ".checkpoints"))
    content = file.read_bytes() if file.is_file() else b"{}"
    at = draw.randrange(len(content) + 1)
    kinds: dict[str, Callable[[], bytes]] = {
        "cut": lambda: content[:at],
        "a bit": lambda: content[:at] + bytes([draw.randrange(256)]) + content[at + 1 :],
        "twice": lambda: content + content,
        "deep": lambda: b"[" * 100_000,
        "deep objects": lambda: b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
        "digits": lambda: content.replace(b"32", b"9" * 5000, 1),
        "another encoding": lambda: content.decode(errors="replace").encode("utf-16"),
        "not a number": lambda: content.replace(b"null", b"NaN", 1),
        "a list": lambda: b"[" + content + b"]",
        "a key twice": lambda: (
            content.replace(b"{", b'{"algo": "evilmod:Algo",', 1)[:-1].rstrip(b"}")
            + b',"env":"evilmod:thing"}'
        ),
        "empty": lambda: b"",
        "zeros": lambda: b"\0" * 1000,
    }
    kind = draw.choice(list(kinds))
    file.write_bytes(kinds[kind]())
    return f"{file.name}: {kind} at {at}"


def _metrics(path: Path, draw: random.Random, mark: Path) -> str:
    file = path / "metrics.jsonl"
    lines = file.read_text(errors="replace").splitlines() if file.is_file() else []
    row: dict[str, Any] = {"iteration": 1, "env_steps": 16, "wall_s": 0.1, "episode_return": 1.0}
    _put(row, (draw.choice([*row, "x", payload(draw, mark)]),), value(draw, mark))
    lines.insert(draw.randrange(len(lines) + 1), json.dumps(row))
    file.write_text("\n".join(lines) + "\n")
    return f"metrics.jsonl: {row!r:.200}"


def _summary(path: Path, draw: random.Random, mark: Path) -> str:
    names = ("devices", "iterations", "env_steps", "eval_return", "versions", "x")
    row = {draw.choice(names): value(draw, mark) for _ in range(2)}
    _write(path / "summary.json", row)
    return f"summary.json: {row!r:.200}"


def _checkpoint(path: Path, draw: random.Random, mark: Path) -> str:
    """Changes a checkpoint and updates its checksums, as an attacker can."""
    folders = [one for one in (path / "checkpoints").glob("*") if one.name.isdecimal()]
    files = [file for folder in folders for file in folder.rglob("*") if file.is_file()]
    if not files:
        return "checkpoints: left"
    file = draw.choice(files)
    content = file.read_bytes()
    new = json.dumps(payload(draw, mark)).strip('"').encode(errors="replace")
    kind = draw.choice(("cut", "a bit", "a word", "a number", "renamed", "added", "manifest"))
    at = draw.randrange(len(content) + 1)
    folder = next(one for one in folders if one in file.parents)
    if kind == "cut":
        file.write_bytes(content[:at])
    elif kind == "a bit":
        file.write_bytes(content[:at] + bytes([draw.randrange(256)]) + content[at + 1 :])
    elif kind == "a word":
        words = [word for word in content.split(b'"')[1::2] if 2 < len(word) < 60]
        file.write_bytes(content.replace(draw.choice(words), new) if words else content + new)
    elif kind == "a number":
        file.write_bytes(content.replace(b"4", draw.choice((b"-4", b"999999999999", b"4e9")), 1))
    elif kind == "renamed":
        number = draw.choice(("0", "99999999999999999999", "007", "٣", "1e3"))
        if not folder.with_name(number).exists():
            folder.rename(folder.with_name(number))
        return f"checkpoints: {folder.name} is {number}"
    elif kind == "added":
        (folder / draw.choice(("evilmod.py", "x.pkl", "conftest.py", "sitecustomize.py"))).write_bytes(new)
    else:
        seal = {"iteration": 1, "files": {draw.choice(("../../config.json", "/etc/passwd", "x")): "0" * 64}}
        (folder / "manifest.json").write_text(json.dumps(draw.choice((seal, value(draw, mark)))))
        return "manifest.json"
    if folder.exists() and folder.name.isdecimal():
        _seal(folder)
    return f"{file.relative_to(path)}: {kind} at {at}"


def _seal(folder: Path) -> None:
    files = {
        file.relative_to(folder).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(folder.rglob("*"))
        if file.is_file() and file.name != "manifest.json"
    }
    manifest = json.dumps({"iteration": int(folder.name), "files": files}, indent=1) + "\n"
    (folder / "manifest.json").write_text(manifest)


def _journal(path: Path, draw: random.Random, mark: Path) -> str:
    file = path / "study.journal"
    if not file.is_file():
        return "study.journal: there is none"
    lines = file.read_text().splitlines()
    at = draw.randrange(len(lines))
    try:
        record = json.loads(lines[at])
        place = draw.choice(driver.places(record))
        _put(record, place, value(draw, mark))
    except (ValueError, IndexError):
        return "study.journal: left"
    lines[at] = json.dumps(record)
    if draw.random() < 0.3:
        more = {"op_code": 8, "worker_id": "x", "trial_id": 0, "user_attr": {"run": "../../../../evil"}}
        lines.append(json.dumps(more))
    file.write_text("\n".join(lines) + "\n")
    return f"study.journal: {place} of line {at}"
