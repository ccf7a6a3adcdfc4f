"""Checkpoints: whole, atomic, readable on other devices; a killed run goes on bit for bit."""

import logging
import os
import random
import resource
import shutil
import subprocess
import sys
import time
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import fdg
from fdg.commands.cli import train_main
from fdg.commands.parse import parse
from fdg.errors import FdgError, FdgWarning, RunError
from fdg.training.checkpoint import KEEP, Checkpoints
from fdg.training.settling import available_devices
from tests.refusing import refused, refuses
from tests.training.trained import assert_same, timeless

WALK = ["--algo", "tests.tiny:Walk", "--devices", "1"]


def split(devices, count, axis="d"):
    return NamedSharding(jax.sharding.Mesh(np.array(devices[:count]), (axis,)), PartitionSpec(axis))


def every_kind_of_array(sharding, whole):
    put = lambda x, where=whole: jax.device_put(x, where)  # noqa: E731
    return {
        "split": put(jnp.arange(8.0), sharding),
        "keys": put(jax.random.split(jax.random.key(3), 8), sharding),
        "key": put(jax.random.key(5, impl="rbg")),
        "nested": [(put(jnp.int32(-7)), put(jnp.uint8(200))), {"bool": put(jnp.array([True, False]))}],
        "half": put(jnp.array([1.5, jnp.nan], jnp.bfloat16)),
        "nothing": put(jnp.zeros((0, 4))),
        "a/b": put(jnp.float32(1)),
        "a": {"b": put(jnp.float32(2))},
        "empty": (),
    }


def shapes(state):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


def test_a_checkpoint_of_another_precision_says_how_to_set_it(tmp_path):
    with jax.enable_x64(True):
        wide = {"x": jnp.zeros(64), "n": jnp.zeros((), int)}
        narrow = jax.tree.map(lambda x: x.astype(x.dtype.name.replace("64", "32")), wide)
    for stored, target, said in (
        (wide, narrow, "int64[] in the checkpoint and int32[] here: set JAX_ENABLE_X64=1"),
        (narrow, wide, "int32[] in the checkpoint and int64[] here: set JAX_ENABLE_X64=0"),
        (wide, {**wide, "n": narrow["x"]}, "float32[64] here"),
    ):
        checkpoints = Checkpoints(tmp_path / said[:5] / str(len(said)))
        checkpoints.save(1, stored)
        checkpoints.close()
        with refuses(said):
            checkpoints.restore(1, shapes(target))


def test_every_kind_of_array_comes_back_on_other_devices(tmp_path, devices):
    whole = NamedSharding(jax.sharding.Mesh(np.array(devices), ("d",)), PartitionSpec())
    state = every_kind_of_array(split(devices, 8), whole)
    checkpoints = Checkpoints(tmp_path / "runs" / "checkpoints")
    assert checkpoints.latest() is None and not (tmp_path / "runs" / "checkpoints").exists()
    checkpoints.save(4, state)
    checkpoints.close()
    two = split(devices, 2)
    target = shapes(every_kind_of_array(two, jax.sharding.SingleDeviceSharding(devices[1])))
    restored = Checkpoints(tmp_path / "runs" / "checkpoints").restore(4, target)
    assert_same(restored, state)
    assert restored["split"].sharding == two and restored["keys"].sharding.device_set == two.device_set
    assert restored["half"].devices() == restored["nothing"].devices() == {devices[1]}
    assert jax.random.key_impl(restored["key"]) == jax.random.key_impl(state["key"])


def test_a_state_may_be_donated_as_soon_as_save_returns(tmp_path, devices):
    step = jax.jit(lambda x: x + 1.0, donate_argnums=0)
    checkpoints = Checkpoints(tmp_path)
    state = jax.device_put(jnp.zeros(2**20), devices[0])
    target = shapes(state)
    for iteration in range(3):
        checkpoints.save(iteration, state)
        for _ in range(5):
            state = step(state)
    checkpoints.close()
    for iteration in range(3):
        restored = np.asarray(Checkpoints(tmp_path).restore(iteration, target))
        assert (restored == 5.0 * iteration).all()


