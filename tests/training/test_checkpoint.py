"""Checkpoints: atomic writes, damage detection, restore on other devices, bit-exact resume after a kill."""

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
from tests.training.trained import assert_same, untimed_rows

WALK = ["--algo", "tests.tiny:Walk", "--devices", "1"]


def split_over(devices, count, axis="d"):
    return NamedSharding(jax.sharding.Mesh(np.array(devices[:count]), (axis,)), PartitionSpec(axis))


def state_of_all_array_types(sharding, replicated):
    put = lambda x, where=replicated: jax.device_put(x, where)  # noqa: E731
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


def shapes_of(state):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


def test_precision_mismatch_names_jax_enable_x64(tmp_path):
    with jax.enable_x64(True):
        wide = {"x": jnp.zeros(64), "n": jnp.zeros((), int)}
        narrow = jax.tree.map(lambda x: x.astype(x.dtype.name.replace("64", "32")), wide)
    for stored, target, message in (
        (wide, narrow, "int64[] in the checkpoint and int32[] here: set JAX_ENABLE_X64=1"),
        (narrow, wide, "int32[] in the checkpoint and int64[] here: set JAX_ENABLE_X64=0"),
        (wide, {**wide, "n": narrow["x"]}, "float32[64] here"),
    ):
        checkpoints = Checkpoints(tmp_path / message[:5] / str(len(message)))
        checkpoints.save(1, stored)
        checkpoints.close()
        with refuses(message):
            checkpoints.restore(1, shapes_of(target))


def test_restore_on_other_devices(tmp_path, devices):
    replicated = NamedSharding(jax.sharding.Mesh(np.array(devices), ("d",)), PartitionSpec())
    state = state_of_all_array_types(split_over(devices, 8), replicated)
    checkpoints = Checkpoints(tmp_path / "runs" / "checkpoints")
    assert checkpoints.latest() is None and not (tmp_path / "runs" / "checkpoints").exists()
    checkpoints.save(4, state)
    checkpoints.close()
    pair = split_over(devices, 2)
    target = shapes_of(state_of_all_array_types(pair, jax.sharding.SingleDeviceSharding(devices[1])))
    restored = Checkpoints(tmp_path / "runs" / "checkpoints").restore(4, target)
    assert_same(restored, state)
    assert restored["split"].sharding == pair and restored["keys"].sharding.device_set == pair.device_set
    assert restored["half"].devices() == restored["nothing"].devices() == {devices[1]}
    assert jax.random.key_impl(restored["key"]) == jax.random.key_impl(state["key"])


def test_state_can_be_donated_after_save(tmp_path, devices):
    step = jax.jit(lambda x: x + 1.0, donate_argnums=0)
    checkpoints = Checkpoints(tmp_path)
    state = jax.device_put(jnp.zeros(2**20), devices[0])
    target = shapes_of(state)
    for iteration in range(3):
        checkpoints.save(iteration, state)
        for _ in range(5):
            state = step(state)
    checkpoints.close()
    for iteration in range(3):
        restored = np.asarray(Checkpoints(tmp_path).restore(iteration, target))
        assert (restored == 5.0 * iteration).all()


def test_newest_checkpoints_are_kept(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    for iteration in (1, 5, 9, 10, 30):
        checkpoints.save(iteration, {"x": jnp.float32(iteration)})
    checkpoints.close()
    assert sorted(int(path.name) for path in tmp_path.iterdir()) == [9, 10, 30][-KEEP:]
    assert Checkpoints(tmp_path).latest() == 30


@pytest.fixture
def two_checkpoints(tmp_path):
    """A directory with two checkpoints, their state, and the files of the newer one."""
    state = {"x": jax.random.normal(jax.random.key(0), (1000,))}
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, state)
    checkpoints.save(2, state)
    checkpoints.close()
    return tmp_path, state, [path for path in (tmp_path / "2").rglob("*") if path.is_file()]


