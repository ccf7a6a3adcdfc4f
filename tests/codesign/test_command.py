"""`fdg codesign FILE.toml`: a complete search, and error messages for invalid inputs."""

import csv
import dataclasses
import importlib
import json
import math
import os
import subprocess
import sys
import tomllib
import types
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import onnx
import pytest

import fdg
from envs.codesign import command, pictures, searching
from envs.codesign.problem import Specs
from fdg.commands.cli import train_main
from fdg.errors import FdgError
from fdg.processes import ports
from tests.codesign import resnet

TOML = """
[budget]
pes = 64
bandwidth_gb_s = 16
templates = ["dla", "shi"]
[chip]
pes = [0, 32, 64]
bandwidth_gb_s = [8]
buffer_kb = [8, 16]
dram_gb_s = 4
[specs]
latency_ms = 1e-6
energy_uj = 100_000
[accuracy]
source = "surrogate"
[[task]]
name = "one"
space = "unet"
size = 16
width = 1
weight = 0.5
[[task]]
name = "two"
onnx = "two.onnx"
accuracy = 0.75
"""


def write_small_network(path):
    onnx.save(resnet.onnx_model(32, 1, (4,), 10), path)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_small_network(tmp_path / "two.onnx")
    (tmp_path / "p.toml").write_text(TOML)
    return tmp_path


FLAGS = "--algo a2c --num-envs 8 --num-steps 11 --hidden 8 --policy gpu_only --devices 1 --samples 40".split()


def test_search_report_and_resume(folder, capsys, monkeypatch):
    results, run = [], searching.run
    monkeypatch.setattr(searching, "run", lambda *arguments: results.append(run(*arguments)) or results[-1])
    assert command.main(["p.toml", *FLAGS, "--out", "run"]) == command.INFEASIBLE
    output = capsys.readouterr().out
    assert (
        "NO DESIGN MEETS THE SPECS" in output
        and "(a formula, NOT MEASURED)" in output
        and "two: 0.7500 (as its file says)" in output
    )
    assert "ABOVE the spec of 0.001 us" in output and "within the spec of 100,000 uJ" in output
    assert " designs, " in output and "none meets the specs yet; the nearest exceeds them by" in output
    names = {"report.md", "best.json", "designs.csv", "zigzag.yaml", "zigzag-mapping.yaml", "maestro.m"}
    assert names | set(pictures.NAMES) <= {path.name for path in Path("run").iterdir()}
    best = json.loads(Path("run/best.json").read_text())
    assert best["meets_specs"] is False and best["samples"] >= 40 and best["specs"]["area_mm2"] is None
    assert best["design"]["accuracy two"] == 0.75
    assert sum(row["macs"] for row in best["layers"]) > 0 and best["design"]["area_mm2"] > 0
    with Path("run/designs.csv").open() as csv_file:
        rows = list(csv.DictReader(csv_file))
    assert rows[0]["is_best"] == "True" and {row["is_best"] for row in rows[1:]} <= {"False"}
    assert [int(rows[0]["latency_cycles"])] == [best["design"]["latency_cycles"]]
    monkeypatch.setattr(pictures, "draw", lambda *_: [])
    monkeypatch.setattr(searching, "least_of_each", lambda problem: results[0].least)
    # Resuming a complete search reports the same design again, also if it and its files were moved.
    assert {path.name for path in Path("run/data").iterdir()} == {"path.toml", "onnx2.onnx"}
    elsewhere = (folder / "elsewhere").resolve()
    elsewhere.mkdir()
    for name in ("run", "p.toml", "two.onnx"):
        Path(name).rename(elsewhere / name)
    monkeypatch.chdir(elsewhere)
    assert command.main(["--resume", "run"]) == command.INFEASIBLE
    again = json.loads(Path("run/best.json").read_text())
    assert again["design"] == best["design"] and again["layers"] == best["layers"]
    loaded = fdg.load("run").algorithm.env
    assert loaded.problem == results[0].problem and loaded.problem.files["onnx2"] == "run/data/onnx2.onnx"
    # A changed file is refused.
    Path("two.onnx").rename(folder / "two.onnx")
    Path("p.toml").write_text(TOML.replace("100_000", "90_000"))
    Path("p.toml").rename(folder / "p.toml")
    capsys.readouterr()
    assert command.main([str(folder / "p.toml"), "--resume", "run", "--samples", "80"]) == 2
    err = capsys.readouterr().err
    assert (
        "p.toml has changed since the run in run began: put the copy run/data/path.toml in its place" in err
    )
    for path in Path("run/data").iterdir():
        path.unlink()
    (folder / "p.toml").unlink()
    assert command.main(["--resume", "run"]) == 2
    output = capsys.readouterr().err
    assert "run/config.json names " in output and "p.toml, which does not exist: restore it" in output
    # The same design with other specs.
    resumed = results[1]
    feasible_problem = dataclasses.replace(resumed.problem, specs=Specs(1e9, 1e12, 1e3))
    meets = resumed.best._replace(violation=np.float32(0))
    output = str(dataclasses.replace(resumed, problem=feasible_problem, best=meets, least=None))
    assert ": meets the specs\n" in output and "ABOVE" not in output and "% of it" in output
    incomplete = resumed.best._replace(violation=np.float32(np.inf))
    with pytest.raises(FdgError, match=r"no design is complete after .* give more"):
        dataclasses.replace(resumed, best=incomplete).write("nowhere")


