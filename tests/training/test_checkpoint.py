"""Checkpoints: whole, atomic, readable on other devices; a killed run goes on bit for bit."""

import json
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import fdg
from fdg.commands.cli import train_main
from fdg.commands.parse import parse
from fdg.errors import FdgError
from fdg.training.checkpoint import KEEP, Checkpoints
from fdg.training.devices import available_devices
from tests.tiny import Walk

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


def plain(state):
    """Leaves as NumPy arrays, bit for bit."""
    leaves = jax.tree.leaves(state)
    is_key = [jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) for leaf in leaves]
    return [
        np.asarray(jax.random.key_data(leaf) if key else leaf)
        for leaf, key in zip(leaves, is_key, strict=True)
    ]


def assert_same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(plain(a), plain(b), strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes()


def shapes(state):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


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


@pytest.mark.parametrize("damage", ["truncate", "remove", "empty"])
def test_damage_is_one_line_with_the_fix(tmp_path, damage):
    state = {"x": jnp.arange(1000.0)}
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, state)
    checkpoints.save(2, state)
    checkpoints.close()
    files = [path for path in (tmp_path / "2").rglob("*") if path.is_file()]
    if damage == "truncate":
        for path in files:
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    elif damage == "remove":
        for path in files:
            if path.parent.name == "d":
                path.unlink()
    else:
        shutil.rmtree(tmp_path / "2" / "default")
    with pytest.raises(
        FdgError, match=r"/2 cannot be read .*: remove it to go on from iteration 1"
    ) as caught:
        Checkpoints(tmp_path).restore(2, shapes(state))
    assert "\n" not in str(caught.value)
    assert_same(Checkpoints(tmp_path).restore(1, shapes(state)), state)


def test_the_state_of_something_else_is_refused(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, {"w": jnp.zeros(3), "n": jnp.int32(0)})
    checkpoints.close()
    other = shapes({"w": jnp.zeros(4), "n": jnp.int32(0)})
    with pytest.raises(FdgError, match=r"'w' is float32\[3\] there and float32\[4\] here"):
        Checkpoints(tmp_path).restore(1, other)
    with pytest.raises(FdgError, match=r"'m' is absent there and float32\[\] here"):
        Checkpoints(tmp_path).restore(1, {"m": other["n"].update(dtype=jnp.float32)})


def final_state(run: Path):
    """The state that a run ended in."""
    job = parse(["--resume", str(run)], "", "")
    engine = fdg.compile(job.algorithm, job.policy, available_devices(1), job.num_seeds)
    return Checkpoints(run / "checkpoints").restore(job.num_iterations, engine.state_shape)


def metrics(run: Path):
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if name != "wall_s"} for row in rows]


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
    """Kill -9 at random times of a run that does little but write checkpoints, three times over."""
    size = ["--total-steps", "4800", "--num-envs", "40000", "--checkpoint-every", "1"]
    words = [*WALK, *size]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert train_main([*words, "--checkpoint-every", "300", "--out", str(whole)]) == 0
    directory, draw = killed / "checkpoints", random.Random(0)

    def newest():
        return max((int(path.name) for path in directory.glob("*") if path.name.isdigit()), default=0)

    for attempt in range(3):
        reached, moment = newest(), []

        def after(reached=reached, moment=moment):
            if not moment and newest() > reached:
                moment.append(time.monotonic() + draw.random() * 0.5)
            return bool(moment) and time.monotonic() > moment[0]

        kill(["--resume", str(killed)] if attempt else [*words, "--out", str(killed)], killed, after)
        assert Checkpoints(directory).latest() == newest() > reached
    assert train_main(["--resume", str(killed)]) == 0
    assert_same(final_state(killed), final_state(whole))
    assert metrics(killed) == metrics(whole)


def test_ppo_killed_in_mid_training_goes_on_bit_for_bit(tmp_path, host_devices):
    words = "--devices 1 --total-steps 51200 --num-steps 32 --checkpoint-every 40 --eval-episodes 0".split()
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert train_main([*words, "--out", str(whole)]) == 0
    kill([*words, "--out", str(killed)], killed, lambda: (killed / "checkpoints" / "80").exists())
    assert not (killed / "summary.json").exists()
    assert train_main(["--resume", str(killed)]) == 0
    assert_same(final_state(killed), final_state(whole))
    assert metrics(killed) == metrics(whole) and len(metrics(whole)) == 400


def test_going_on_with_other_devices(tmp_path, host_devices):
    words = ["--algo", "tests.tiny:Walk", "--total-steps", "160", "--out"]
    whole, moved = tmp_path / "whole", tmp_path / "moved"
    assert train_main([*words, str(whole), "--devices", "1"]) == 0
    assert train_main([*words, str(moved), "--devices", "4"]) == 0
    shutil.rmtree(moved / "checkpoints" / "20")
    (moved / "summary.json").unlink()
    assert train_main(["--resume", str(moved), "--devices", "2"]) == 0
    assert_same(final_state(moved), final_state(whole))


def test_a_damaged_checkpoint_on_the_command_line(tmp_path, capsys):
    run = tmp_path / "run"
    assert train_main([*WALK, "--total-steps", "160", "--out", str(run)]) == 0
    (run / "summary.json").unlink()
    shutil.rmtree(run / "checkpoints" / "20" / "default")
    capsys.readouterr()
    assert train_main(["--resume", str(run)]) == 2
    error = capsys.readouterr().err
    assert "checkpoints/20 cannot be read" in error and error.count("\n") == 1
    assert "remove it to go on from iteration 19" in error
    shutil.rmtree(run / "checkpoints" / "20")
    assert train_main(["--resume", str(run)]) == 0
    assert len(metrics(run)) == 20


def test_walk_keeps_the_whole_state():
    """The probe of this file does what it says: every array of its state changes in an iteration."""
    walk = Walk()
    state = walk.init(jax.random.key(0))
    after, _ = walk.iterate(state)
    changed = [x.tobytes() != y.tobytes() for x, y in zip(plain(state), plain(after), strict=True) if x.size]
    assert all(changed)