DAMAGE = {
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "removed": lambda path: path.unlink(),
    "appended": lambda path: path.write_bytes(path.read_bytes() + b" "),
    "extra file": lambda path: path.with_name("more").write_bytes(b""),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_checkpoint_falls_back_to_previous(two_checkpoints, damage):
    directory, state, files = two_checkpoints
    for path in files:
        before = path.read_bytes()
        DAMAGE[damage](path)
        with refuses(match=r"/2 is damaged \(.*\): go on from iteration 1"):
            Checkpoints(directory).restore(2, shapes_of(state))
        with pytest.warns(
            FdgWarning, match=r"/2 is damaged .*: it is not used, going on from iteration 1"
        ) as warnings:
            assert Checkpoints(directory).latest() == 1
        assert [one.filename for one in warnings] == [__file__]  # the warning points at the caller
        path.write_bytes(before)
        path.with_name("more").unlink(missing_ok=True)
    assert_same(Checkpoints(directory).restore(2, shapes_of(state)), state)
    assert_same(Checkpoints(directory).restore(1, shapes_of(state)), state)


def test_bit_flips_are_detected(two_checkpoints):
    """Flips random bits in every file of a checkpoint."""
    directory, _, files = two_checkpoints
    rng = random.Random(0)
    for path in files:
        for _ in range(5):
            content = path.read_bytes()
            at = rng.randrange(len(content))
            path.write_bytes(
                content[:at] + bytes([content[at] ^ (1 << rng.randrange(8))]) + content[at + 1 :]
            )
            assert Checkpoints(directory).damage(2) is not None, (path, at)
            path.write_bytes(content)
    assert Checkpoints(directory).damage(2) is None


def test_all_damaged_is_an_error(two_checkpoints):
    directory, _, _ = two_checkpoints
    for iteration in (1, 2):
        (directory / str(iteration) / "manifest.json").unlink()
    with pytest.raises(
        FdgError, match=r"has no manifest.json.*, and so is every other checkpoint.*from a copy"
    ):
        Checkpoints(directory).latest()


def test_removed_checkpoints_are_reported(two_checkpoints):
    directory, state, _ = two_checkpoints
    shutil.rmtree(directory / "2")
    with pytest.warns(FdgWarning, match=r"/2, the newest, was removed: going on from iteration 1$"):
        assert Checkpoints(directory).latest() == 1
    (directory / "1" / "manifest.json").unlink()
    with pytest.raises(FdgError, match=r"/2, the newest, was removed, and so is every other checkpoint"):
        Checkpoints(directory).latest()
    shutil.rmtree(directory)
    with pytest.raises(FdgError, match=r"were removed \(the newest was of iteration 2\): restore them"):
        Checkpoints(directory).latest()
    checkpoints = Checkpoints(directory)  # saving nevertheless starts a new series
    checkpoints.save(1, state)
    checkpoints.close()
    assert Checkpoints(directory).latest() == 1
    directory.with_name(f".{directory.name}").write_bytes(b"\xff\x00")  # unreadable, so ignored
    shutil.rmtree(directory)
    assert Checkpoints(directory).latest() is None


def test_damaged_checkpoint_is_renamed_on_save(two_checkpoints):
    directory, state, files = two_checkpoints
    files[0].write_bytes(b"")
    checkpoints = Checkpoints(directory)
    checkpoints.save(2, state)
    checkpoints.close()
    assert Checkpoints(directory).latest() == 2
    assert sorted(path.name for path in directory.iterdir()) == ["1", "2", "2.damaged"]


def test_protected_checkpoint_is_kept(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    for iteration in range(6):
        checkpoints.save(iteration, {"x": jnp.float32(jnp.nan if iteration > 1 else iteration)})
        if iteration == 2:
            assert checkpoints.last_finite() == 1
            checkpoints.protect(1)
    checkpoints.close()
    assert Checkpoints(tmp_path).iterations() == [1, 3, 4, 5]
    assert Checkpoints(tmp_path).last_finite() == 1


def test_new_checkpoint_is_kept_below_damaged_ones(tmp_path):
    checkpoints, state = Checkpoints(tmp_path), {"x": jnp.float32(0)}
    for iteration in (1, 3, 4, 5):
        checkpoints.save(iteration, state)
        if iteration == 1:
            assert checkpoints.last_finite() == 1
            checkpoints.protect(1)
    checkpoints.close()
    for iteration in (3, 4, 5):
        (tmp_path / str(iteration) / "manifest.json").unlink()
    resumed = Checkpoints(tmp_path)
    resumed.save(2, state)
    resumed.close()
    assert resumed.iterations() == [1, 2, 3, 4, 5]


def test_leftovers_of_a_killed_process_are_removed(two_checkpoints):
    directory, state, _ = two_checkpoints
    shutil.copytree(directory / "2", directory / "3.writing")
    shutil.copytree(directory / "2", directory / "0.removed")
    assert Checkpoints(directory).latest() == 2 and (directory / "3.writing").exists()
    checkpoints = Checkpoints(directory)
    checkpoints.save(4, state)
    checkpoints.close()
    assert sorted(path.name for path in directory.iterdir()) == ["1", "2", "4"]


def test_full_disk_is_a_one_line_error(two_checkpoints):
    directory, state, _ = two_checkpoints
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    checkpoints = Checkpoints(directory)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))  # less than a file of 4 kB
        checkpoints.save(3, state)
        with pytest.raises(RunError, match=r"cannot write a checkpoint in .*make room .*--resume") as caught:
            checkpoints.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "\n" not in str(caught.value)
    assert sorted(path.name for path in directory.iterdir()) == ["1", "2"]
    assert Checkpoints(directory).latest() == 2


def test_tensorstore_full_disk_error_is_shortened(tmp_path, monkeypatch, caplog):
    """The error keeps only the cause, and the log of TensorStore's thread is filtered, but no other log."""

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


