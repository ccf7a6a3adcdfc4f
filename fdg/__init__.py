"""fdg: reinforcement learning as fragmented dataflow graphs, compiled by XLA.

An algorithm is written once, as pure functions; a distribution policy places its fragments on devices:

    algorithm = algos.PPO(env=envs.make("CartPole-v1"), num_envs=64)
    engine = fdg.compile(algorithm, policies.GPUOnly())
    state = engine.init(seed=0)
    state, metrics = engine.run(state, iterations=10)

or, with all that `python -m fdg.train` does (a run directory, evaluation, checkpoints):

    run = fdg.fit(algorithm, policies.GPUOnly(), total_steps=100_000)
    action = run.policy(observation)
    run = fdg.load(run.path)  # later, in another process
"""

import fdg.hidden_modules  # first: it explains imports that fail because of a user's file

# isort: split
import importlib
import warnings
from typing import TYPE_CHECKING, Any

import fdg.ctrl_c
import fdg.showing  # noqa: F401 - defines how graphs and plans print
from fdg import shadowing
from fdg.agents import agents
from fdg.arguments import explain_frozen
from fdg.bfloat16 import in_bfloat16
from fdg.engine import Engine, compile
from fdg.errors import FdgError, FdgWarning, GraphError, PlanError, RunError, UnknownNameError
from fdg.fragment import fragment
from fdg.loops import expect_trips
from fdg.placing.place import place
from fdg.placing.plans import Plan, SteppedPlan
from fdg.placing.policy import Group, Policy
from fdg.process_exit import is_command
from fdg.profiling.measuring import profile
from fdg.profiling.report import Profile
from fdg.public_names import no_attribute
from fdg.rowwise import rowwise
from fdg.running.host_devices import host_devices, reserve_threads
from fdg.running.program import Program
from fdg.running.program_cache import keep_programs
from fdg.shadowing import ALIASED_PACKAGES, shadowed_package, unimportable_folder
from fdg.stream import Source, Stream
from fdg.tracing.graph import FDG, Edge
from fdg.tracing.trace import trace

if TYPE_CHECKING:
    import algos as algos
    import envs as envs
    import policies as policies
    from fdg.training.comparison import compare
    from fdg.training.difference import diff, record
    from fdg.training.exported import load_exported
    from fdg.training.fit import fit
    from fdg.training.loading import load
    from fdg.training.run import Run
    from fdg.training.sweep import Sweep
    from fdg.training.sweeping import search, sweep

__all__ = [
    "FDG",
    "Edge",
    "Engine",
    "FdgError",
    "FdgWarning",
    "GraphError",
    "Group",
    "Plan",
    "PlanError",
    "Policy",
    "Profile",
    "Program",
    "Run",
    "RunError",
    "Source",
    "Stream",
    "Sweep",
    "UnknownNameError",
    "agents",
    "compare",
    "compile",
    "diff",
    "expect_trips",
    "fit",
    "fragment",
    "host_devices",
    "in_bfloat16",
    "keep_programs",
    "load",
    "load_exported",
    "place",
    "profile",
    "record",
    "rowwise",
    "search",
    "sweep",
    "trace",
]
__version__ = "0.2.0"

# Public name -> its module, imported on first use, since it imports `algos` and `envs`, which import fdg.
_LAZY_NAMES = {
    "Run": "fdg.training.run",
    "Sweep": "fdg.training.sweep",
    "compare": "fdg.training.comparison",
    "diff": "fdg.training.difference",
    "fit": "fdg.training.fit",
    "load": "fdg.training.loading",
    "load_exported": "fdg.training.exported",
    "record": "fdg.training.difference",
    "search": "fdg.training.sweeping",
    "sweep": "fdg.training.sweeping",
}

# What to write instead of commands and other libraries' names, which users call as functions of fdg.
_SUGGESTIONS = {
    "train": "write fdg.fit(algorithm, total_steps=N)",
    "Trainer": "write fdg.fit(algorithm, total_steps=N)",
    "evaluate": "write fdg.load(RUN).evaluate()",
    "play": "write fdg.load(RUN).play('video.mp4')",
    "export": "write fdg.load(RUN).export('policy.onnx')",
    "answer": "write fdg.load(RUN).answer([prompt])",
    "plot": "write fdg.training.curves.plot_runs([RUN])",
    "plan": "write fdg.place(algorithm, policy, devices)",
    "make": "write envs.make(name) and algos.make(name, env)",
    "run": "write fdg.compile(algorithm, policy), and call run of that engine",
}


def __getattr__(name: str) -> Any:
    if name in ALIASED_PACKAGES:
        return importlib.import_module(f"fdg.{name}")
    if name in _LAZY_NAMES:
        return getattr(importlib.import_module(_LAZY_NAMES[name]), name)
    raise no_attribute(__name__, name, __all__, _SUGGESTIONS.get(name))


# Frozen class -> the word for its instances in error messages.
_NOUNS = {FDG: "graph", Edge: "edge", Plan: "plan", SteppedPlan: "plan", Profile: "profile", Stream: "stream"}
for _cls, _noun in _NOUNS.items():
    explain_frozen(_cls, _noun)
shadowing.install_aliases()
reserve_threads()  # for host devices configured before this import
if not is_command() and (_problem := shadowed_package() or unimportable_folder()):  # commands report it
    warnings.warn(_problem, FdgWarning, stacklevel=2)
