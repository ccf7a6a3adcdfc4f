"""fdg: reinforcement learning as fragmented dataflow graphs, compiled by XLA.

An algorithm is written once, as pure functions; a distribution policy says on which devices each of
its fragments runs:

    algorithm = algos.PPO(env=envs.make("CartPole-v1"), num_envs=64)
    engine = fdg.compile(algorithm, policies.GPUOnly())
    state = engine.init(seed=0)
    state, metrics = engine.run(state, iterations=10)
"""

from fdg.engine import Engine, compile
from fdg.errors import FdgError, GraphError, PlanError, UnknownNameError
from fdg.execution import Program
from fdg.fragment import fragment
from fdg.graph import FDG, Edge
from fdg.host_devices import host_devices, reserve_threads
from fdg.placement import Plan, place
from fdg.tracing import trace

__all__ = [
    "FDG",
    "Edge",
    "Engine",
    "FdgError",
    "GraphError",
    "Plan",
    "PlanError",
    "Program",
    "UnknownNameError",
    "compile",
    "fragment",
    "host_devices",
    "place",
    "trace",
]
__version__ = "0.1.0"

reserve_threads()  # for host devices configured before this import