def test_restore_of_another_state_is_refused(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, {"w": jnp.zeros(3), "n": jnp.int32(0)})
    checkpoints.close()
    other = shapes_of({"w": jnp.zeros(4), "n": jnp.int32(0)})
    with pytest.raises(FdgError, match=r"'w' is float32\[3\] in the checkpoint and float32\[4\] here"):
        Checkpoints(tmp_path).restore(1, other)
    with pytest.raises(FdgError, match=r"'m' is absent in the checkpoint and float32\[\] here"):
        Checkpoints(tmp_path).restore(1, {"m": other["n"].update(dtype=jnp.float32)})


def final_state(run: Path):
    """The state at the end of a run."""
    job = parse(["--resume", str(run), "--trust"], "", "")
    engine = fdg.compile(job.algorithm, job.policy, available_devices(1), job.agents)
    return Checkpoints(run / "checkpoints").restore(job.num_iterations, engine.state_shape)


def kill(words, run: Path, after):
    """Starts a run in a subprocess and kills it (SIGKILL) once `after()` is true."""
    # On the CPU, as the reference run: XLA selects GPU kernels by timing them, separately in each process.
    command = [sys.executable, "-m", "fdg.train", *words]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment)
    deadline = time.monotonic() + 120
    while not after() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
    assert process.poll() is None, "it ended before it could be killed"
    process.kill()
    assert process.wait() == -9


def test_kill_while_saving(tmp_path, host_devices):
    """Kills a run at a random time while it writes a checkpoint every iteration, then resumes it."""
    size = ["--total-steps", "320", "--num-envs", "10000", "--checkpoint-every", "1"]
    words = [*WALK, *size]
    reference, killed = tmp_path / "reference", tmp_path / "killed"
    assert train_main([*words, "--checkpoint-every", "100", "--out", str(reference)]) == 0
    directory, rng = killed / "checkpoints", random.Random(0)

    def newest():
        return max((int(path.name) for path in directory.glob("*") if path.name.isdigit()), default=0)

    moment = []

    def after():
        if not moment and newest():
            moment.append(time.monotonic() + rng.random() * 0.25)
        return bool(moment) and time.monotonic() > moment[0]

    kill([*words, "--out", str(killed)], killed, after)
    assert Checkpoints(directory).latest() == newest() > 0
    assert train_main(["--resume", str(killed), "--trust"]) == 0
    assert_same(final_state(killed), final_state(reference))
    assert untimed_rows(killed) == untimed_rows(reference)


def test_resume_on_other_devices(tmp_path, host_devices):
    words = ["--algo", "tests.tiny:Walk", "--total-steps", "160", "--out"]
    reference, moved = tmp_path / "reference", tmp_path / "moved"
    assert train_main([*words, str(reference), "--devices", "1"]) == 0
    assert train_main([*words, str(moved), "--devices", "4"]) == 0
    shutil.rmtree(moved / "checkpoints" / "20")
    (moved / "summary.json").unlink()
    assert train_main(["--resume", str(moved), "--devices", "2", "--trust"]) == 0
    assert_same(final_state(moved), final_state(reference))


@pytest.mark.parametrize(
    ("words", "seconds", "expected"),
    [
        ("", 0.0, [18, 19, 20]),  # free: after each twentieth of the run
        ("", 100.0, [1, 20]),  # 100 s each: the first and the last only
        ("--checkpoint-every 1", 100.0, [18, 19, 20]),  # an explicit interval is kept
    ],
)
def test_default_checkpoints_take_one_percent_of_time(words, seconds, expected, tmp_path, monkeypatch):
    save = Checkpoints.save

    def synchronous_save(self, iteration, state):
        save(self, iteration, state)
        self._wait()
        self._write_seconds = seconds

    monkeypatch.setattr(Checkpoints, "save", synchronous_save)
    run = tmp_path / "run"
    assert train_main([*WALK, "--total-steps", "160", *words.split(), "--out", str(run)]) == 0
    assert Checkpoints(run / "checkpoints").iterations() == expected


def test_resume_without_checkpoints(tmp_path, capsys):
    run = tmp_path / "run"
    assert train_main([*WALK, "--total-steps", "32", "--checkpoint-every", "2", "--out", str(run)]) == 0
    before = (run / "config.json").read_bytes(), (run / "metrics.jsonl").read_bytes()
    shutil.rmtree(run / "checkpoints" / "4")
    capsys.readouterr()
    with pytest.warns(FdgWarning, match="checkpoints/4, the newest, was removed: going on from iteration 2"):
        assert fdg.load(run, trust=True).iteration == 2
    shutil.rmtree(run / "checkpoints")
    for words in ([*WALK, "--resume"], [*WALK, "--total-steps", "64", "--resume"]):
        message = refused(capsys, [*words, str(run)], train_main)
        assert message.startswith("error: all checkpoints in ") and "another --out" in message
    assert before == ((run / "config.json").read_bytes(), (run / "metrics.jsonl").read_bytes())
    (run / ".checkpoints").unlink()  # as if killed before the first checkpoint
    assert train_main([*WALK, "--resume", str(run)]) == 0
    assert "resuming at iteration 0 of 4 (no checkpoint had been written)" in capsys.readouterr().out
