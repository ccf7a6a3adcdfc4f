"""`fdg pack` and the Hugging Face Hub: contents, model card, push, load and errors."""

import json
import os
import shutil
import sys
import types
from pathlib import Path

import numpy as np
import pytest

import fdg
from fdg import files
from fdg.__main__ import main
from fdg.training.checkpoint import Checkpoints
from fdg.training.curves import draw_learning_curve
from fdg.training.packing import pack
from fdg.training.run import Run
from fdg.training.run_directory import RunDirectory
from tests.refusing import refused, refuses
from tests.training.own import Guesser


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    path = tmp_path_factory.mktemp("packing") / "run"
    fdg.fit(
        Guesser(), total_steps=32, num_seeds=2, eval_episodes=4, out=path, progress=False, live_plot=False
    )
    directory = RunDirectory.reopen(path)
    draw_learning_curve(directory, "a learning curve")
    directory.close()
    config = json.loads((path / "config.json").read_text())
    config["command"] = "python -m fdg.train --out /home/me/secret"
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.fixture
def fake_video(monkeypatch):
    monkeypatch.setattr(Run, "play", lambda self, path, **how: Path(path).write_bytes(b"GIF89a"))


@pytest.fixture(scope="module")
def packed(trained, tmp_path_factory):
    out = tmp_path_factory.mktemp("packed") / "packed"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "play", lambda self, path, **how: Path(path).write_bytes(b"GIF89a"))
        assert main(["pack", str(trained), "--out", str(out), "--trust"]) == 0
    return out


def test_packed_run_loads(trained, packed):
    one, other = (fdg.load(path, trust=True) for path in (trained, packed))
    assert one.iteration == other.iteration == 4 and other.finished
    np.testing.assert_array_equal(one.state["bias"], other.state["bias"])
    assert one.metrics == other.metrics