def test_the_newest_few_are_kept(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    for iteration in (1, 5, 9, 10, 30):
        checkpoints.save(iteration, {"x": jnp.float32(iteration)})
    checkpoints.close()
    assert sorted(int(path.name) for path in tmp_path.iterdir()) == [9, 10, 30][-KEEP:]
    assert Checkpoints(tmp_path).latest() == 30


@pytest.fixture
def two(tmp_path):
    """A directory of two checkpoints, their state, and the files of the newer one."""
    state = {"x": jax.random.normal(jax.random.key(0), (1000,))}
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, state)
    checkpoints.save(2, state)
    checkpoints.close()
    return tmp_path, state, [path for path in (tmp_path / "2").rglob("*") if path.is_file()]


DAMAGES = {
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "removed": lambda path: path.unlink(),
    "grown": lambda path: path.write_bytes(path.read_bytes() + b" "),
    "another beside it": lambda path: path.with_name("more").write_bytes(b""),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_refused_and_the_one_before_is_taken(two, damage):
    directory, state, files = two
    for path in files:
        before = path.read_bytes()
        DAMAGES[damage](path)
        with refuses(match=r"/2 is damaged \(.*\): go on from iteration 1"):
            Checkpoints(directory).restore(2, shapes(state))
        with pytest.warns(
            FdgWarning, match=r"/2 is damaged .*: it is not used, going on from iteration 1"
        ) as warned:
            assert Checkpoints(directory).latest() == 1
        assert [one.filename for one in warned] == [__file__]  # whose line it is that asked
        path.write_bytes(before)
        path.with_name("more").unlink(missing_ok=True)
    assert_same(Checkpoints(directory).restore(2, shapes(state)), state)
    assert_same(Checkpoints(directory).restore(1, shapes(state)), state)


def test_no_bit_flips_unnoticed(two):
    """One bit at a random place of every file."""
    directory, _, files = two
    draw = random.Random(0)
    for path in files:
        for _ in range(5):
            content = path.read_bytes()
            at = draw.randrange(len(content))
            path.write_bytes(
                content[:at] + bytes([content[at] ^ (1 << draw.randrange(8))]) + content[at + 1 :]
            )
            assert Checkpoints(directory).damage(2) is not None, (path, at)
            path.write_bytes(content)
    assert Checkpoints(directory).damage(2) is None


def test_where_all_are_damaged_nothing_starts_anew(two):
    directory, _, _ = two
    for iteration in (1, 2):
        (directory / str(iteration) / "manifest.json").unlink()
    with pytest.raises(
        FdgError, match=r"has no manifest.json.*, and so is every other checkpoint.*from a copy"
    ):
        Checkpoints(directory).latest()


def test_what_was_removed_is_missed(two):
    directory, state, _ = two
    shutil.rmtree(directory / "2")
    with pytest.warns(FdgWarning, match=r"/2, the newest, was removed: going on from iteration 1$"):
        assert Checkpoints(directory).latest() == 1
    (directory / "1" / "manifest.json").unlink()
    with pytest.raises(FdgError, match=r"/2, the newest, was removed, and so is every other checkpoint"):
        Checkpoints(directory).latest()
    shutil.rmtree(directory)
    with pytest.raises(FdgError, match=r"were removed \(the newest was of iteration 2\): restore them"):
        Checkpoints(directory).latest()
    checkpoints = Checkpoints(directory)  # whoever saves all the same begins anew
    checkpoints.save(1, state)
    checkpoints.close()
    assert Checkpoints(directory).latest() == 1
    directory.with_name(f".{directory.name}").write_bytes(b"\xff\x00")  # what cannot be read is no note
    shutil.rmtree(directory)
    assert Checkpoints(directory).latest() is None


def test_a_damaged_one_is_set_aside_when_its_iteration_comes_again(two):
    directory, state, files = two
    files[0].write_bytes(b"")
    checkpoints = Checkpoints(directory)
    checkpoints.save(2, state)
    checkpoints.close()
    assert Checkpoints(directory).latest() == 2
    assert sorted(path.name for path in directory.iterdir()) == ["1", "2", "2.damaged"]


def test_a_protected_one_outlives_the_newest_few(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    for iteration in range(6):
        checkpoints.save(iteration, {"x": jnp.float32(jnp.nan if iteration > 1 else iteration)})
        if iteration == 2:
            assert checkpoints.last_finite() == 1
            checkpoints.protect(1)
    checkpoints.close()
    assert Checkpoints(tmp_path).iterations() == [1, 3, 4, 5]
    assert Checkpoints(tmp_path).last_finite() == 1


def test_what_a_killed_process_left_is_tidied_up(two):
    directory, state, _ = two
    shutil.copytree(directory / "2", directory / "3.writing")
    shutil.copytree(directory / "2", directory / "0.removed")
    assert Checkpoints(directory).latest() == 2 and (directory / "3.writing").exists()
    checkpoints = Checkpoints(directory)
    checkpoints.save(4, state)
    checkpoints.close()
    assert sorted(path.name for path in directory.iterdir()) == ["1", "2", "4"]


def test_a_full_disk_is_one_line_and_leaves_no_half(two):
    directory, state, _ = two
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    checkpoints = Checkpoints(directory)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, usual[1]))  # a file of 4 kB does not fit
        checkpoints.save(3, state)
        with pytest.raises(RunError, match=r"cannot write a checkpoint in .*make room .*--resume") as caught:
            checkpoints.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)
    assert "\n" not in str(caught.value)
    assert sorted(path.name for path in directory.iterdir()) == ["1", "2"]
    assert Checkpoints(directory).latest() == 2


