"""Environments on the host in several processes: one process has them, and the numbers are those of one."""

import json
import re

import numpy as np

import envs
import fdg
import policies
from fdg.processes import ports
from tests.processes.hosted import Hosted
from tests.processes.test_distributed import finish, spawn, start

# The environments live with process 1.
SCRIPT = """
import json, sys, jax, envs, fdg
from envs import host
from fdg.processes import distributed
from tests.processes.hosted import Hosted, WorkersLast
index = int(sys.argv[2])
distributed.initialize(sys.argv[1], 2, index)
engine = fdg.compile(Hosted(envs.make("envpool:CartPole-v1")), WorkersLast(), jax.devices())
state = engine.init(3)
assert host.running() == index, (index, host.running())
state, metrics = engine.run(state, 5)
metrics = distributed.fetch(metrics)
assert host.running() == index
if index == 0:
    print(json.dumps({name: values.tolist() for name, values in metrics.items()}))
distributed.leave()
"""


def test_only_the_process_that_steps_them_starts_them(devices):
    address = f"localhost:{ports.free_port('localhost')}"
    said = finish([spawn("-c", SCRIPT, address, str(i)) for i in range(2)])
    assert [status for *_, status in said] == [0, 0], said
    engine = fdg.compile(Hosted(envs.make("envpool:CartPole-v1")), policies.GPUOnly(), devices[:1])
    _, alone = engine.run(engine.init(3), 5)
    together = json.loads(said[0][0].splitlines()[-1])
    for name, values in alone.items():
        np.testing.assert_allclose(together[name], values, rtol=1e-6, err_msg=name)
    assert len(set(together["weight"])) == 5


def test_the_others_hear_of_a_function_that_exits(tmp_path):
    """It runs in process 0, and would end the other with no more than a lost connection."""
    words = "--algo tests.lowering.calling:Calling --fault exit --policy single_learner_coarse --devices 2"
    (_, err, first), (_, other_err, other) = finish(start(f"{words} --out {tmp_path / 'run'}"), 100)
    line = "fragment 'step' (environment): ask called os._exit(7)"
    assert (first, other) == (7, 7), (err, other_err)
    assert err == f"error: {line}\n"
    # Among what JAX's own threads may log, which lose process 0 at the same time.
    said = rf"^error: process 0 \(host .*, pid \d+\) failed: {re.escape(line)}$"
    assert len(re.findall(said, other_err, re.MULTILINE)) == 1, other_err