def edit(old, new, message, *flags):
    """A case in which `old` is replaced by `new` in the file."""
    assert old in TOML
    return TOML.replace(old, new), ["p.toml", *flags], None, message


def flags(message, *arguments):
    return TOML, list(arguments), None, message


def prepare(function, message, name="p.toml"):
    return TOML, [name], function, message


UNET_TASK, ONNX_TASK = 'space = "unet"\nsize = 16\nwidth = 1', 'onnx = "two.onnx"'
MODULE_TASK = 'module = "os:abort"'
# Name: (content of the file, command-line arguments, a function to call before, expected error message).
INVALID = {
    "no file": flags("name the problem first: fdg codesign FILE.toml"),
    "flags first": flags("name the problem first", "--samples", "10", "p.toml"),
    "a missing file": flags("q.toml: there is no such file", "q.toml"),
    "two files": flags("'q.toml' after 'p.toml': give one problem", "p.toml", "q.toml"),
    "no images": edit('"surrogate"', '"table"', "task has no images: write data = followed by one of digits"),
    "a folder": prepare(
        lambda: Path("d.toml").mkdir(), "d.toml: is a directory: give a regular file", "d.toml"
    ),
    "an unknown workload": flags("unknown workload 'w4'", "w4"),
    "no TOML": edit("[budget]", "[budget", "p.toml is not TOML: "),
    "a number of 5,000 digits": edit("pes = 64", f"pes = {'6' * 5000}", "p.toml is not TOML: "),
    "an unknown table": edit("[budget]", "[budgets]", "unknown key 'budgets': did you mean budget?"),
    "an unknown key": edit("dram_gb_s", "dram_gbs", "did you mean dram_gb_s?"),
    "an unknown spec": edit("energy_uj", "energy_uJ", "did you mean energy_uj?"),
    "no unit": edit("energy_uj", "energy", "its unit is missing: write energy_pj or energy_nj"),
    "a negative spec": edit("100_000", "-1", "energy_uj is -1; give a number above 0"),
    "a spec twice": edit("energy_uj", "latency_us", "second value of latency_cycles: leave one out"),
    "an unknown template": edit('"shi"', '"shy"', "did you mean 'shi'?"),
    "no template": edit('["dla", "shi"]', "[]", "templates is []; give a list of names"),
    "PEs below 0": edit("[0, 32, 64]", "[-32]", "none below 0"),
    "PEs above the budget": edit("[0, 32, 64]", "[0, 128]", "is in the budget of 64 PEs"),
    "too little bandwidth": edit("bandwidth_gb_s = 16", "bandwidth_gb_s = 12", "give smaller options"),
    "a budget as text": edit("pes = 64", 'pes = "64"', "pes is '64'; give a whole number"),
    "no task": edit(TOML[TOML.index("[[task]]") :], "", "write one [[task]] for each network"),
    "one name twice": edit('"two"', '"one"', "two tasks are called 'one'"),
    "an unknown space": edit('"unet"', '"unit"', "did you mean 'unet'?"),
    "two networks": edit(ONNX_TASK, ONNX_TASK + '\nspace = "unet"', "has space and onnx: write one of"),
    "no network": edit(UNET_TASK, "", "[task 1] has no network: write one of space, network, onnx"),
    "an accuracy above 1": edit("0.75", "75", "accuracy is 75; give a number from 0 to 1"),
    "an unknown source": edit('"surrogate"', '"guess"', "[accuracy] source 'guess' (known: supernet"),
    "a missing ONNX file": edit("two.onnx", "2.onnx", "2.onnx: there is no such file"),
    "no ONNX": prepare(lambda: Path("two.onnx").write_bytes(b"\0\1"), "cannot be read as ONNX"),
    "an unconfirmed module": edit(ONNX_TASK, MODULE_TASK, "also pass --module os:abort"),
    "another module": edit(ONNX_TASK, MODULE_TASK, "also pass --module os:abort", "--module", "os:kill"),
    "no module": edit(ONNX_TASK, 'module = "mine_42:net"', "there is no module 'mine_42'", "--trust"),
    "no input": edit(ONNX_TASK, 'module = "math:sin"', "input = [1, 224, 224, 3]", "--module", "math:sin"),
    "an input of ONNX": edit(ONNX_TASK, ONNX_TASK + "\ninput = [1, 3]", "onnx is given: leave input out"),
    "no samples": flags("--samples 0: it must be at least 1", "p.toml", "--samples", "0"),
    "samples as words": flags("'many' is not an integer", "p.toml", "--samples", "many"),
    "an unknown flag": flags("did you mean '--policy'?", "p.toml", "--polcy", "central"),
    "an unknown algorithm": flags("did you mean 'ppo'?", "p.toml", "--algo", "pppo"),
    "an unknown level": flags("did you mean 'tight'?", "p.toml", "--specs", "tigth"),
    "numbers as a level": flags("--energy-uj 2", "p.toml", "--specs", "latency_ms=0.003,energy_uj=2"),
    "a level and a number": flags("leave one out", "w1", "--specs", "tight", "--latency-ms", "3"),
    "a spec without unit": flags("did you mean", "p.toml", "--latency", "3"),
    "a spec below 0": flags("energy_uj is -1.0; give a number above 0", "p.toml", "--energy-uj", "-1"),
    "a level missing in the file": flags("write [specs.tight] in its file", "p.toml", "--specs", "tight"),
    "another environment": flags("--env is not a flag of fdg codesign", "p.toml", "--env", "CartPole-v1"),
    "steps": flags("not a flag of fdg codesign: give --samples", "p.toml", "--total-steps", "99"),
    "a sweep": flags("not a flag of fdg codesign: use fdg train", "p.toml", "--sweep", "seed=1,2"),
    "no run": flags("absent", "--resume", "absent"),
    "specs of a run": flags("a resumed search keeps its settings", "--resume", "run", "--specs", "tight"),
}