def test_what_tensorstore_says_of_a_full_disk_is_one_reason(tmp_path, monkeypatch, caplog):
    """Its own words are longer than a line; its thread's log of them is not wanted, other logs are."""

    def save(*_, **__):
        text = 'Failed writing: "/a/b": Failed to write 9 bytes to file 18: No space left on device'
        raise ValueError(f"RESOURCE_EXHAUSTED: {'x' * 300}: {text} [os_error_code='28'] [source locations='")

    module = sys.modules[Checkpoints.__module__]
    monkeypatch.setattr(module, "_checkpointer", lambda: types.SimpleNamespace(save=save))
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    checkpoints.save(1, {"x": jnp.zeros(2)})
    with pytest.raises(RunError, match=r"checkpoints \(No space left on device\): make room there"):
        checkpoints.close()
    module._orbax()
    for line in ("_SignalingThread.run() raised an exception", "other words"):
        logging.getLogger("absl").error(line)
    assert [record.message for record in caplog.records] == ["other words"]


def test_the_state_of_something_else_is_refused(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, {"w": jnp.zeros(3), "n": jnp.int32(0)})
    checkpoints.close()
    other = shapes({"w": jnp.zeros(4), "n": jnp.int32(0)})
    with pytest.raises(FdgError, match=r"'w' is float32\[3\] in the checkpoint and float32\[4\] here"):
        Checkpoints(tmp_path).restore(1, other)
    with pytest.raises(FdgError, match=r"'m' is absent in the checkpoint and float32\[\] here"):
        Checkpoints(tmp_path).restore(1, {"m": other["n"].update(dtype=jnp.float32)})


def final_state(run: Path):
    """The state that a run ended in."""
    job = parse(["--resume", str(run), "--trust"], "", "")
    engine = fdg.compile(job.algorithm, job.policy, available_devices(1), job.agents)
    return Checkpoints(run / "checkpoints").restore(job.num_iterations, engine.state_shape)


def kill(words, run: Path, after):
    """Starts a run as a process of its own, and kills it with signal 9 once `after` says so."""
    # On the CPU, as what it is compared with: GPU kernels are chosen by timing them, anew in each process.
    command = [sys.executable, "-m", "fdg.train", *words]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment)
    until = time.monotonic() + 120
    while not after() and process.poll() is None and time.monotonic() < until:
        time.sleep(0.005)
    assert process.poll() is None, "it ended before it could be killed"
    process.kill()
    assert process.wait() == -9


