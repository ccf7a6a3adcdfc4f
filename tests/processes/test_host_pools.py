"""Environments on the host in several processes: one process has them, and the numbers are those of one."""

import json

import numpy as np

import envs
import fdg
import policies
from fdg.processes import ports
from tests.processes.hosted import Hosted
from tests.processes.test_distributed import finish, spawn

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
