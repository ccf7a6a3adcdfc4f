"""`fdg.search`: search spaces, trials, resume, and early ends of bad trials (Optuna)."""

import errno
import json
import math
import os
import sys

import pytest

import fdg
from fdg.commands.cli import train_main
from fdg.errors import FdgWarning
from fdg.training.search import Trial, best_trial, trials_table
from fdg.training.space import Choices, Range, make_space, parse_space, space_text
from tests.refusing import refused, refuses
from tests.training.test_sweep import Descent

pytest.importorskip("optuna")


def read(name):
    def integer(word):
        if not word.isdigit():
            raise ValueError("an integer")
        return int(word)

    kinds = {
        "hidden": (lambda word: tuple(map(integer, word.split(","))), True, False),
        "width": (integer, False, True),
        "rate": (float, False, False),
    }
    return kinds[name]


def test_space_round_trip():
    space = parse_space("hidden=64,64|128 width=1,2,3 rate=log:1e-4..1e-2", read)
    assert [one.name for one in space] == ["hidden", "width", "rate"]
    assert space[0] == Choices("hidden", ((64, 64), (128,))) and space[1].values == (1, 2, 3)
    assert space[2] == Range("rate", 1e-4, 1e-2, True)
    assert parse_space(space_text(space), read) == space
    assert parse_space("hidden=64,64/128", read) == space[:1]  # shells read `|` as a pipe
    values = {"hidden": [(64, 64), (128,)], "width": [1, 2, 3], "rate": "log:1e-4..1e-2"}
    assert make_space(values, lambda name: name == "width") == space


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "nothing to try"),
        ("hidden", "has no values"),
        ("width=1,x", "is not an integer"),
        ("width=1,1", "twice"),
        ("width=1 width=2", "width is given twice"),
        ("rate=log:0..1", "above 0"),
        ("rate=lin:2..1", "from the lower"),
        ("width=lin:a..b", "a range needs two numbers"),
    ],
)
def test_space_errors(text, message):
    with refuses(message):
        parse_space(text, read)


def search(out, trials=3, **settings):
    return fdg.search(
        Descent(), {"width": [1, 2, 3], "pull": "lin:0.5..1.5"}, trials=trials, out=out, seed=1, devices=1,
        progress=False, **settings,
    )  # fmt: skip


def test_trials_are_runs_and_a_search_resumes(tmp_path):
    reference = search(tmp_path / "reference", trials=3, halving=False)
    assert [trial.run for trial in reference.trials] == ["0000", "0001", "0002"]
    assert all(trial.state == "done" for trial in reference.trials)
    best = max(reference.trials, key=lambda trial: trial.value)
    found = reference.best
    assert found.algorithm.width == int(best.values["width"]) and found.algorithm.pull == best.values["pull"]
    result = json.loads((tmp_path / "reference" / "search.json").read_text())
    assert result["best"]["run"] == best.run and len(result["trials"]) == 3
    assert (tmp_path / "reference" / "search.png").read_bytes().startswith(b"\x89PNG")
    # Stopped and resumed, it proposes the same trials.
    search(tmp_path / "half", trials=1, halving=False)
    again = search(tmp_path / "half", trials=3, halving=False, resume=True)
    assert [(t.values, t.value) for t in again.trials] == [(t.values, t.value) for t in reference.trials]


def test_interrupted_trial_resumes(tmp_path, monkeypatch):
    """A search that failed in its second trial repeats this trial with the same values."""
    from fdg.training import search as module

    real, calls = module.carry_out, []

    def fail_in_second(job, *rest, **named):
        calls.append(job)
        if len(calls) == 2:
            raise MemoryError
        return real(job, *rest, **named)

    monkeypatch.setattr(module, "carry_out", fail_in_second)
    with pytest.raises(MemoryError):
        search(tmp_path / "run")
    proposed = calls[1].algorithm
    found = search(tmp_path / "run", trials=2, resume=True)
    assert [trial.run for trial in found.trials] == ["0000", "0001"]
    assert calls[2].algorithm == proposed and calls[2].out == calls[1].out


def test_search_resumes_after_a_kill_while_the_journal_was_written(tmp_path, monkeypatch):
    """A killed process leaves Optuna's lock, whose relative target is missing, and an incomplete line."""
    monkeypatch.chdir(tmp_path)
    search("run", trials=1, halving=False)
    os.symlink("run/study.journal", "run/study.journal.lock")
    with open("run/study.journal", "a") as journal:
        journal.write('{"op_code":4,"worker_id":"x-12')
    found = search("run", trials=2, halving=False, resume=True)
    assert [trial.run for trial in found.trials] == ["0000", "0001"]


def test_journal_whose_last_newline_is_missing_keeps_its_last_entry(tmp_path):
    search(tmp_path / "run", trials=1, halving=False)
    journal = tmp_path / "run" / "study.journal"
    content = journal.read_bytes()
    journal.write_bytes(content[:-1])
    found = search(tmp_path / "run", trials=2, halving=False, resume=True)
    assert journal.read_bytes().startswith(content) and len(found.trials) == 2
    journal.write_bytes(b"not a journal")
    with refuses("is not Optuna's journal"):
        search(tmp_path / "run", trials=3, halving=False, resume=True)
    assert journal.read_bytes().startswith(b"not a journal")


