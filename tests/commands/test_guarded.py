"""What a command does with errors, and which presets a class has: without running anything."""

import os
import sys

import jax
import pytest

import algos
from fdg.commands import preset_flags
from fdg.commands.cli import guarded
from fdg.errors import FdgError, HostError


def refused(error, capsys, status=2):
    def run(argv):
        raise error

    assert guarded(run, []) == status
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1
    return said.removeprefix("error: ").rstrip("\n")


def test_the_first_line_of_what_memory_there_is_not(capsys):
    fix = ": use a smaller batch, or more devices"
    lost = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 7 bytes\nwhere they\nwere needed")
    assert refused(lost, capsys) == f"out of memory (RESOURCE_EXHAUSTED: 7 bytes){fix}"
    assert refused(MemoryError("of the host\nhere"), capsys) == f"out of memory (of the host){fix}"
    assert refused(MemoryError(), capsys) == f"out of memory (no memory){fix}"


def test_a_line_is_cut_in_its_middle(capsys):
    whole = "begin" + "x" * 990 + "later"
    assert refused(FdgError(whole), capsys) == whole  # 1000 characters
    cut = refused(FdgError(f"begin{'x' * 2000}: the fix"), capsys)
    assert len(cut) == 1005 and cut.startswith("beginx") and cut.endswith("x: the fix") and " ... " in cut


def test_a_file_that_cannot_be_had(capsys):
    assert (
        refused(PermissionError(13, "Permission denied", "/there"), capsys, 1) == "/there: Permission denied"
    )
    assert refused(OSError(28, "No space left on device"), capsys, 1) == "No space left on device"


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (FdgError("no\nsuch thing"), 2, "error: no\\nsuch thing\n"),
        (HostError("step raised"), 1, "error: step raised\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (SystemExit(0), 0, ""),
        (SystemExit(3), 3, ""),
        (SystemExit(None), 0, ""),
    ],
)
def test_what_a_user_can_mend_is_a_line_and_a_status(error, status, said, capsys):
    def fail(*_, **__):
        raise error

    before = list(sys.path)
    assert guarded(fail, []) == status
    assert capsys.readouterr().err == said and sys.path == before


def test_a_reader_that_has_enough_is_no_error(monkeypatch, tmp_path):
    """As in `python -m fdg.plan | head -1`: the status is that of a process ended by SIGPIPE."""

    def say(*_, **__):
        raise BrokenPipeError

    with open(tmp_path / "out", "w") as out, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", out)
        assert guarded(say, []) == 141


def test_a_folder_that_is_gone(capsys, monkeypatch):
    def gone():
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(os, "getcwd", gone)
    said = refused(AssertionError("not reached"), capsys)
    assert said == "the current folder cannot be used (No such file or directory): change to another folder"


class Own(algos.PPO):
    """Has the presets of what it is based on."""


class Written(algos.PPO):
    """Has presets of its own."""

    @classmethod
    def preset(cls, env_name, env=None):
        return {"num_envs": 3} if env_name == "CartPole-v1" else {}


def test_whose_presets_a_class_has():
    assert preset_flags.preset_names(algos.PPO) == preset_flags.preset_names(Own) != ()
    assert preset_flags.preset_names(Written) == () == preset_flags.preset_names(object)
    env = object()
    found = preset_flags.starting_preset(Written, None, "CartPole-v1", env, {})
    assert found is not None and found.values == {"num_envs": 3}
    assert preset_flags.starting_preset(Written, None, "Pendulum-v1", env, {}) is None
    assert preset_flags.starting_preset(Written, "none", "CartPole-v1", env, {}) is None
    assert preset_flags.starting_preset(Written, None, "CartPole-v1", None, {}) is None
    assert preset_flags.starting_preset(object, None, "CartPole-v1", env, {}) is None
    with pytest.raises(FdgError, match="--preset minatar: Written has no named presets: leave it out"):
        preset_flags.starting_preset(Written, "minatar", "Asterix-MinAtar", env, {})


@pytest.mark.parametrize(
    ("asked", "resumes", "keeps", "said"),
    [
        ({}, True, True, None),
        ({"preset": "none"}, False, False, None),
        (
            {"preset": "minatar"},
            True,
            False,
            "--preset minatar: --resume continues with the settings of a run",
        ),
        ({"preset": "none"}, False, True, "--preset none: --config and --from start from the settings of"),
    ],
)
def test_a_preset_or_the_settings_of_a_run(asked, resumes, keeps, said):
    if said is None:
        preset_flags.check_allowed(asked, resumes, keeps)
        return
    with pytest.raises(FdgError, match=said):
        preset_flags.check_allowed(asked, resumes, keeps)
