"""Several processes: results equal those of one process, and a lost process stops the others."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import envs
import fdg
import policies
from fdg.commands.cli import train_main
from fdg.errors import FdgError
from fdg.processes import distributed, peers, ports
from fdg.training.checkpoint import Checkpoints
from tests.processes.hosted import Hosted
from tests.refusing import refused
from tests.tiny import Pupil
from tests.training.trained import rows, untimed_rows

PUPIL = "--algo tests.tiny:Pupil --num-envs 12 --seed 2"
COARSE = f"{PUPIL} --policy single_learner_coarse"
CENTRAL = f"{PUPIL} --policy central --staleness 1"
A2C = "--algo a2c --num-envs 4 --num-steps 4 --hidden 8 --eval-episodes 2"
ENVIRONMENT = {**os.environ, "JAX_PLATFORMS": "cpu"}


def start(words, **second):
    """Starts two processes with one host device each; `second` has environment variables of the second."""
    triple = f"--coordinator-address localhost:{ports.free_port('localhost')} --num-processes 2 --process-id"
    words = ["-m", "fdg.train", *words.split(), *triple.split()]
    return [spawn(*words, "0"), spawn(*words, "1", **second)]


def spawn(*words, **more):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, *words], env={**ENVIRONMENT, **more}, **pipes)


def finish(processes, seconds=180):
    """(stdout, stderr, exit status) of each process, within `seconds`."""
    try:
        return [(*process.communicate(timeout=seconds), process.returncode) for process in processes]
    finally:
        for process in processes:
            process.kill()


def leaves(run, iteration):
    """The stored arrays of a checkpoint."""
    return Checkpoints(run / "checkpoints").arrays(iteration)


def assert_close(one, two):
    """Compares floats to 1e-5, everything else exactly."""
    assert one.keys() == two.keys()
    for name in one:
        if np.asarray(one[name]).dtype.kind == "f":
            np.testing.assert_allclose(two[name], one[name], rtol=1e-5, atol=1e-6, err_msg=name)
        else:
            np.testing.assert_array_equal(two[name], one[name], err_msg=name)


# --- comparison with one process ---

# (flags, devices in the two processes, the run in one process with the same results). In "central 3+1", each
# process has some of the three workers.
RUNS = {
    "a2c fsdp": (f"{A2C} --parameters fsdp --total-steps 48 --checkpoint-every 3", 2, "a2c"),
    "central 3+1": (f"{CENTRAL} --total-steps 48 --checkpoint-every 6", 4, "central"),
}
ALONE = {
    "a2c": f"{A2C} --total-steps 48 --checkpoint-every 3",
    "central": f"{CENTRAL} --total-steps 48 --checkpoint-every 6",
    "stale": f"{COARSE} --staleness 1 --total-steps 48 --checkpoint-every 5",
}
SEVERAL = """
import json, sys, envs, fdg, jax, numpy as np
from envs import host
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from fdg.processes import distributed
from fdg import cores, host_devices
from fdg.commands.parse import parse
from fdg.training import loop, summary
from fdg.training.checkpoint import _place
from fdg.running.exchange import Exchange
from tests.processes.hosted import Hosted, WorkersLast
loop.draw_learning_curve = lambda *_, **__: None
summary.predicted_seconds = lambda engine: None
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
assert cores.processes_sharing_cores() == 2  # of this machine, its cores
print("fetched", flush=True)
pair = [jax.devices()[0], jax.devices()[2]]  # the environments live with process 1
engine = fdg.compile(Hosted(envs.make("envpool:CartPole-v1")), WorkersLast(), pair)
exchange, connected = Exchange.exchange, []
Exchange.exchange = lambda self, sent: connected.append(self) or exchange(self, sent)
engine.compile()
assert connected  # with all processes there; in an iteration, gloo gives up if one is 30 s late
assert not any(exchange._zero_blocks for exchange in connected)  # a source never needs them again
Exchange.exchange = exchange
state = engine.init(3)
assert host.running() == index, (index, host.running())
metrics = distributed.fetch(engine.run(state, 5)[1])
assert host.running() == index
if index == 0:
    print(json.dumps({name: metrics[name].tolist() for name in ("reward", "weight")}), flush=True)