@pytest.mark.parametrize("case", INVALID)
def test_invalid_inputs(case, folder, capsys):
    text, arguments, prepare, message = INVALID[case]
    Path("p.toml").write_text(text)
    if prepare is not None:
        prepare()
    assert command.main(arguments) == 2
    output = capsys.readouterr()
    assert message in output.err and output.err.startswith("error: ") and output.err.count("\n") == 1
    assert not output.out


def test_help_and_entry_point(capsys):
    assert command.main(["--help"]) == 0
    output = capsys.readouterr().out
    assert "--samples" in output and "--specs" in output and "Exit status 3" in output
    entry_points = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"][
        "entry-points"
    ]
    for value in entry_points["fdg.commands"].values():
        module, _, function = value.partition(":")
        assert getattr(importlib.import_module(module), function) is command.main


def product(inputs):
    return inputs @ jnp.ones((8, 4))


def test_resume_of_a_search_with_a_module(folder, capsys, monkeypatch):
    module = f"{__name__}:product"
    text = TOML.replace('onnx = "two.onnx"', f'module = "{module}"\ninput = [1, 8]')
    (folder / "p.toml").write_text(text)
    jobs, fake_result = [], types.SimpleNamespace(caught=1, is_feasible=True, path="run")
    fake_result.best = types.SimpleNamespace(violation=math.inf)  # no search runs here
    monkeypatch.setattr(searching, "run", lambda job, *_: jobs.append(job) or fake_result)
    assert command.main(["p.toml", *FLAGS, "--module", module, "--out", "run"]) == 129
    assert jobs[0].described["env"].endswith(f"p.toml?module={module}")
    Path("run").mkdir()
    Path("run/config.json").write_text(json.dumps({"id": "0", **jobs[0].config}))
    assert command.main(["--resume", "run", "--module", module]) == 129
    assert jobs[1].described["env"] == jobs[0].described["env"] and jobs[1].resumes
    capsys.readouterr()
    assert command.main(["--resume", "run"]) == 2
    assert f"pass --module {module} too" in capsys.readouterr().err
    assert command.main(["--resume", "run", "--module", "os:abort"]) == 2
    assert "--module os:abort: a resumed search keeps its settings" in capsys.readouterr().err

    def refuses(*_):
        raise FdgError("--total-steps asks for 2: give a larger --total-steps")

    monkeypatch.setattr(searching, "run", refuses)
    assert command.main(["--resume", "run", "--module", module, "--samples", "16"]) == 2
    assert "--samples asks for 2: give a larger --samples" in capsys.readouterr().err


def test_resume_of_another_kind_of_run_is_refused(folder, capsys):
    flags = "--algo tests.tiny:Walk --total-steps 16 --devices 1 --out run"
    assert train_main(flags.split()) == 0
    for options in [], ["--samples", "100"]:
        assert command.main(["--resume", "run", "--trust", *options]) == 2
        output = capsys.readouterr().err
        assert "run is a run of tests.tiny:Walk, not a search: fdg train --resume run" in output


@pytest.mark.whole
def test_two_processes_find_the_same_design(folder):
    """Two processes, each with one host device; both exit with the status of the search."""
    flags = [word for word in FLAGS if word not in ("--devices", "1")]
    address = f"localhost:{ports.free_port('localhost')}"
    distributed = ["--coordinator-address", address, "--num-processes", "2", "--process-id"]
    search = [sys.executable, "-m", "envs.codesign", "p.toml", *flags, "--out"]
    options = {"env": {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(Path(__file__).parents[2])}}
    processes = [subprocess.Popen([*search, "both", *distributed, str(i)], **options) for i in range(2)]
    assert [one.wait(timeout=300) for one in processes] == [command.INFEASIBLE] * 2
    assert subprocess.run([*search, "alone", "--devices", "1"], check=False, **options).returncode == 3
    best = [json.loads(Path(run, "best.json").read_text()) for run in ("both", "alone")]
    assert best[0]["design"] == best[1]["design"] and best[0]["layers"] == best[1]["layers"]