def test_failed_and_killed_packs(trained, tmp_path, monkeypatch):
    monkeypatch.setattr(Run, "play", lambda self, path, **how: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        pack(trained, tmp_path / "out", trust=True, episodes=1)
    assert not (tmp_path / "out").exists()
    full = OSError(28, "No space left on device")
    monkeypatch.setattr(shutil, "copyfileobj", lambda *_: (_ for _ in ()).throw(full))
    with refuses(f"{tmp_path / 'out'} cannot be written: No space left on device"):
        pack(trained, tmp_path / "out", trust=True, episodes=1)
    monkeypatch.undo()
    killed = files.filling(tmp_path / "out")
    killed.__enter__()
    monkeypatch.setattr(Run, "play", lambda self, path, **how: Path(path).write_bytes(b"GIF89a"))
    pack(trained, tmp_path / "out", checkpoint=4, trust=True, episodes=1)
    assert {"README.md", "config.json", "checkpoints"} <= {path.name for path in (tmp_path / "out").iterdir()}
    assert not list((tmp_path / "out").glob(".*"))


def test_no_local_paths(trained, packed):
    assert list((trained / "checkpoints").rglob("commit_success.txt"))  # of Orbax, contains the path
    for file in (file for file in packed.rglob("*") if file.is_file()):
        for path in (trained.parent, "/home/me"):
            assert str(path).encode() not in file.read_bytes(), file
    assert Checkpoints(packed / "checkpoints").damage(4) is None


def test_links_are_not_packed(trained, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    (tmp_path / "secret").write_text("key")
    (run / "learning_curve.png").unlink()
    (run / "learning_curve.png").symlink_to(tmp_path / "secret")
    with refuses("learning_curve.png cannot be packed: it is a link"):
        pack(run, tmp_path / "out", trust=True, episodes=1)
    assert not (tmp_path / "out").exists()


def test_model_card(trained, packed):
    card = (packed / "README.md").read_text()
    head = card.split("---")[1]
    for line in (
        "library_name: fdg",
        "pipeline_tag: reinforcement-learning",
        '- "CartPole-v1"',
        "    - type: mean_reward",
    ):
        assert f"{line}\n" in head
    mean = json.loads((trained / "summary.json").read_text())["eval_return"]
    assert f'value: "{mean:.2f} [' in head and "over 4 episodes" in head
    assert "| seeds | 0, 1 |" in card and "![learning curve](learning_curve.png)" in card
    assert "![the first agent](video.gif)" in card and "jax 0." in card and "| rate | 0.5 |" in card
    everything = b"".join(file.read_bytes() for file in packed.rglob("*.json*"))
    assert b"secret" in (trained / "config.json").read_bytes() and b"secret" not in everything
    assert not any(path.is_symlink() for path in packed.rglob("*"))


def test_foreign_module_needs_trust(packed):
    with pytest.raises(fdg.FdgError, match="trust=True"):
        fdg.load(packed)


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A fake `huggingface_hub` whose repositories are local folders."""
    module = types.ModuleType("huggingface_hub")
    module.repositories, module.revisions = {}, []

    class HfApi:
        def repo_info(self, name, revision):
            module.revisions.append(revision)
            if name not in module.repositories:
                raise RuntimeError("404 Client Error\nRepository Not Found")
            return types.SimpleNamespace(sha="abc123")

        def create_repo(self, name, exist_ok):
            assert exist_ok

        def upload_folder(self, repo_id, folder_path, commit_message):
            module.repositories[repo_id] = Path(folder_path)

    def snapshot_download(name, revision, local_dir, allow_patterns):
        assert revision == "abc123" and "README.md" not in allow_patterns
        shutil.copytree(module.repositories[name], local_dir, dirs_exist_ok=True)

    module.HfApi, module.snapshot_download = HfApi, snapshot_download
    module.constants = types.SimpleNamespace(HF_HOME=str(tmp_path / "home"))
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)
    return module


def test_push_and_load(hub, trained, fake_video, tmp_path, capsys, monkeypatch):
    words = ["pack", str(trained), "--out", str(tmp_path / "out"), "--trust", "--push", "me/guess"]
    assert main(words) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "hf://me/guess"
    assert fdg.load("hf://me/guess@main", trust=True).iteration == 4 and hub.revisions == ["main"]
    monkeypatch.chdir(tmp_path)
    assert main(["evaluate", "hf://me/guess", "--trust", "--actions", "greedy", "--episodes", "1"]) == 0
    assert list((tmp_path / "home").rglob("evaluation.jsonl")) and not Path("hf:").exists()
    for address, message in {
        "hf://me/other": "hf://me/other cannot be read (",
        "hf://guess": "hf://guess: give USER/NAME",
        "hf://me/../x": "give USER/NAME",
    }.items():
        with refuses(message):
            fdg.load(address)


def test_huggingface_hub_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(fdg.FdgError, match=r"needs huggingface_hub: pip install 'fdg\[hub\]'"):
        fdg.load("hf://me/guess")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["pack"], "RUN_DIR"),
        (["pack", "none"], "no run in none (it has no config.json)"),
        (["pack", "run", "--out", "run"], "--out run exists already and is not empty: give a new folder"),
        (["pack", "run", "--out", "run/config.json"], "exists already and is not empty"),
        (["pack", "run", "--checkpoint", "7", "--trust"], "--checkpoint 7: run has no such checkpoint: give"),
        (["pack", "run", "--checkpoint", "best", "--trust"], "only runs with --eval-every N keep one"),
        (["pack", "run", "--push", "name"], "--push name: give USER/NAME"),
        (["pack", "run"], "--trust"),
        (["demo", "--seed", "-1"], "--seed -1: give a whole number"),
        (["demo", "--out", "run"], "--out run is a run directory: give another folder"),
        (["demo", "--out", "run/config.json"], "cannot be written"),
        (["demo", "--env", "Pendulum-v1"], "unknown flag '--env'"),
    ],
)
def test_command_line_errors(trained, monkeypatch, capsys, words, message):
    monkeypatch.chdir(trained.parent)
    assert message in refused(capsys, words, main)
    assert not os.path.exists("run-packed") or not os.listdir("run-packed")
