"""Several processes: the numbers of one, one that writes, and none that waits for the dead."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fdg import distributed, peers
from fdg.checkpoint import Checkpoints
from fdg.cli import train_main
from fdg.errors import FdgError

TINY = "--num-envs 4 --num-steps 4 --num-minibatches 2 --num-epochs 1 --hidden 8 --eval-episodes 2".split()
WALK = ["--algo", "tests.tiny:Walk"]
LONG = [*WALK, "--total-steps", "400000"]
ENVIRONMENT = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}


def start(words, count=2, address=None, module="fdg.train"):
    """Real processes, one host device each."""
    address = address or f"localhost:{peers.free_port('localhost')}"
    triple = lambda i: f"--coordinator-address {address} --num-processes {count} --process-id {i}".split()  # noqa: E731
    return [
        subprocess.Popen(
            [sys.executable, "-m", module, *map(str, words), *triple(i)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=ENVIRONMENT,
        )
        for i in range(count)
    ]


def finish(processes, seconds=120):
    """Exit status, standard output and standard error of each; none may hang."""
    try:
        return [(*process.communicate(timeout=seconds), process.returncode) for process in processes]
    finally:
        for process in processes:
            process.kill()


def rows(run):
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [{**json.loads(line), "wall_s": 0} for line in lines]


def leaves(run, iteration):
    """The arrays of a checkpoint, as they are stored."""
    with Checkpoints(run / "checkpoints")._manager(read_only=True) as reader:
        stored = reader.restore(iteration)
    return {name: np.asarray(value) for name, value in stored.items()}


def assert_close(one, two):
    """Floats to 1e-5, all else exactly."""
    assert one.keys() == two.keys()
    for name in one:
        if isinstance(one[name], float) or getattr(one[name], "dtype", np.dtype(int)).kind == "f":
            np.testing.assert_allclose(two[name], one[name], rtol=1e-5, atol=1e-6, err_msg=name)
        else:
            np.testing.assert_array_equal(two[name], one[name], err_msg=name)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The same run by one process and by two, and what the two said."""
    folder = tmp_path_factory.mktemp("runs")
    one, two = folder / "one", folder / "two"
    words = [*TINY, "--total-steps", "160", "--seed", "2", "--out"]
    processes = start([*words, two, "--devices", "2"])
    assert train_main([*words, str(one), "--devices", "1"]) == 0
    return one, two, finish(processes)


def test_two_processes_give_the_numbers_of_one(runs):
    one, two, said = runs
    assert [status for *_, status in said] == [0, 0], said
    assert len(rows(one)) == len(rows(two)) == 10
    for a, b in zip(rows(one), rows(two), strict=True):
        assert_close(a, b)
    assert_close(leaves(one, 10), leaves(two, 10))
    summaries = [json.loads((run / "summary.json").read_text()) for run in (one, two)]
    assert summaries[0]["eval_return"] == pytest.approx(summaries[1]["eval_return"], rel=1e-5)
    assert len(summaries[1]["devices"]) == 2


def test_only_process_0_writes_and_prints(runs):
    _, two, ((out, err, _), (other_out, other_err, _)) = runs
    assert "places PPO on 2 devices" in out and "100% iteration 10/10" in out and err == ""
    assert (other_out, other_err) == ("", "")
    assert {path.name for path in two.iterdir()} == {
        *(".lock", "config.json", "metrics.jsonl", "summary.json", "learning_curve.png", "checkpoints")
    }


def test_a_stopped_run_goes_on_with_another_number_of_processes(tmp_path):
    """Stopped by a signal to process 1 alone; both stop after the same iteration."""
    whole, run = tmp_path / "whole", tmp_path / "run"
    words = [*WALK, "--total-steps", "32000", "--checkpoint-every", "2000", "--out"]
    processes = start([*words, run])
    wait_for_rows(run, processes)
    processes[1].send_signal(signal.SIGTERM)
    assert [status for *_, status in finish(processes)] == [143, 143]
    assert 0 < len(rows(run)) < 4000 and (run / "checkpoints" / str(len(rows(run)))).exists()
    assert train_main(["--resume", str(run), "--devices", "1"]) == 0
    assert train_main([*words, str(whole), "--devices", "1"]) == 0
    for a, b in zip(rows(whole), rows(run), strict=True):
        assert_close(a, b)
    (run / "summary.json").unlink()  # and the other way round: two processes read what one wrote
    assert [status for *_, status in finish(start(["--resume", run, "--devices", 2]))] == [0, 0]
    assert_close(leaves(whole, 4000), leaves(run, 4000))


def wait_for_rows(run, processes, seconds=90):
    deadline = time.monotonic() + seconds
    while not ((run / "metrics.jsonl").exists() and rows(run)):
        assert time.monotonic() < deadline and all(process.poll() is None for process in processes)
        time.sleep(0.1)


@pytest.mark.parametrize("victim", [0, 1])
def test_the_others_name_a_killed_process_and_stop(tmp_path, victim):
    processes = start([*LONG, "--out", tmp_path / "run"])
    wait_for_rows(tmp_path / "run", processes)
    processes[victim].kill()
    begun = time.monotonic()
    _, err, status = finish(processes, 60)[1 - victim]
    assert time.monotonic() - begun < 15
    host, pid = socket.gethostname(), processes[victim].pid
    assert (err, status) == (
        f"error: process {victim} (host {host}, pid {pid}) died or lost its connection\n",
        1,
    )


