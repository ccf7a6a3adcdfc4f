"""A run directory that others have laid out, copied from or removed: what is read, and written where."""

import json
import os
import shutil
import socket

import jax.numpy as jnp
import pytest

import fdg
from fdg import files
from fdg.commands import using
from fdg.commands.cli import train_main
from fdg.errors import FdgError, RunError
from fdg.training.checkpoint import Checkpoints
from fdg.training.run_directory import RunDirectory

WALK = ["--algo", "tests.tiny:Walk", "--devices", "1", "--total-steps", "32", "--checkpoint-every", "2"]


def trained(path, *more):
    assert train_main([*WALK, *more, "--out", str(path)]) == 0
    return path


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Two runs of the same flags, as far as the first of their two checkpoints."""
    folder = tmp_path_factory.mktemp("finished")
    for name in ("one", "two"):
        shutil.rmtree(trained(folder / name) / "checkpoints" / "4")
        (folder / name / ".checkpoints").write_text("2\n")
        (folder / name / "summary.json").unlink()
    return folder


@pytest.fixture
def run(finished, tmp_path):
    return shutil.copytree(finished / "one", tmp_path / "run")


def resumed(run, capsys):
    """The exit status of going on with a run, and what it says on standard error."""
    capsys.readouterr()
    status = train_main([*WALK, "--resume", str(run)])
    return status, capsys.readouterr().err


def content(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# --- whose checkpoint it is ---


def test_a_checkpoint_of_another_run_is_passed_over(run, finished, capsys):
    manifest = json.loads((run / "checkpoints" / "2" / "manifest.json").read_text())
    assert manifest["run"] == json.loads((run / "config.json").read_text())["id"]
    shutil.copytree(finished / "two" / "checkpoints" / "2", run / "checkpoints" / "3")
    manifest = run / "checkpoints" / "3" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"iteration": 2', '"iteration": 3'))
    status, said = resumed(run, capsys)
    assert status == 0 and said.startswith(
        f"warning: checkpoint {run / 'checkpoints' / '3'} is of another run"
    )
    assert "it is not used, going on from iteration 2" in said and said.count("\n") == 1


def test_a_run_with_checkpoints_of_another_alone_is_refused(run, finished, capsys):
    shutil.rmtree(run / "checkpoints")
    shutil.copytree(finished / "two" / "checkpoints", run / "checkpoints")
    before = content(run)
    status, said = resumed(run, capsys)
    assert status == 2 and "is of another run" in said and said.count("\n") == 1
    assert content(run) == before
    with pytest.raises(FdgError, match="is of another run"):
        fdg.load(run, trust=True)


def test_a_copy_is_the_same_run_and_a_new_run_is_not(run, finished, tmp_path, capsys):
    assert resumed(run, capsys) == (0, "")
    ids = [json.loads((path / "config.json").read_text())["id"] for path in (run, finished / "one")]
    assert ids[0] == ids[1]
    assert train_main([*WALK, "--config", str(run), "--out", str(tmp_path / "new")]) == 0
    assert json.loads((tmp_path / "new" / "config.json").read_text())["id"] != ids[0]


def test_a_run_of_before_there_were_ids_goes_on(run, capsys):
    config = json.loads((run / "config.json").read_text())
    del config["id"]
    (run / "config.json").write_text(json.dumps(config))
    manifest = run / "checkpoints" / "2" / "manifest.json"
    lines = manifest.read_text().splitlines(keepends=True)
    manifest.write_text("".join(line for line in lines if not line.startswith(' "run"')))
    assert resumed(run, capsys) == (0, "")
    assert Checkpoints(run / "checkpoints").latest() == 4
    assert "id" not in json.loads((run / "config.json").read_text())


# --- what is no regular file ---


def fifo(path):
    os.mkfifo(path)


def bound(path):
    with socket.socket(socket.AF_UNIX) as one:
        folder = os.getcwd()
        os.chdir(path.parent)  # such a name is at most 108 characters long
        try:
            one.bind(path.name)
        finally:
            os.chdir(folder)


def linked(path):
    outside = path.parent.parent / "outside"
    outside.mkdir(exist_ok=True)
    (outside / path.name).write_text("mine")
    path.symlink_to(outside / path.name)


def dangling(path):
    path.symlink_to(path.parent.parent / "outside" / "not there")


def linked_folder(path):
    outside = path.parent.parent / "outside"
    shutil.move(path, outside) if path.is_dir() else outside.mkdir()
    path.symlink_to(outside)


def device(path):
    path.symlink_to("/dev/zero")


STRANGE = [fifo, bound, linked, dangling, linked_folder, device]
NAMES = (
    *("config.json", "metrics.jsonl", "metrics.unreadable", "summary.json", "learning_curve.png", ".lock"),
    *(".checkpoints", "checkpoints", "best_checkpoint", "samples", "profile", "tensorboard", "trials"),
    *("sweep.json", "search.json", "study.journal"),
)


@pytest.mark.parametrize("name", NAMES)
def test_nothing_strange_is_waited_for_or_written_through(name, run, tmp_path, capsys):
    """Whatever has the name of one of its files: one line before training, and nothing outside changes."""
    for make in STRANGE:
        copy = shutil.copytree(run, tmp_path / make.__name__ / "run")
        path = copy / name
        if make is not linked_folder or not path.is_dir():
            files.remove(path) if path.exists() else None
        make(path)
        outside = content(copy.parent / "outside") if (copy.parent / "outside").exists() else {}
        status, said = resumed(copy, capsys)
        assert status == 2 and said.count("\n") == 1, (make.__name__, said)
        assert str(path) in said or "checkpoints" in said, (make.__name__, said)
        after = content(copy.parent / "outside") if (copy.parent / "outside").exists() else {}
        assert after == outside


def test_whoever_reads_a_run_waits_for_no_fifo(run, capsys):
    for name in ("summary.json", "metrics.jsonl", ".checkpoints", "sweep.json"):
        (run / name).unlink(missing_ok=True)
        os.mkfifo(run / name)
    assert fdg.load(run, trust=True).iteration == 2  # which needs none of them
    for command in (using.COMMANDS["evaluate"], using.COMMANDS["plot"]):
        capsys.readouterr()
        assert command([str(run), *(["--trust"] if command is using.COMMANDS["evaluate"] else [])]) in (0, 2)
        assert capsys.readouterr().err.count("\n") <= 1


@pytest.mark.parametrize("make", [fifo, linked, device, bound])
@pytest.mark.parametrize("name", ["manifest.json", "arrays/more", "arrays/d/more", "arrays/manifest.ocdbt"])
def test_a_checkpoint_of_anything_but_files_is_damaged(name, make, run):
    path = run / "checkpoints" / "2" / name
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    make(path)
    assert "is damaged" in Checkpoints(run / "checkpoints").damage(2)


def test_links_among_checkpoints_are_read_and_removed_as_links(tmp_path):
    """A checkpoint that is a link is one; no link is followed to remove what it leads to."""
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
    checkpoints = Checkpoints(here, keep=1)
    assert checkpoints.arrays(1)["x"] == 1
    with pytest.raises(OSError, match="it is a link"):
        checkpoints.protect(1)
    (here / "1.keep").unlink()
    checkpoints.save(2, {"x": jnp.float32(2)})
    checkpoints.close()
    assert sorted(path.name for path in here.iterdir()) == ["2", "2.damaged"]
    assert content(outside) == before and not (outside / "not there").exists()


def test_the_run_directory_itself_may_be_a_link(run, tmp_path, capsys):
    (tmp_path / "link").symlink_to(run)
    assert resumed(tmp_path / "link", capsys) == (0, "")
    (tmp_path / "new").mkdir()
    (tmp_path / "other").symlink_to(tmp_path / "new")
    trained(tmp_path / "other")
    assert (tmp_path / "new" / "summary.json").exists()


def test_what_uses_a_run_writes_through_no_link_in_it(run, tmp_path, capsys):
    (tmp_path / "mine").write_text("mine")
    (run / "evaluation.jsonl").symlink_to(tmp_path / "mine")
    assert using.COMMANDS["evaluate"]([str(run), "--trust"]) == 2
    assert "it is a link" in capsys.readouterr().err and (tmp_path / "mine").read_text() == "mine"


# --- gone, read-only, full ---


@pytest.mark.parametrize("how", ["removed", "moved", "replaced"])
def test_a_run_directory_that_is_gone_is_said_to_be(how, tmp_path, capsys, monkeypatch):
    run, usual = tmp_path / "run", RunDirectory.append_metrics

    def append(self, rows):
        usual(self, rows)
        monkeypatch.undo()
        shutil.move(run, tmp_path / "moved") if how == "moved" else shutil.rmtree(run)
        if how == "replaced":
            RunDirectory.create(run, {}).close()

    monkeypatch.setattr(RunDirectory, "append_metrics", append)
    assert train_main([*WALK, "--out", str(run)]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"error: {run} was removed or moved during the run") and said.count("\n") == 1
    assert "with all that was saved in it" in said and f"--resume {run}" in said
    left = {path.name for path in run.iterdir()} if run.exists() else set()
    assert left == ({"config.json", ".lock"} if how == "replaced" else set())


def test_one_that_is_removed_while_a_checkpoint_is_written(run, monkeypatch):
    checkpoints = Checkpoints(run / "checkpoints")
    usual = files.make_folder

    def remove(path):
        shutil.rmtree(run)
        return usual(path)

    monkeypatch.setattr(files, "make_folder", remove)
    checkpoints.save(4, {"x": jnp.float32(0)})
    with pytest.raises(RunError, match="was removed or moved during the run"):
        checkpoints.close()
    assert not run.exists()


@pytest.mark.parametrize(
    ("number", "fix"), [(13, "make it writable"), (30, "make it writable"), (28, "make room there")]
)
def test_what_is_lost_is_said(number, fix, run, monkeypatch):
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


def test_a_trial_of_a_search_is_written_through_no_link(tmp_path, capsys):
    pytest.importorskip("optuna")
    (tmp_path / "out" / "trials").mkdir(parents=True)
    (tmp_path / "mine").mkdir()
    (tmp_path / "out" / "trials" / "0000").symlink_to(tmp_path / "mine")
    words = [*WALK, "--optuna", "1", "--search", "scale=0.1,0.2", "--out", str(tmp_path / "out")]
    assert train_main(words) == 1
    said = capsys.readouterr().err
    assert "0000: it is a link" in said and said.count("\n") == 1
    assert not any((tmp_path / "mine").iterdir())
