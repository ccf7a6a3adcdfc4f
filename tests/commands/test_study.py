"""`fdg study`: cells, resume, failed cells, and one-line errors."""

import json

import pytest

from fdg.__main__ import main
from fdg.commands import study
from fdg.commands.study import study_of
from fdg.errors import RunError, UnwritableError
from fdg.training import comparison, loop, statistics
from tests.refusing import refused
from tests.training import own

GUESSER = "tests.training.own:Guesser"
FILE = f"""
algorithms = ["{GUESSER}"]
environments = ["CartPole-v1"]
total_steps = {{short = 16, long = 32}}
seeds = 3
first_seed = 5
random_episodes = 4
[settings]
eval_episodes = 2
devices = 1
[variants.half]
[variants.tenth]
rate = 0.1
"""
ONE = FILE.replace("[variants.half]\n", "")


@pytest.fixture(autouse=True)
def quick_comparisons(monkeypatch):
    """The tests of `fdg compare` draw pictures, each in a second; precise intervals take seconds too."""
    monkeypatch.setattr(comparison.Comparison, "pictures", lambda self: {})
    monkeypatch.setattr(statistics, "RESAMPLES", 100)


def tables(folder):
    files = sorted(folder.glob("*/comparison.*"))
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_interrupted_study_gives_the_same_tables(tmp_path, capsys, monkeypatch):
    file = tmp_path / "guess.toml"
    file.write_text(ONE)
    assert main(["study", str(file), "--out", str(tmp_path / "once")]) == 0
    text = capsys.readouterr().out
    assert "cell 2 of 2" in text and text.count("# Comparison") == 2
    cells = sorted(path.name for path in (tmp_path / "once" / "cells").iterdir())
    assert cells == [f"{budget}-CartPole_v1-tests.training.own_Guesser_tenth" for budget in ("long", "short")]
    found = json.loads((tmp_path / "once" / "short" / "comparison.json").read_text())
    assert [cell["seeds"] for cell in found["cells"]] == [[5, 6, 7]]
    assert len(found["random"]["CartPole-v1"]) == 4

    class Killed(BaseException):
        pass

    calls, original = [], loop.carry_out

    def killed(job, *others, **how):
        calls.append(job)
        if len(calls) == 2:
            raise Killed
        if len(calls) == 3:
            raise UnwritableError("metrics.jsonl cannot be written (No space left on device)")
        return original(job, *others, **how)

    monkeypatch.setattr(loop, "carry_out", killed)
    words = ["study", str(file), "--out", str(tmp_path / "parts")]
    with pytest.raises(Killed):
        main(words)
    assert main(words) == 1 and main(words) == 0  # a full disk does not fail the cell
    assert len(calls) == 4 and capsys.readouterr().out.count("already done") == 2
    assert tables(tmp_path / "parts") == tables(tmp_path / "once") and len(tables(tmp_path / "once")) == 6
    (tmp_path / "parts" / "random.json").write_text('{"CartPole-v1": 3}')
    (tmp_path / "parts" / "cells" / cells[0] / "summary.json").write_text("null")
    assert main(words) == 0 and tables(tmp_path / "parts") == tables(tmp_path / "once")
    (tmp_path / "parts" / "study.json").write_text("{}")
    capsys.readouterr()
    assert main(words) == 2 and "study.json lists no cells" in capsys.readouterr().err
    (tmp_path / "parts" / "study.json").unlink()
    (tmp_path / "parts" / "cells" / cells[0] / "metrics.jsonl").unlink()
    assert main(words) == 0 and "lacks metrics.jsonl" in capsys.readouterr().out
    file.write_text(ONE.replace("rate = 0.1", "rate = 0.2"))
    capsys.readouterr()
    assert main(words) == 2
    error = capsys.readouterr().err
    assert "from another study, with --rate 0.1: give another folder" in error and error.count("\n") == 1


def test_renamed_variant_is_not_trained_again(tmp_path, capsys):
    file = tmp_path / "guess.toml"
    file.write_text(ONE.replace("{short = 16, long = 32}", "16"))
    words = ["study", str(file), "--out", str(tmp_path / "out")]
    assert main(words) == 0
    file.write_text(file.read_text().replace("variants.tenth", "variants.small") + "[variants.half]\n")
    capsys.readouterr()
    assert main(words) == 0 and capsys.readouterr().out.count("already done") == 1
    cells = sorted(path.name.rpartition("_")[2] for path in (tmp_path / "out" / "cells").iterdir())
    assert cells == ["half", "small"]
    record = json.loads((tmp_path / "out" / "study.json").read_text())["cells"]
    assert sorted(name.rpartition("_")[2] for name in record) == cells


@pytest.mark.parametrize(("old", "renamed"), [(".._my.py_Env-ppo_a", True), ("a/b", False)])
def test_only_plain_names_are_renamed(old, renamed, tmp_path):
    """Names of cells begin with dots if their environment is in a file such as `../my.py`."""
    cells = tmp_path / "study" / "cells"
    (cells / old).mkdir(parents=True)
    study._rename(cells, old, "new", range(1))
    assert (cells / "new").exists() == renamed


