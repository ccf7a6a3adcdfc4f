"""Run directories with foreign checkpoints, links or special files, and those that vanish during a run."""

import datetime
import json
import os
import shutil
import socket
import types
from pathlib import Path

import jax.numpy as jnp
import pytest

import fdg
from fdg import files
from fdg.commands import using
from fdg.commands.cli import train_main
from fdg.errors import FdgError, RunError
from fdg.training import checkpoint, run_directory
from fdg.training.checkpoint import Checkpoints
from fdg.training.run_directory import RunDirectory
from tests.tiny import Walk

WALK = ["--algo", "tests.tiny:Walk", "--devices", "1", "--total-steps", "32", "--checkpoint-every", "2"]


def train(path, *more):
    assert train_main([*WALK, *more, "--out", str(path)]) == 0
    return path


@pytest.fixture(scope="module")
def unfinished(tmp_path_factory):
    """Two runs with the same flags, as if killed after the first of two checkpoints."""
    folder = tmp_path_factory.mktemp("unfinished")
    for name in ("one", "two"):
        shutil.rmtree(train(folder / name) / "checkpoints" / "4")
        (folder / name / ".checkpoints").write_text("2\n")
        (folder / name / "summary.json").unlink()
    return folder


@pytest.fixture
def run(unfinished, tmp_path):
    return shutil.copytree(unfinished / "one", tmp_path / "run")


def resume(run, capsys):
    """Resumes a run: the exit status, and what it prints on standard error."""
    capsys.readouterr()
    status = train_main([*WALK, "--resume", str(run)])
    return status, capsys.readouterr().err