def test_killed_while_checkpoints_are_written(tmp_path, host_devices):
    """Kill -9 at a random time of a run that does little but write checkpoints."""
    size = ["--total-steps", "320", "--num-envs", "10000", "--checkpoint-every", "1"]
    words = [*WALK, *size]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert train_main([*words, "--checkpoint-every", "100", "--out", str(whole)]) == 0
    directory, draw = killed / "checkpoints", random.Random(0)

    def newest():
        return max((int(path.name) for path in directory.glob("*") if path.name.isdigit()), default=0)

    moment = []

    def after():
        if not moment and newest():
            moment.append(time.monotonic() + draw.random() * 0.25)
        return bool(moment) and time.monotonic() > moment[0]

    kill([*words, "--out", str(killed)], killed, after)
    assert Checkpoints(directory).latest() == newest() > 0
    assert train_main(["--resume", str(killed), "--trust"]) == 0
    assert_same(final_state(killed), final_state(whole))
    assert timeless(killed) == timeless(whole)


def test_going_on_with_other_devices(tmp_path, host_devices):
    words = ["--algo", "tests.tiny:Walk", "--total-steps", "160", "--out"]
    whole, moved = tmp_path / "whole", tmp_path / "moved"
    assert train_main([*words, str(whole), "--devices", "1"]) == 0
    assert train_main([*words, str(moved), "--devices", "4"]) == 0
    shutil.rmtree(moved / "checkpoints" / "20")
    (moved / "summary.json").unlink()
    assert train_main(["--resume", str(moved), "--devices", "2", "--trust"]) == 0
    assert_same(final_state(moved), final_state(whole))


@pytest.mark.parametrize(
    ("words", "seconds", "expected"),
    [
        ("", 0.0, [18, 19, 20]),  # after each twentieth of a run
        ("", 100.0, [1, 20]),  # a hundred seconds each: once in hours
        ("--checkpoint-every 1", 100.0, [18, 19, 20]),  # as was asked for
    ],
)
def test_those_that_nobody_asked_for_take_a_hundredth_of_the_time(
    words, seconds, expected, tmp_path, monkeypatch
):
    save = Checkpoints.save

    def at_once(self, iteration, state):
        save(self, iteration, state)
        self._wait()
        self._write_seconds = seconds

    monkeypatch.setattr(Checkpoints, "save", at_once)
    run = tmp_path / "run"
    assert train_main([*WALK, "--total-steps", "160", *words.split(), "--out", str(run)]) == 0
    assert Checkpoints(run / "checkpoints").iterations() == expected


def test_a_run_without_its_checkpoints_is_not_trained_anew(tmp_path, capsys):
    run = tmp_path / "run"
    assert train_main([*WALK, "--total-steps", "32", "--checkpoint-every", "2", "--out", str(run)]) == 0
    before = (run / "config.json").read_bytes(), (run / "metrics.jsonl").read_bytes()
    shutil.rmtree(run / "checkpoints" / "4")
    capsys.readouterr()
    with pytest.warns(FdgWarning, match="checkpoints/4, the newest, was removed: going on from iteration 2"):
        assert fdg.load(run, trust=True).iteration == 2
    shutil.rmtree(run / "checkpoints")
    for words in ([*WALK, "--resume"], [*WALK, "--total-steps", "64", "--resume"]):
        said = refused(capsys, [*words, str(run)], train_main)
        assert said.startswith("error: all checkpoints in ") and "another --out" in said
    assert before == ((run / "config.json").read_bytes(), (run / "metrics.jsonl").read_bytes())
    (run / ".checkpoints").unlink()  # as if the run had been killed before its first one
    assert train_main([*WALK, "--resume", str(run)]) == 0
    assert "resuming at iteration 0 of 4 (no checkpoint had been written)" in capsys.readouterr().out