def test_failed_cell_is_named_and_others_continue(tmp_path, capsys, monkeypatch):
    original = loop.carry_out

    def fail(job, *others, **how):
        outcome = original(job, *others, **how)
        if job.algorithm.rate == 0.1:
            (job.out / "summary.json").unlink()
            raise RunError("iteration 2: loss is not a number")
        return outcome

    monkeypatch.setattr(loop, "carry_out", fail)
    file = tmp_path / "guess.toml"
    file.write_text(FILE.replace("{short = 16, long = 32}", "16"))
    assert main(["study", str(file), "--out", str(tmp_path / "out")]) == 0
    text = capsys.readouterr().out
    assert f"{GUESSER} tenth on CartPole-v1: iteration 2: loss is not a number" in text
    assert "runs have not ended" in text and "| CartPole-v1 | " in text
    assert main(["study", str(file), "--out", str(tmp_path / "out")]) == 0
    again = capsys.readouterr().out
    assert again.count("failed before: remove ") == 1 and "already done" in again


def test_cell_that_cannot_be_traced_does_not_stop_the_others(tmp_path, capsys, monkeypatch):
    """It is not marked as failed, so that the same command tries it again when it has been corrected."""
    original = own.Guesser.iterate
    monkeypatch.setattr(own.Guesser, "iterate", lambda self, state: original(self, state)[self.rate == 0.1 :])
    file = tmp_path / "guess.toml"
    file.write_text(ONE.replace("{short = 16, long = 32}", "16") + "[variants.half]\n")
    words = ["study", str(file), "--out", str(tmp_path / "out")]
    assert main(words) == 0
    text = capsys.readouterr().out
    assert "failed: Guesser.iterate returned tuple: return (state, metrics)" in text
    assert f"{GUESSER} tenth on CartPole-v1 is left out" in text and "| CartPole-v1 | " in text
    monkeypatch.setattr(own.Guesser, "iterate", original)
    assert main(words) == 0
    text = capsys.readouterr().out
    assert text.count("already done") == 1 and "left out" not in text


def test_further_variant_keeps_the_name_of_the_first():
    one, two = ({**BASE, "variants": {name: {} for name in names}} for names in (["wide"], ["wide", "deep"]))
    assert [cell.name for cell in study_of(one).cells] == ["CartPole_v1-ppo_wide"]
    assert [cell.name for cell in study_of(two).cells] == ["CartPole_v1-ppo_wide", "CartPole_v1-ppo_deep"]


BASE = {"algorithms": ["ppo"], "environments": ["CartPole-v1"], "total_steps": 1000}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"algorithm": ["ppo"]}, "unknown setting of a study 'algorithm': did you mean 'algorithms'?"),
        ({"algorithms": "ppo"}, 'give a list of names, such as algorithms = ["ppo"]'),
        ({"algorithms": []}, "algorithms = []: give a list of names"),
        ({"environments": ["A", "A"]}, "environments contains A twice: name it once"),
        ({"environments": ["a:b", "a_b"]}, "would both be in a_b-ppo: rename one of them"),
        ({"total_steps": 0}, "total_steps = 0: give a whole number of at least 1"),
        ({"total_steps": {"a b": 1}}, "a budget 'a b': use letters and digits"),
        ({"total_steps": {"short": "x"}}, "total_steps.short = 'x': give a whole number"),
        ({"seeds": True}, "seeds = True: give a whole number of at least 1"),
        (
            {"settings": {"num_seeds": 3}},
            "settings has num_seeds, which is not a setting of a cell: use seeds",
        ),
        ({"settings": {"total_timesteps": 8}}, "settings has total_timesteps, which is not a"),
        ({"settings": {"environment": "Walk"}}, "is not a setting of a cell: use environments"),
        ({"settings": {"help": True}}, "settings has help, which is not a setting of a cell: use fdg train"),
        ({"settings": {"show-preset": True}}, "settings has show_preset, which is not a setting of a cell"),
        (
            {"variants": {"a": {"learning_rate": 0.1, "learning-rate": 0.2}}},
            "variants.a has learning_rate and learning-rate, which are one setting: leave out one of them",
        ),
        ({"settings": {"sweep": "x"}}, "use fdg train instead of a study"),
        ({"settings": 3}, "settings = 3: it must be a table of flags"),
        ({"settings": {"hidden": [[1]]}}, "settings.hidden = [[1]]: give a number, a text"),
        ({"settings": {"hidden": [True]}}, "settings.hidden = [True]: give a number, a text"),
        ({"variants": {}}, "variants must be tables, such as [variants.wide]"),
    ],
)
def test_errors_in_the_file(content, message):
    with pytest.raises(ValueError) as error:
        study_of({**BASE, **content})
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "words", "message"),
    [
        (None, ["none.toml"], "none.toml: there is no such file"),
        ("a = ", ["s.toml"], "s.toml is not TOML"),
        (FILE.replace(GUESSER, "pqo"), ["s.toml"], "pqo half on CartPole-v1: unknown algorithm 'pqo'"),
        (FILE.replace("rate", "rat"), ["s.toml"], "on CartPole-v1: unknown flag '--rat'"),
        (FILE.replace("short = 16", "short = 1"), ["s.toml"], "give at least 8"),
        (FILE, ["s.toml", "--out", "s.toml"], "cannot be written"),
        (FILE, [], "FILE"),
    ],
)
def test_errors_before_training(tmp_path, monkeypatch, capsys, text, words, message):
    monkeypatch.chdir(tmp_path)
    if text is not None:
        (tmp_path / "s.toml").write_text(text)
    assert message in refused(capsys, ["study", *words], main)
    assert not (tmp_path / "runs").exists()


def test_all_algorithms_fit_the_environment():
    cells = study_of({**BASE, "algorithms": "all", "environments": ["Pendulum-v1"]}).cells
    names = [cell.algo for cell in cells]
    assert "sac" in names and "ppo" in names and "dqn" not in names
    assert "bc" not in names and "iql" not in names  # offline algorithms
