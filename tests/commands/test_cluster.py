"""The command line: `--policy auto`, `--cluster`, `python -m fdg.calibrate`, and their errors."""

import json
import os

import pytest

from fdg.commands.calibrate_machine import main as calibrate_main
from fdg.commands.cli import plan_main, train_main
from fdg.costs import machine
from tests.refusing import refused

CLUSTER = """
hosts = 8
devices_per_host = 8
kind = "$x^{$"
price = 2.5
straggling = 0.02
failures_per_device_hour = 1e-3
[kinds."$x^{$"]
like = "H100"
"""


@pytest.fixture(autouse=True)
def _home(tmp_path, monkeypatch, host_devices):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def cluster(tmp_path):
    path = tmp_path / "cluster.toml"
    path.write_text(CLUSTER)
    return str(path)


def test_plan_with_policy_auto(capsys):
    words = "--algo tests.tiny:Pupil --num-envs 64 --policy auto --devices 8 --max-staleness 1"
    assert plan_main(words.split()) == 0
    text = capsys.readouterr().out
    assert "candidates in" in text and "chosen: " in text and "places Pupil on 8 devices" in text


def test_train_and_resume_with_policy_auto(capsys, tmp_path, predictions):
    out = tmp_path / "run"
    words = (
        f"--algo tests.tiny:Pupil --policy auto --devices 2 --total-steps 64 --eval-episodes 0 --out {out}"
    )
    assert train_main(words.split()) == 0
    assert "chosen: " in capsys.readouterr().out
    config, summary = (json.loads((out / name).read_text()) for name in ("config.json", "summary.json"))
    assert config["policy_asked"] == "auto" and config["policy"] != "auto"
    assert summary["predicted_s"] > 0 and summary["iteration_s"] > 0
    assert class_name_of(summary["policy"]) in ("GPUOnly", "MultiLearner", "SingleLearnerCoarse", "Central")
    assert train_main(f"--resume {out} --algo tests.tiny:Pupil --total-steps 72".split()) == 0
    text = capsys.readouterr().out
    assert "resuming at iteration 8 of 9" in text and "chosen: " not in text
    assert json.loads((out / "config.json").read_text())["policy"] == config["policy"]
    assert json.loads((out / "summary.json").read_text())["policy"] == summary["policy"]


def class_name_of(policy):
    return policy.partition("(")[0]


@pytest.mark.parametrize("seeds", ["", " --num-seeds 2"])
def test_auto_measure_times_the_best(capsys, tmp_path, seeds):
    words = (
        "--algo tests.tiny:Pupil --policy auto:measure --devices 2 --total-steps 16 --eval-episodes 0" + seeds
    )
    assert train_main([*words.split(), "--out", str(tmp_path / "run")]) == 0
    assert "per iteration measured" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--policy auto --staleness 1", "use --max-staleness 1"),
        ("--policy auto --max-staleness -1", "max_staleness=-1"),
        ("--policy auto --learners 2", "unknown flag '--learners' under --policy auto"),
        ("--policy gpu_only --max-staleness 1", "unknown flag '--max-staleness'"),
        ("--policy auto --may-change env", "'env' must be one of shuffle, precision"),
        ("--policy autom", "did you mean"),
        ("--scale 8", "give the cluster's file"),
        ("--cluster nowhere.toml", "nowhere.toml"),
        ("--cluster {cluster} --scale 8,65", "the cluster has 64 devices: use 1 to 64, or set hosts = 9 in"),
        ("--cluster {cluster} --scale 12", "not a whole number of hosts of 8: use 8 or 16"),
        ("--cluster {cluster} --devices -4", "--devices -4: the cluster has"),
        ("--cluster {cluster} --devices 0", "--devices 0: the cluster has 64 devices: use 1 to 64"),
        ("--cluster {cluster} --compare gpu_olny", "did you mean 'gpu_only'"),
        ("--cluster {cluster} --parameters fsdp --compare auto", "auto: this policy has no --parameters"),
        ("--cluster {cluster} --parameters fsdp --sensitivity true", "leave out --parameters"),
        ("--cluster {cluster} --scale none5", "not"),
    ],
)
def test_errors(capsys, cluster, words, message):
    line = refused(capsys, f"--algo tests.tiny:Pupil {words}".replace("{cluster}", cluster), plan_main)
    assert message in line, line