def content(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# --- checkpoints of other runs ---


def test_checkpoint_of_another_run_is_skipped(run, unfinished, capsys):
    manifest = json.loads((run / "checkpoints" / "2" / "manifest.json").read_text())
    assert manifest["run"] == json.loads((run / "config.json").read_text())["id"]
    shutil.copytree(unfinished / "two" / "checkpoints" / "2", run / "checkpoints" / "3")
    manifest = run / "checkpoints" / "3" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"iteration": 2', '"iteration": 3'))
    status, error = resume(run, capsys)
    assert status == 0 and error.startswith(
        f"warning: checkpoint {run / 'checkpoints' / '3'} is of another run"
    )
    assert "it is not used, going on from iteration 2" in error and error.count("\n") == 1


def test_only_checkpoints_of_another_run_are_refused(run, unfinished, capsys):
    shutil.rmtree(run / "checkpoints")
    shutil.copytree(unfinished / "two" / "checkpoints", run / "checkpoints")
    before = content(run)
    status, error = resume(run, capsys)
    assert status == 2 and "is of another run" in error and error.count("\n") == 1
    assert content(run) == before
    with pytest.raises(FdgError, match="is of another run"):
        fdg.load(run, trust=True)


def test_name_that_another_process_takes_at_the_same_time(run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    second = types.SimpleNamespace(now=lambda: datetime.datetime(2026, 1, 2))
    monkeypatch.setattr(run_directory, "datetime", types.SimpleNamespace(datetime=second))
    taken = run_directory.make_new_run_folder(None, "Walk", 0)
    shutil.copytree(run, taken, dirs_exist_ok=True)
    assert run_directory.make_new_run_folder(None, "Walk", 0) == Path(f"{taken}-2")
    before = content(taken)
    assert train_main(WALK) == 0 and f"{taken}-3" in capsys.readouterr().out
    assert content(taken) == before and Path(f"{taken}-3", "summary.json").exists()


def test_folder_of_runs_that_cannot_be_made(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runs = tmp_path / "runs"
    runs.write_text("")
    with pytest.raises(FdgError, match="runs is a file"):
        run_directory.make_new_run_folder("env", "algo", 0)
    runs.unlink()
    runs.symlink_to("missing")
    with pytest.raises(FdgError, match="cannot be written to: File exists"):
        run_directory.make_new_run_folder("env", "algo", 0)


def test_copies_keep_the_run_id(run, unfinished, tmp_path, capsys):
    assert resume(run, capsys) == (0, "")
    ids = [json.loads((path / "config.json").read_text())["id"] for path in (run, unfinished / "one")]
    assert ids[0] == ids[1]
    assert train_main([*WALK, "--config", str(run), "--out", str(tmp_path / "new")]) == 0
    assert json.loads((tmp_path / "new" / "config.json").read_text())["id"] != ids[0]


def test_run_without_an_id_resumes(run, capsys):
    config = json.loads((run / "config.json").read_text())
    del config["id"]
    (run / "config.json").write_text(json.dumps(config))
    manifest = run / "checkpoints" / "2" / "manifest.json"
    lines = manifest.read_text().splitlines(keepends=True)
    manifest.write_text("".join(line for line in lines if not line.startswith(' "run"')))
    assert resume(run, capsys) == (0, "")
    assert Checkpoints(run / "checkpoints").latest() == 4
    assert "id" not in json.loads((run / "config.json").read_text())


# --- links and special files ---


def fifo(path):
    os.mkfifo(path)


def unix_socket(path):
    with socket.socket(socket.AF_UNIX) as one:
        folder = os.getcwd()
        os.chdir(path.parent)  # a socket's path has at most 108 characters
        try:
            one.bind(path.name)
        finally:
            os.chdir(folder)


def link(path):
    outside = path.parent.parent / "outside"
    outside.mkdir(exist_ok=True)
    (outside / path.name).write_text("mine")
    path.symlink_to(outside / path.name)


def dangling_link(path):
    path.symlink_to(path.parent.parent / "outside" / "not there")


def link_to_folder(path):
    outside = path.parent.parent / "outside"
    shutil.move(path, outside) if path.is_dir() else outside.mkdir()
    path.symlink_to(outside)


def device(path):
    path.symlink_to("/dev/zero")


SPECIAL = [fifo, unix_socket, link, dangling_link, link_to_folder, device]
NAMES = (
    *("config.json", "metrics.jsonl", "metrics.unreadable", "summary.json", "learning_curve.png", ".lock"),
    *(".checkpoints", "checkpoints", "best_checkpoint", "samples", "profile", "tensorboard", "trials"),
    *("sweep.json", "search.json", "study.journal"),
)


@pytest.mark.parametrize("name", NAMES)
def test_special_files_are_refused(name, run, tmp_path, capsys):
    """A one-line error before training for each file of a run; no file outside the directory changes."""
    for make in SPECIAL:
        copy = shutil.copytree(run, tmp_path / make.__name__ / "run")
        path = copy / name
        if make is not link_to_folder or not path.is_dir():
            files.remove(path) if path.exists() else None
        make(path)
        outside = content(copy.parent / "outside") if (copy.parent / "outside").exists() else {}
        status, error = resume(copy, capsys)
        assert status == 2 and error.count("\n") == 1, (make.__name__, error)
        assert str(path) in error, (make.__name__, error)
        after = content(copy.parent / "outside") if (copy.parent / "outside").exists() else {}
        assert after == outside


def test_reading_a_run_does_not_block_on_fifos(run, capsys):
    for name in ("summary.json", "metrics.jsonl", ".checkpoints", "sweep.json"):
        (run / name).unlink(missing_ok=True)
        os.mkfifo(run / name)
    assert fdg.load(run, trust=True).iteration == 2  # needs none of these files
    for command in (using.COMMANDS["evaluate"], using.COMMANDS["plot"]):
        capsys.readouterr()
        assert command([str(run), *(["--trust"] if command is using.COMMANDS["evaluate"] else [])]) in (0, 2)
        assert capsys.readouterr().err.count("\n") <= 1


@pytest.mark.parametrize("make", [fifo, link, device, unix_socket])
@pytest.mark.parametrize("name", ["manifest.json", "arrays/more", "arrays/d/more", "arrays/manifest.ocdbt"])
def test_checkpoint_with_special_files_is_damaged(name, make, run):
    path = run / "checkpoints" / "2" / name
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    make(path)
    assert "is damaged" in Checkpoints(run / "checkpoints").damage(2)


def test_links_among_checkpoints(tmp_path, monkeypatch):
    """A link to a checkpoint can be read; only links are removed, never their targets."""
    outside = tmp_path / "outside"
    made = Checkpoints(outside)
    made.save(1, {"x": jnp.float32(1)})
    made.close()
    here = tmp_path / "run" / "checkpoints"
    here.mkdir(parents=True)
    for name in ("1", "2.writing", "1.removed", "1.damaged", "2.damaged"):
        (here / name).symlink_to(outside / "1")
    (here / "1.keep").symlink_to(outside / "not there")
    (here.parent / ".checkpoints.writing").symlink_to(outside / "not there")
    before = content(outside)
    monkeypatch.setattr(checkpoint, "KEEP", 1)
    checkpoints = Checkpoints(here)
    assert checkpoints.arrays(1)["x"] == 1
    with pytest.raises(OSError, match="it is a link"):
        checkpoints.protect(1)
    (here / "1.keep").unlink()
    checkpoints.save(2, {"x": jnp.float32(2)})
    checkpoints.close()
    assert sorted(path.name for path in here.iterdir()) == ["2", "2.damaged"]
    assert content(outside) == before and not (outside / "not there").exists()


def test_run_directory_may_be_a_link(run, tmp_path, capsys):
    (tmp_path / "link").symlink_to(run)
    assert resume(tmp_path / "link", capsys) == (0, "")
    (tmp_path / "new").mkdir()
    (tmp_path / "other").symlink_to(tmp_path / "new")
    train(tmp_path / "other")
    assert (tmp_path / "new" / "summary.json").exists()


def test_evaluate_writes_through_no_link(run, tmp_path, capsys):
    (tmp_path / "mine").write_text("mine")
    (run / "evaluation.jsonl").symlink_to(tmp_path / "mine")
    assert using.COMMANDS["evaluate"]([str(run), "--trust"]) == 2
    assert "it is a link" in capsys.readouterr().err and (tmp_path / "mine").read_text() == "mine"


# --- removed directories, read-only and full disks ---


@pytest.mark.parametrize("change", ["removed", "moved", "replaced"])
def test_removed_run_directory_is_reported(change, tmp_path, capsys, monkeypatch):
    run, original = tmp_path / "run", RunDirectory.append_metrics

    def append(self, rows):
        original(self, rows)
        monkeypatch.undo()
        shutil.move(run, tmp_path / "moved") if change == "moved" else shutil.rmtree(run)
        if change == "replaced":
            RunDirectory.create(run, {}).close()

    monkeypatch.setattr(RunDirectory, "append_metrics", append)
    assert train_main([*WALK, "--out", str(run)]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"error: {run} was removed or moved during the run") and error.count("\n") == 1
    assert "with all that was saved in it" in error and f"--resume {run}" in error
    left = {path.name for path in run.iterdir()} if run.exists() else set()
    assert left == ({"config.json", ".lock"} if change == "replaced" else set())


def test_run_directory_removed_while_saving(run, monkeypatch):
    checkpoints = Checkpoints(run / "checkpoints")
    original = files.make_folder

    def remove(path):
        shutil.rmtree(run)
        return original(path)

    monkeypatch.setattr(files, "make_folder", remove)
    checkpoints.save(4, {"x": jnp.float32(0)})
    with pytest.raises(RunError, match="was removed or moved during the run"):
        checkpoints.close()
    assert not run.exists()


@pytest.mark.parametrize(
    ("number", "fix"), [(13, "make it writable"), (30, "make it writable"), (28, "make room there")]
)
def test_write_errors_name_the_fix(number, fix, run, monkeypatch):
    def refuse(path):
        raise OSError(number, os.strerror(number))

    opened = RunDirectory.reopen(run)
    monkeypatch.setattr(files, "open_to_append", refuse)
    with pytest.raises(RunError) as caught:
        opened.append_metrics([{"iteration": 3}])
    opened.close()
    assert f"({os.strerror(number)}): {fix}, and go on with --resume {run} from iteration 2" in str(
        caught.value
    )


@pytest.mark.parametrize("resume", [False, True])
def test_failed_start_releases_the_lock(resume, run, tmp_path, monkeypatch):
    """A notebook keeps the error with its traceback, and with that the open files of its frames."""

    def fit():
        out = run if resume else tmp_path / "new"
        return fdg.fit(Walk(), total_steps=64, devices=1, out=out, resume=resume, progress=False)

    def full(path, content):
        raise OSError(28, os.strerror(28))

    with monkeypatch.context() as patch:
        patch.setattr(files, "write", full)
        with pytest.raises(FdgError, match="No space left") as kept:
            fit()
    assert fit().iteration == 8 and kept.value.__traceback__ is not None


def test_search_trial_writes_through_no_link(tmp_path, capsys):
    pytest.importorskip("optuna")
    (tmp_path / "out" / "trials").mkdir(parents=True)
    (tmp_path / "mine").mkdir()
    (tmp_path / "out" / "trials" / "0000").symlink_to(tmp_path / "mine")
    words = [*WALK, "--optuna", "1", "--search", "scale=0.1,0.2", "--out", str(tmp_path / "out")]
    assert train_main(words) == 1
    error = capsys.readouterr().err
    assert "0000: it is a link" in error and error.count("\n") == 1
    assert not any((tmp_path / "mine").iterdir())