def test_an_error_of_one_process_ends_all(tmp_path):
    (tmp_path / "summary.json").write_text("mine")
    (_, err, status), (_, other_err, other_status) = finish(start([*WALK, "--out", tmp_path]))
    assert (status, other_status) == (2, 2)
    assert err.startswith(f"error: --out {tmp_path} holds summary.json already") and err.count("\n") == 1
    assert re.fullmatch(r"error: process 0 \(host .*, pid \d+\) failed: --out .* holds .*\n", other_err)


def test_the_launcher(tmp_path):
    words = [
        sys.executable,
        "-m",
        "fdg.launch",
        "--num-processes",
        "2",
        *WALK,
        "--out",
        str(tmp_path / "run"),
    ]
    done = subprocess.run(
        [*words, "--total-steps", "16", "--num-seeds", "4"], env=ENVIRONMENT, capture_output=True, timeout=120
    )
    assert done.returncode == 0 and len(rows(tmp_path / "run")) == 2, done.stderr
    assert len(rows(tmp_path / "run")[1]["episode_return_per_seed"]) == 4
    done = subprocess.run([*words, "--devices", "3"], env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 2
    assert "error: --devices 3 does not divide by the 2 processes: use --devices 2 or 4" in done.stderr


ERRORS = {
    "--num-processes 2": "--coordinator-address is missing: --coordinator-address, --num-processes, --p",
    "--coordinator-address localhost:1 --process-id 0": "--num-processes is missing",
    "--distributed --process-id 0": "--distributed takes --process-id from the cluster",
    "--coordinator-address localhost --num-processes 2 --process-id 0": "localhost: write HOST:PORT",
    "--coordinator-address a:1 --num-processes 0 --process-id 0": "--num-processes 0: it must be at least 1",
    "--coordinator-address a:1 --num-processes 2 --process-id 2": "--process-id 2: with --num-processes 2 it",
    "--coordinator-address a:1 --num-processes 2 --process-id x": "--process-id: 'x' is not an integer",
    "--coordinator-address a:1 --num-processes 2 --process-id 0 --devices 3": "use --devices 2 or 4",
    "--distributed": "JAX detects no cluster here",
}


@pytest.mark.parametrize("words", ERRORS)
def test_bad_flags_get_one_line(words, capsys):
    assert train_main(words.split()) == 2
    err = capsys.readouterr().err
    assert ERRORS[words] in err and err.startswith("error: ") and err.count("\n") == 1


def test_fetch_in_one_process(devices):
    split = NamedSharding(Mesh(np.array(devices[:4]), ("d",)), PartitionSpec(None, "d"))
    tree = {
        "split": jax.device_put(jnp.arange(24.0).reshape(3, 8), split),
        "key": jax.random.key(3),
        "half": jax.device_put(jnp.bfloat16(1.5), devices[2]),
        "empty": jnp.zeros((0, 2)),
    }
    fetched = distributed.fetch(tree)
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(fetched))
    np.testing.assert_array_equal(fetched["split"], np.arange(24.0).reshape(3, 8))
    np.testing.assert_array_equal(fetched["key"], jax.random.key_data(tree["key"]))
    assert fetched["half"] == 1.5 and fetched["empty"].shape == (0, 2)
    assert jax.random.key_impl(distributed.gather(tree)["key"]) == jax.random.key_impl(tree["key"])


FETCH = """
import sys, jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from fdg import distributed, host_devices
from fdg.checkpoint import _place
index = int(sys.argv[2])
distributed.initialize(sys.argv[1], 2, index)
host_devices(2)
mine, other = (jax.devices()[i:i + 2] for i in (0, 2))
values = np.arange(16, dtype=np.float32).reshape(8, 2)
values[0, 0] = -0.0
over = lambda devices, *axes: NamedSharding(Mesh(np.array(devices), ("d",)), P(*axes))
tree = [
    _place(values, over(jax.devices(), "d")),  # over both
    _place(values, over(other, "d")),  # in process 1 only
    _place(values.astype(jax.numpy.bfloat16), over(other)),
    _place(values, over(mine, None, "d")),  # in process 0 only
    jax.random.wrap_key_data(_place(np.arange(8, dtype=np.uint32).reshape(4, 2), over(other, "d"))),
]
fetched = distributed.fetch(tree)
assert (fetched is None) == (index == 1)
if index == 0:
    for array in fetched[:4]:
        assert array.astype(np.float32).tobytes() == values.tobytes()
    assert fetched[4].tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
assert distributed.exchange({"i": index}) == [{"i": 0}, {"i": 1}]
"""


def test_fetch_from_several_processes():
    address = f"localhost:{peers.free_port('localhost')}"
    commands = [[sys.executable, "-c", FETCH, address, str(i)] for i in range(2)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": ENVIRONMENT}
    for _, err, status in finish([subprocess.Popen(command, **pipes) for command in commands]):
        assert status == 0, err


def test_processes_that_do_not_fit_together(monkeypatch):
    address = f"localhost:{peers.free_port('localhost')}"
    monkeypatch.setattr(peers, "JOIN_SECONDS", 1.0)
    with pytest.raises(FdgError, match=r"of 2 processes 1 came to .* process 1 is missing"):
        peers.Peers(address, 2, 0)
    with pytest.raises(FdgError, match="process 0 was not at localhost:"):
        peers.Peers(address, 2, 1)