def test_more_devices_than_two_kinds_of_hosts_have(capsys, cluster):
    with open(cluster, "a") as file:
        file.write('[first]\nhosts = 4\nkind = "CPU core"\n')
    words = f"--algo tests.tiny:Pupil --cluster {cluster} --scale 97"
    assert "use 1 to 96, or set hosts = 9 in" in refused(capsys, words, plan_main)


def test_show_without_calibration(capsys):
    assert "there is no calibration" in refused(capsys, "--show", calibrate_main)


@pytest.mark.parametrize("kind", ["pipe", "link", "file"])
def test_calibration_is_written_into_pipes_and_links(kind, tmp_path, monkeypatch):
    """Writes into a pipe and through a link: replacing the path would, as root, destroy /dev/null."""
    here = machine.fingerprint("cpu")
    found = machine.Calibration(here, machine.UNCALIBRATED_CPU, machine.SHARED_MEMORY, machine.SOCKETS, 2)
    monkeypatch.setattr("fdg.commands.calibrate_machine.calibrate", lambda *_: found)
    out, target = tmp_path / "out", tmp_path / "target"
    target.write_text("before")
    if kind == "pipe":
        os.mkfifo(out)
        reader = os.open(out, os.O_RDONLY | os.O_NONBLOCK)
    elif kind == "link":
        out.symlink_to(target)
    assert calibrate_main(["--out", str(out)]) == 0
    text = os.read(reader, 1 << 16).decode() if kind == "pipe" else out.read_text()
    assert json.loads(text) == json.loads(json.dumps(found.as_json()))
    assert out.is_fifo() == (kind == "pipe") and out.is_symlink() == (kind == "link")
    assert (target.read_text() == "before") == (kind != "link")
    assert {path.name for path in tmp_path.iterdir()} == {"out", "target"}
    if kind == "pipe":
        os.close(reader)


def test_unwritable_calibration(capsys, tmp_path):
    (tmp_path / "file").write_text("")
    assert "cannot be written" in refused(capsys, f"--out {tmp_path / 'file' / 'x.json'}", calibrate_main)


def test_none_stands_for_a_flag_that_is_not_given(capsys, cluster):
    words = "--algo tests.tiny:Pupil --num-envs 64 --policy gpu_only"
    assert plan_main(f"{words} --cluster {cluster} --devices none --scale none".split()) == 0
    assert " 64  GPUOnly" in capsys.readouterr().out  # all devices of the cluster
    assert plan_main(f"{words} --cluster none --devices 2".split()) == 0
    assert "places Pupil on 2 devices" in capsys.readouterr().out
    assert "--scale needs --cluster FILE" in refused(capsys, f"{words} --cluster none --scale 8", plan_main)


LANGUAGE = "--algo sft --env text:addition --model-parallel 1 --scale 4 --cluster"


def test_compare_with_policy_fields(capsys, cluster):
    words = f"{LANGUAGE} {cluster} --policy colocated --parameters fsdp --compare colocated,gpu_only"
    assert plan_main(words.split()) == 0
    text = capsys.readouterr().out
    assert "GPUOnly(parameters='fsdp')" in text and "collectives of all are estimated" in text


def test_plan_a_model_without_weights(capsys, tmp_path):
    from algos.language.config import DecoderConfig

    tiny = DecoderConfig.tiny(64).to_hugging_face()
    (tmp_path / "config.json").write_text(json.dumps(tiny))
    words = f"--algo sft --env text:addition --devices 1 --model {tmp_path}"
    assert "has no tokenizer" in refused(capsys, words, plan_main)
    words += " --tokenizer characters"
    assert plan_main(words.split()) == 0
    assert "places SFT on 1 device" in capsys.readouterr().out
    assert "has neither model.safetensors" in refused(capsys, words, train_main)
    assert "less than one iteration of" in (line := refused(capsys, "--algo sft --total-steps 1", train_main))
    assert "demonstrations: give at least" in line