host.close()
for words in json.loads(sys.argv[3]):
    assert loop.carry_out(parse(words.split(), "", "")).caught is None
distributed.leave()
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """(runs of one process, runs of two, the results of `finish`); one pair of processes does all runs."""
    folder = tmp_path_factory.mktemp("runs")
    one, two = folder / "one", folder / "two"
    one.mkdir(), two.mkdir()
    assert train_main(f"{ALONE['stale']} --devices 1 --out {one / 'stale'}".split()) == 0
    cut_short(one / "stale", two / "resumed")
    words = [
        f"{RUNS[name][0]} --devices {RUNS[name][1]} --out {two / name.replace(' ', '_')}" for name in RUNS
    ]
    words.append(f"--resume {two / 'resumed'} --devices 2 --trust")
    address = f"localhost:{ports.free_port('localhost')}"
    processes = [spawn("-c", SEVERAL, address, str(i), json.dumps(words)) for i in range(2)]
    for name in ALONE.keys() - {"stale"}:
        assert train_main(f"{ALONE[name]} --devices 1 --out {one / name}".split()) == 0
    return one, two, finish(processes, 300)


def cut_short(run, copy):
    """Copies a run without its last checkpoint."""
    shutil.copytree(run, copy)
    (copy / "summary.json").unlink()
    shutil.rmtree(copy / "checkpoints" / str(len(rows(copy))))


def assert_same_run(one, two):
    """Compares metrics, the last checkpoint, and the evaluation return."""
    assert len(rows(one)) == len(rows(two)) > 0
    for a, b in zip(untimed_rows(one), untimed_rows(two), strict=True):
        assert_close(a, b)
    assert_close(leaves(one, len(rows(one))), leaves(two, len(rows(one))))
    assert summary(one)["eval_return"] == pytest.approx(summary(two)["eval_return"], rel=1e-5)


def summary(run):
    return json.loads((run / "summary.json").read_text())


def test_fetch_in_two_processes(runs):
    *_, results = runs
    for out, err, status in results:
        assert status == 0, err
        assert out.startswith("fetched")


def test_host_environments_in_two_processes(runs, devices):
    """One process starts and steps the environments; the results are those of one process."""
    engine = fdg.compile(Hosted(envs.make("envpool:CartPole-v1")), policies.GPUOnly(), devices[:1])
    _, alone = engine.run(engine.init(3), 5)
    (line,) = [line for line in runs[2][0][0].splitlines() if line.startswith('{"reward"')]
    together = json.loads(line)
    for name, values in alone.items():
        np.testing.assert_allclose(together[name], values, rtol=1e-6, err_msg=name)
    assert len(set(together["weight"])) == 5


@pytest.mark.parametrize("name", RUNS)
def test_two_processes_match_one(name, runs):
    one, two, results = runs
    assert [status for *_, status in results] == [0, 0], results
    _, count, alone = RUNS[name]
    run = two / name.replace(" ", "_")
    assert_same_run(one / alone, run)
    assert len(summary(run)["devices"]) == count
    if "+" in name:
        config = json.loads((run / "config.json").read_text())
        policy = policies.get(config["policy"])(**config["policy_fields"], staleness=config["staleness"])
        plan = fdg.place(Pupil(num_envs=12), policy, count)
        moves = sum(m.bytes_per_iteration for m in plan.movements if m.how == "transfer")
        assert summary(run)["moved_bytes"] == len(rows(run)) * moves
        assert [g["devices"] for g in summary(run)["groups"].values()] == [len(g) for g in plan.groups]
        assert all(group["busy_s"] > 0 for group in summary(run)["groups"].values())


def test_resume_with_another_number_of_processes(runs, tmp_path):
    """From one process to two and back, with `staleness=1`: a checkpoint contains the older parameters."""
    one, two, results = runs
    assert "resuming at iteration 5 of 6" in results[0][0]
    assert_same_run(one / "stale", two / "resumed")
    cut_short(two / "resumed", tmp_path / "run")
    assert train_main(["--resume", str(tmp_path / "run"), "--devices", "1", "--trust"]) == 0
    assert_same_run(one / "stale", tmp_path / "run")


# --- signals and lost processes ---