def test_full_disk_while_the_journal_is_written(tmp_path, monkeypatch):
    """The trial's results are kept, and the search can be resumed."""
    real, calls = os.fsync, []

    def fail_at_last(descriptor):
        calls.append(descriptor)
        if (tmp_path / "run/trials/0000/summary.json").exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fail_at_last)
    with refuses(f"{tmp_path / 'run/study.journal'} cannot be written (No space left on device): make room"):
        search(tmp_path / "run", trials=1)
    monkeypatch.undo()
    assert search(tmp_path / "run", trials=1, resume=True).trials[0].state == "done"


def search_with_halving(out, **settings):
    return fdg.search(
        Descent(total_steps=54 * 8), {"rate": [0.0, 0.001, 0.01, 0.02, 0.03, 0.5]}, trials=6, seed=3,
        devices=1, out=out, progress=False, checkpoint_every=4, **settings,
    )  # fmt: skip


@pytest.fixture(scope="module")
def halved(tmp_path_factory):
    return search_with_halving(tmp_path_factory.mktemp("halved") / "run")


def test_halving_ends_trials_early(halved):
    """Once three trials have reached a rung, one in three continues."""
    states = {trial.state for trial in halved.trials}
    assert states == {"done", "ended early"}
    assert halved.best.algorithm.rate == 0.5
    early = next(trial for trial in halved.trials if trial.state == "ended early")
    assert fdg.load(halved.path / "trials" / early.run, trust=True).iteration < 54


def test_missing_tracker_refuses_the_search(tmp_path, monkeypatch):
    """Not each of its trials, of which none could then be trained."""
    monkeypatch.setitem(sys.modules, "wandb", None)  # as if it were not installed
    with refuses("wandb needs wandb, which is not installed"):
        search(tmp_path / "run", wandb="project")
    assert not (tmp_path / "run").exists()


def test_no_values_are_tried_twice(tmp_path, capsys):
    """Equal values have equal seeds and results, so a search ends when all combinations are tried."""
    endless = fdg.search(
        Descent(), {"width": [1], "pull": "lin:0.5..1.5"}, trials=2, seed=0, devices=1,
        out=tmp_path / "endless", progress=False,
    )  # fmt: skip
    assert len(endless.trials) == 2  # a range always has another value
    words = "--algo tests.training.test_sweep:Descent --total-steps 64 --devices 1 --no-halving".split()
    words += ["--optuna", "4", "--search", "width=lin:1..2 rate=0.1", "--out", str(tmp_path / "run")]
    assert train_main(words) == 0
    assert (
        "all 2 combinations of values have been tried: 2 of 4 trials are left out" in capsys.readouterr().out
    )
    trials = json.loads((tmp_path / "run" / "search.json").read_text())["trials"]
    assert len({json.dumps(trial["values"]) for trial in trials}) == len(trials) == 2


def test_point_that_diverges_does_not_fail_the_others(tmp_path):
    """All points have the same seeds, so the failed seeds do not say which agents failed."""
    sweep = fdg.Sweep(Descent(), (("rate", (0.1, 1e30)),), num_seeds=2)
    with pytest.warns(FdgWarning, match="infinite for 2 of 4 agents"):
        found = fdg.search(sweep, {"width": [2, 3]}, trials=2, seed=1, out=tmp_path / "out", progress=False)
    assert [trial.state for trial in found.trials] == ["done", "done"]


def test_best_trial_by_hand():
    trials = [
        Trial("0000", {"width": "1"}, "done", 3.0, (2.0, 4.0)),
        Trial("0001", {"width": "2"}, "ended early", math.nan),
        Trial("0002", {"width": "3"}, "done", 5.0, (5.0,)),
    ]
    assert best_trial(trials).run == "0002" and best_trial(trials[1:2]) is None
    low, high = trials[0].interval
    assert 2.0 <= low < high <= 4.0 and trials[2].interval is None
    first = next(line for line in trials_table(trials, ["width"]).splitlines() if "000" in line)
    assert "0002" in first and "5.0" in first


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--optuna 3", "--search"),
        ("--search hidden=64", "--optuna"),
        ("--optuna 0 --search num_steps=64,128", "at least 1"),
        ("--optuna 3 --search widht=3", "unknown hyperparameter"),
        ("--optuna 3 --search num_steps=a", "is not an integer"),
        ("--optuna 3 --search num_steps=64 --num-steps 3", "leave out one of them"),
        ("--optuna 3 --search lr=1e-3,1e-2 --sweep lr=1e-3", "swept already"),
    ],
)
def test_command_line_errors(words, message, capsys, tmp_path):
    assert message in refused(capsys, [*words.split(), "--out", str(tmp_path / "run")], train_main)
    assert not (tmp_path / "run").exists()
