"""`fdg codesign FILE.toml`: a whole search, and what is said of wrong inputs."""

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


def small_network(path):
    onnx.save(resnet.onnx_model(32, 1, (4,), 10), path)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small_network(tmp_path / "two.onnx")
    (tmp_path / "p.toml").write_text(TOML)
    return tmp_path


FLAGS = "--algo a2c --num-envs 8 --num-steps 11 --hidden 8 --policy gpu_only --devices 1 --samples 40".split()


def test_a_search_writes_what_it_found_and_says_what_cannot_be_met(folder, capsys, monkeypatch):
    kept, run = [], searching.run
    monkeypatch.setattr(searching, "run", lambda job: kept.append(run(job)) or kept[-1])
    assert command.main(["p.toml", *FLAGS, "--out", "run"]) == command.INFEASIBLE
    said = capsys.readouterr().out
    assert (
        "NO DESIGN MEETS THE SPECS" in said
        and "(a formula, NOT MEASURED)" in said
        and "two: 0.7500 (as its file says)" in said
    )
    assert "ABOVE the spec of 0.001 us" in said and "within the spec of 100,000 uJ" in said
    assert " designs, " in said and "none meets the specs yet; the nearest exceeds them by" in said
    names = {"report.md", "best.json", "designs.csv", "zigzag.yaml", "zigzag-mapping.yaml", "maestro.m"}
    assert names | set(pictures.NAMES) <= {path.name for path in Path("run").iterdir()}
    best = json.loads(Path("run/best.json").read_text())
    assert best["meets_specs"] is False and best["samples"] >= 40 and best["specs"]["area_mm2"] is None
    assert best["design"]["accuracy two"] == 0.75
    assert sum(row["macs"] for row in best["layers"]) > 0 and best["design"]["area_mm2"] > 0
    with Path("run/designs.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert rows[0]["is_best"] == "True" and {row["is_best"] for row in rows[1:]} <= {"False"}
    assert [int(rows[0]["latency_cycles"])] == [best["design"]["latency_cycles"]]
    monkeypatch.setattr(pictures, "draw", lambda *_: [])
    monkeypatch.setattr(searching, "least_of_each", lambda problem: kept[0].least)
    # A resumed search that is complete reports again, the same design; its files and it may be moved.
    assert {path.name for path in Path("run/data").iterdir()} == {"path.toml", "onnx2.onnx"}
    there = (folder / "elsewhere").resolve()
    there.mkdir()
    for name in ("run", "p.toml", "two.onnx"):
        Path(name).rename(there / name)
    monkeypatch.chdir(there)
    assert command.main(["--resume", "run"]) == command.INFEASIBLE
    again = json.loads(Path("run/best.json").read_text())
    assert again["design"] == best["design"] and again["layers"] == best["layers"]
    loaded = fdg.load("run").algorithm.env
    assert loaded.problem == kept[0].problem and loaded.problem.files["onnx2"] == "run/data/onnx2.onnx"
    # A file that has changed since is another problem.
    Path("two.onnx").rename(folder / "two.onnx")
    Path("p.toml").write_text(TOML.replace("100_000", "90_000"))
    Path("p.toml").rename(folder / "p.toml")
    capsys.readouterr()
    assert command.main([str(folder / "p.toml"), "--resume", "run", "--samples", "80"]) == 2
    said = capsys.readouterr().err
    assert (
        "p.toml has changed since the run in run began: put the copy run/data/path.toml in its place" in said
    )
    for path in Path("run/data").iterdir():
        path.unlink()
    (folder / "p.toml").unlink()
    assert command.main(["--resume", "run"]) == 2
    said = capsys.readouterr().err
    assert "run/config.json names " in said and "p.toml, which does not exist: restore it" in said
    # The same design under other specs.
    searched = kept[1]
    met = dataclasses.replace(searched.problem, specs=Specs(1e9, 1e12, 1e3))
    meets = searched.best._replace(violation=np.float32(0))
    said = str(dataclasses.replace(searched, problem=met, best=meets, least=None))
    assert ": meets the specs\n" in said and "ABOVE" not in said and "% of it" in said
    nothing = searched.best._replace(violation=np.float32(np.inf))
    with pytest.raises(FdgError, match=r"no design is complete after .* give more"):
        dataclasses.replace(searched, best=nothing).write("nowhere")


def file(old, new, says, *words):
    """A file in which something is changed."""
    assert old in TOML
    return TOML.replace(old, new), ["p.toml", *words], None, says


def words(says, *given):
    return TOML, list(given), None, says


def before(call, says, name="p.toml"):
    return TOML, [name], call, says


UNET, ONNX = 'space = "unet"\nsize = 16\nwidth = 1', 'onnx = "two.onnx"'
MODULE = 'module = "os:abort"'
# What the file says, the words, what is done before, and what of the line has to be there.
WRONG = {
    "no file": words("name the problem first: fdg codesign FILE.toml"),
    "flags first": words("name the problem first", "--samples", "10", "p.toml"),
    "a file that is not there": words("q.toml: there is no such file", "q.toml"),
    "two files": words("'q.toml' after 'p.toml': give one problem", "p.toml", "q.toml"),
    "no images": file('"surrogate"', '"table"', "task has no images: write data = followed by one of digits"),
    "a folder": before(
        lambda: Path("d.toml").mkdir(), "d.toml: is a directory: give a regular file", "d.toml"
    ),
    "an unknown workload": words("unknown workload 'w4'", "w4"),
    "no TOML": file("[budget]", "[budget", "p.toml is not TOML: "),
    "a number of 5,000 digits": file("pes = 64", f"pes = {'6' * 5000}", "p.toml is not TOML: "),
    "an unknown table": file("[budget]", "[budgets]", "unknown key 'budgets': did you mean budget?"),
    "an unknown key": file("dram_gb_s", "dram_gbs", "did you mean dram_gb_s?"),
    "an unknown spec": file("energy_uj", "energy_uJ", "did you mean energy_uj?"),
    "no unit": file("energy_uj", "energy", "its unit is missing: write energy_pj or energy_nj"),
    "a negative spec": file("100_000", "-1", "energy_uj is -1; give a number above 0"),
    "a spec twice": file("energy_uj", "latency_us", "second value of latency_cycles: leave one out"),
    "a template that is none": file('"shi"', '"shy"', "did you mean 'shi'?"),
    "no template": file('["dla", "shi"]', "[]", "templates is []; give a list of names"),
    "PEs below 0": file("[0, 32, 64]", "[-32]", "none below 0"),
    "PEs above the budget": file("[0, 32, 64]", "[0, 128]", "is in the budget of 64 PEs"),
    "too little bandwidth": file("bandwidth_gb_s = 16", "bandwidth_gb_s = 12", "give smaller options"),
    "a budget as text": file("pes = 64", 'pes = "64"', "pes is '64'; give a whole number"),
    "no task": file(TOML[TOML.index("[[task]]") :], "", "write one [[task]] for each network"),
    "one name twice": file('"two"', '"one"', "two tasks are called 'one'"),
    "an unknown space": file('"unet"', '"unit"', "did you mean 'unet'?"),
    "two networks": file(ONNX, ONNX + '\nspace = "unet"', "both space and onnx: write one of"),
    "no network": file(UNET, "", "[task 1] has no network: write one of space, network, onnx"),
    "an accuracy above 1": file("0.75", "75", "accuracy is 75; give a number from 0 to 1"),
    "an unknown source": file('"surrogate"', '"guess"', "[accuracy] source 'guess' (known: supernet"),
    "ONNX that is not there": file("two.onnx", "2.onnx", "2.onnx: there is no such file"),
    "no ONNX": before(lambda: Path("two.onnx").write_bytes(b"\0\1"), "cannot be read as ONNX"),
    "a module by a file": file(ONNX, MODULE, "also pass --module os:abort"),
    "another module": file(ONNX, MODULE, "also pass --module os:abort", "--module", "os:kill"),
    "no module": file(ONNX, 'module = "mine_42:net"', "there is no module 'mine_42'", "--trust"),
    "no input": file(ONNX, 'module = "math:sin"', "input = [1, 224, 224, 3]", "--module", "math:sin"),
    "an input of ONNX": file(ONNX, ONNX + "\ninput = [1, 3]", "onnx is given: leave input out"),
    "no samples": words("--samples 0: it must be at least 1", "p.toml", "--samples", "0"),
    "samples as words": words("'many' is not an integer", "p.toml", "--samples", "many"),
    "an unknown flag": words("did you mean '--policy'?", "p.toml", "--polcy", "central"),
    "an unknown algorithm": words("did you mean 'ppo'?", "p.toml", "--algo", "pppo"),
    "a level that is none": words("did you mean 'tight'?", "p.toml", "--specs", "tigth"),
    "numbers as a level": words("--energy-uj 2", "p.toml", "--specs", "latency_ms=0.003,energy_uj=2"),
    "a level and a number": words("leave one out", "w1", "--specs", "tight", "--latency-ms", "3"),
    "a spec of no unit": words("did you mean", "p.toml", "--latency", "3"),
    "a spec below 0": words("energy_uj is -1.0; give a number above 0", "p.toml", "--energy-uj", "-1"),
    "a level it lacks": words("write [specs.tight] in its file", "p.toml", "--specs", "tight"),
    "another environment": words("--env is not a flag of fdg codesign", "p.toml", "--env", "CartPole-v1"),
    "steps": words("not a flag of fdg codesign: give --samples", "p.toml", "--total-steps", "99"),
    "a sweep": words("not a flag of fdg codesign: use fdg train", "p.toml", "--sweep", "seed=1,2"),
    "no run": words("absent", "--resume", "absent"),
    "specs of a run": words("a resumed search keeps its settings", "--resume", "run", "--specs", "tight"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_input_is_one_line_with_the_fix(case, folder, capsys):
    text, given, call, says = WRONG[case]
    Path("p.toml").write_text(text)
    if call is not None:
        call()
    assert command.main(given) == 2
    said = capsys.readouterr()
    assert says in said.err and said.err.startswith("error: ") and said.err.count("\n") == 1
    assert not said.out


def test_help_lists_its_flags_and_the_package_registers_it(capsys):
    assert command.main(["--help"]) == 0
    said = capsys.readouterr().out
    assert "--samples" in said and "--specs" in said and "Exit status 3" in said
    points = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"][
        "entry-points"
    ]
    for value in points["fdg.commands"].values():
        module, _, function = value.partition(":")
        assert getattr(importlib.import_module(module), function) is command.main


def product(inputs):
    return inputs @ jnp.ones((8, 4))


def test_a_search_with_a_module_goes_on_where_that_is_named(folder, capsys, monkeypatch):
    module = f"{__name__}:product"
    text = TOML.replace('onnx = "two.onnx"', f'module = "{module}"\ninput = [1, 8]')
    (folder / "p.toml").write_text(text)
    jobs, found = [], types.SimpleNamespace(caught=1, is_feasible=True, path="run")
    found.best = types.SimpleNamespace(violation=math.inf)  # nothing is searched here
    monkeypatch.setattr(searching, "run", lambda job: jobs.append(job) or found)
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

    def refuses(job):
        raise FdgError("--total-steps asks for 2: give a larger --total-steps")

    monkeypatch.setattr(searching, "run", refuses)
    assert command.main(["--resume", "run", "--module", module, "--samples", "16"]) == 2
    assert "--samples asks for 2: give a larger --samples" in capsys.readouterr().err


def test_a_run_of_another_kind_is_no_search(folder, capsys):
    words = "--algo tests.tiny:Walk --total-steps 16 --devices 1 --out run"
    assert train_main(words.split()) == 0
    for more in [], ["--samples", "100"]:
        assert command.main(["--resume", "run", "--trust", *more]) == 2
        said = capsys.readouterr().err
        assert "run is a run of tests.tiny:Walk, not a search: fdg train --resume run" in said


@pytest.mark.whole
def test_two_processes_find_what_one_finds(folder):
    """Real processes, one host device each; both end with the status of the search."""
    words = [word for word in FLAGS if word not in ("--devices", "1")]
    address = f"localhost:{ports.free_port('localhost')}"
    triple = ["--coordinator-address", address, "--num-processes", "2", "--process-id"]
    begin = [sys.executable, "-m", "envs.codesign", "p.toml", *words, "--out"]
    more = {"env": {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(Path(__file__).parents[2])}}
    both = [subprocess.Popen([*begin, "both", *triple, str(i)], **more) for i in range(2)]
    assert [one.wait(timeout=300) for one in both] == [command.INFEASIBLE] * 2
    assert subprocess.run([*begin, "alone", "--devices", "1"], check=False, **more).returncode == 3
    best = [json.loads(Path(run, "best.json").read_text()) for run in ("both", "alone")]
    assert best[0]["design"] == best[1]["design"] and best[0]["layers"] == best[1]["layers"]