def wait_for_rows(run, processes, seconds=150):
    deadline = time.monotonic() + seconds
    while not ((run / "metrics.jsonl").exists() and rows(run)):
        assert time.monotonic() < deadline and all(process.poll() is None for process in processes)
        time.sleep(0.1)


def test_signal_to_one_process_stops_all(tmp_path):
    processes = start(f"{COARSE} --total-steps 24000 --checkpoint-every 3000 --out {tmp_path}")
    wait_for_rows(tmp_path, processes)
    processes[1].send_signal(signal.SIGTERM)
    results = finish(processes)
    assert [status for *_, status in results] == [143, 143], results
    assert 0 < len(rows(tmp_path)) < 3000
    assert (tmp_path / "checkpoints" / str(len(rows(tmp_path)))).exists()
    assert f"saved: go on with --resume {tmp_path}" in results[0][0]


@pytest.mark.parametrize(
    ("words", "victim"),
    [
        (f"{PUPIL} --total-steps 400000", 0),
        (f"{COARSE} --total-steps 80000 --staleness 1", 0),
        (f"{COARSE} --total-steps 80000", 1),
    ],
    ids=["first of two", "actors", "learner"],
)
def test_killed_process_is_named(words, victim, tmp_path):
    processes = start(f"{words} --out {tmp_path}")
    wait_for_rows(tmp_path, processes)
    processes[victim].kill()
    begun = time.monotonic()
    _, err, status = finish(processes, 60)[1 - victim]
    assert time.monotonic() - begun < 15
    host, pid = socket.gethostname(), processes[victim].pid
    assert (err, status) == (
        f"error: process {victim} (host {host}, pid {pid}) died or lost its connection\n",
        1,
    )


ERRORS = {
    "--num-processes 2": "--coordinator-address is missing: --coordinator-address, --num-processes, --p",
    "--coordinator-address localhost:1 --process-id 0": "--num-processes is missing",
    "--distributed --process-id 0": "--distributed detects --process-id from the cluster",
    "--coordinator-address localhost --num-processes 2 --process-id 0": "localhost: write HOST:PORT",
    "--coordinator-address a:1 --num-processes 0 --process-id 0": "--num-processes 0: it must be at least 1",
    "--coordinator-address a:1 --num-processes 2 --process-id 2": "--process-id 2: with --num-processes 2 it",
    "--coordinator-address a:1 --num-processes 2 --process-id x": "--process-id: 'x' is not an integer",
    "--coordinator-address a:1 --num-processes 2 --process-id 0 --devices 3": "use --devices 2 or 4",
    "--distributed": "JAX does not detect a cluster",
}


@pytest.mark.parametrize("words", ERRORS)
def test_invalid_flags(words, capsys):
    assert ERRORS[words] in refused(capsys, words, train_main)


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


def test_coordinator_with_an_ipv6_address(monkeypatch):
    """JAX gets the address in brackets; without them gRPC takes the port for a part of the host."""
    addresses = []

    def stop(address, *args, **options):
        addresses.append(address)
        raise RuntimeError("stopped by the test")

    monkeypatch.setattr(jax.distributed, "initialize", stop)
    monkeypatch.setattr(peers, "Peers", lambda *args: types.SimpleNamespace(index=args[2], notes=args[3]))
    monkeypatch.setattr(distributed.atexit, "register", lambda function: None)
    monkeypatch.setattr(jax.config, "update", lambda name, value: None)
    monkeypatch.setattr(distributed, "_peers", None)
    for host in ("[2001:db8::7]", "10.0.0.7"):
        monkeypatch.setattr(distributed, "_peers", None)
        with pytest.raises(FdgError, match=r"jax\.distributed cannot start: stopped by the test"):
            distributed.initialize(f"{host}:1234", 1, 0)
    assert [address.rpartition(":")[0] for address in addresses] == ["[2001:db8::7]", "10.0.0.7"]


def test_missing_process(monkeypatch):
    address = f"localhost:{ports.free_port('localhost')}"
    monkeypatch.setattr(peers, "JOIN_SECONDS", 0.3)
    with pytest.raises(FdgError, match=r"of 2 processes 1 connected to .* process 1 is missing"):
        peers.Peers(address, 2, 0)
    with pytest.raises(FdgError, match="process 0 did not listen at localhost:"):
        peers.Peers(address, 2, 1)
