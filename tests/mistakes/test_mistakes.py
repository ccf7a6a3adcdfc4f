"""Errors and warnings for common mistakes in Python name the cause and the fix."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import algos
import envs
import fdg
import policies
from algos.values import Network
from fdg.errors import FdgError, FdgWarning
from tests.mistakes import algorithms as broken
from tests.mistakes import environments as faulty
from tests.mistakes import environments_table
from tests.mistakes.helpers import (
    ENV,
    SLOTS,
    Roleless,
    attempt,
    branches_on_observation,
    evaluate,
    logs_observation,
    network,
    place,
    ppo,
    run_from,
    run_without_iterations,
    with_net,
)
from tests.tiny import Pupil

# STATES: (additional initial state of `Counter`, cause, fix). RESULTS: (`iterate`, cause, fix).
STATES = {
    "a word in the state": ({"name": "mine"}, "state['name'] as the str 'mine'", "leave it out"),
    "a function in the state": ({"act": jnp.tanh}, "state['act']", "a field of the"),
    "text in an array": (
        {"words": np.array(["a", "b"])},
        "state['words'] as an array of <U1",
        "leave it out",
    ),
    "beyond 32 bits": ({"steps": 2**40}, "state['steps'] as 1099511627776", "a smaller"),
}
RESULTS = {
    "no metrics": (lambda state: state, "returned dict", "return (state, metrics)"),
    "a list of metrics": (lambda state: (state, [1.0]), "type list", "return a flat dict"),
    "a metric of None": (lambda state: (state, {"loss": None}), "'loss' as None", "leave it out"),
    "a metric of text": (lambda state: (state, {"phase": "warm-up"}), "'phase' as 'warm-up'", "are numbers"),
    "four metrics in one": (lambda state: (state, {"xs": state["xs"]}), "shape (4,)", "jnp.mean"),
    "a numbered metric": (lambda state: (state, {0: state["count"]}), "named 0", "use a string"),
    "a field that is lost": (lambda s: ({"count": s["count"]}, {}), "another structure", "keep every field"),
    "another dtype": (
        lambda s: ({**s, "count": s["count"] * 0.5}, {}),
        "from int32[] to float32[]",
        "return the shape and",
    ),
    "a word as next state": (
        lambda s: ({**s, "count": "one"}, {}),
        "iterate returns state['count']",
        "leave",
    ),
}
# (call, cause in the error message, fix in the error message)
MISTAKES = {
    **environments_table.MISTAKES,
    "a class of another notebook": (
        lambda: envs.make("__main__:Gone"),
        "'__main__:Gone' is from a script or notebook that is not this program",
        "move it into a module",
    ),
    # hyperparameters
    "a list of widths": (lambda: ppo(hidden=[64, 64]), "hidden=[64, 64]", "write hidden=(64, 64)"),
    "a number as widths": (lambda: ppo(hidden=64), "a tuple of integers", "write hidden=(64,)"),
    "a word as number": (lambda: ppo(learning_rate="1e-3"), "it must be a number", "learning_rate=0.001"),
    "a float as number": (lambda: ppo(num_envs=4.0), "it must be an integer", "write num_envs=4"),
    "True as number": (lambda: ppo(num_steps=True), "num_steps=True", "it must be an integer"),
    "not a number": (lambda: ppo(discount=float("nan")), "discount=nan", "it must be a number"),
    "a schedule as number": (
        lambda: ppo(learning_rate=lambda progress: 1e-3 * progress),
        "it must be a number",
        "anneal_learning_rate=True to decrease it linearly, or give optimizer=optax.adam(schedule)",
    ),
    "a device": (
        lambda: ppo(device="cuda"),
        "unknown hyperparameter of PPO 'device'",
        "devices=N says how many",
    ),
    "keywords of a network": (
        lambda: ppo(policy_kwargs={}),
        "'policy_kwargs'",
        "set by hidden and activation, or",
    ),
    "training by a method": (lambda: ppo().train(), "PPO has no train", "fdg.fit(algorithm, total_steps=N)"),
    "a third by position": (
        lambda: algos.make("ppo", ENV, 4),
        "make: 4 is one positional argument too many",
        "only name and env may be positional; give it by name",
    ),
    "an unknown activation": (lambda: ppo(activation="Tanh"), "'tanh', 'relu'", "write activation='tanh'"),
    "an unknown hyperparameter": (
        lambda: ppo(learning_rte=1.0),
        "unknown hyperparameter",
        "'learning_rate'?",
    ),
    "zero environments": (lambda: ppo(num_envs=0), "num_envs=0", "it must be above zero"),
    "infinitely many updates": (
        lambda: algos.DQN(env=ENV, updates_per_step=float("inf")),
        "updates_per_step=inf",
        "a whole number",
    ),
    "an algorithm that cannot act there": (lambda: algos.SAC(env=ENV), "cannot act in", "Discrete(n=2)"),
    # networks
    "a pair of functions": (
        lambda: ppo(network=(len, len)),
        "algos.Network",
        "write network=algos.Network(*network)",
    ),
    "a function as network": (lambda: ppo(network=len), "network=<built-in", "an algos.Network(init, apply)"),
    "a head too wide": (lambda: fdg.trace(ppo(network=network((3,), ()))), "float32[4, 3]", "must be [4, 2]"),
    "a head too narrow": (
        lambda: fdg.trace(ppo(network=network((1,), ()))),
        "2 numbers for",
        "must be [4, 2]",
    ),
    "a value with an axis": (lambda: fdg.trace(ppo(network=network((2,), (1,)))), "[4, 1]", "value[..., 0]"),
    "values too wide": (
        lambda: fdg.trace(
            algos.DQN(
                env=ENV,
                network=Network(lambda k, o: {"w": jnp.zeros(1)}, lambda p, o: jnp.zeros((o.shape[0], 3))),
            )
        ),
        "[8, 3]",
        "it must be [8, 2]",
    ),
    "no value at all": (
        lambda: fdg.trace(
            ppo(network=Network(lambda k, o: {"w": jnp.zeros(1)}, lambda p, o: jnp.zeros((o.shape[0], 2))))
        ),
        "the network gives float32[4, 2]",
        "a pair, (policy [4, P], value [4])",
    ),
    "a third output": (
        with_net(lambda p, x: (x @ p["policy"], x @ p["value"], x)),
        "the network gives",
        "a pair, (policy [4, P], value [4])",
    ),
    "if in a network": (with_net(branches_on_observation), "(`x = 2 * x if", "use jnp.where"),
    "float() in a network": (
        with_net(lambda p, x: (x @ p["policy"], float(x.sum()) * p["value"])),
        "PPO, line",
        "keep it an array",
    ),
    "NumPy in a network": (with_net(lambda p, x: (np.sin(x), x)), "PPO, line", "use jax.numpy"),
    "unknown parameters": (with_net(lambda p, x: (x @ p["actor"], x)), "PPO, line", "KeyError: 'actor'"),
    "a product that does not fit": (with_net(lambda p, x: (p["policy"] @ x, x)), "PPO, line", "dot_general"),
    "a network that logs": (with_net(logs_observation), "LOG[", "a traced value without a number"),
    # algorithms
    **{name: (broken.with_state(**more), *words) for name, (more, *words) in STATES.items()},
    **{name: (broken.with_iterate(iterate), *words) for name, (iterate, *words) in RESULTS.items()},
    "a space of another kind": (
        lambda: fdg.trace(broken.ForChoices(envs.make("Pendulum-v1"))),
        'of algorithms.py (`return {**super().init(key), "weights": jnp.zeros(self.env.action_space.n)}`)',
        "it is Box(low=-2.0, high=2.0, shape=(1,), dtype='float32'), and the code is for another kind",
    ),
    "a class as algorithm": (lambda: fdg.trace(broken.Counter), "is a class", "write Counter(...)"),
    "no algorithm": (lambda: fdg.trace("ppo"), "str has no method init", "init(key) -> state"),
    "no key": (broken.counter(init=lambda self: {}), "init takes ()", "is called with (key)"),
    "no state": (broken.counter(init=lambda self, key: None), "init returned None", "return the state"),
    "a key too many": (
        broken.counter(iterate=lambda self, key, state: (state, {})),
        "takes (key, state)",
        "called with (state)",
    ),
    "another name": (broken.ReadsMissingField, "line", "raises KeyError: 'step'"),
    "unlike shapes": (broken.AddsUnlikeShapes, "(`return", "shapes for broadcasting: (4,), (3,)"),
    "if": (broken.BranchesOnTracer, "algorithms.py (`if state", "jnp.where, jax.lax.cond"),
    "while": (broken.LoopsWhile, "(`while state", "jax.lax.while_loop"),
    "float()": (broken.TakesAFloat, "needs the number", "keep it an array"),
    "NumPy": (broken.CallsNumPy, "NumPy was given a traced", "use jax.numpy"),
    "an index of a list": (broken.IndexesAList, "index a list", "jnp.stack"),
    "a mask as index": (broken.MasksAnArray, "a traced mask", "jnp.where(mask"),
    "range()": (broken.RangesOverATracer, "RangesOverATracer.iterate, line", "lengths from"),
    "self.n += 1": (broken.CountsInSelf, "assigns self.n = 1, which was 0", "in the state"),
    "a tracer that is kept": (broken.StoresATracer, "assigns self.last", "in the state"),
    "a tracer in a list outside": (
        broken.LogsATracer,
        "LogsATracer.iterate assigns tests.mistakes.algorithms.LOG[",
        "return it as a metric",
    ),
    "a list in a fragment's object": (
        lambda: fdg.trace(broken.WithFragment([1])),
        "its field widths is a list",
        "make it a tuple",
    ),
    "a fragment of what cannot be hashed": (
        broken.Unhashable,
        "cannot be hashed",
        "make it a dataclass(frozen=True)",
    ),
    "an axis too far": (lambda: fdg.trace(broken.AxisTooFar("")), "batch axis 1 but shape (8,)", "below 1"),
    "axes that differ": (lambda: fdg.trace(broken.AxesThatDiffer("")), "differ in size", "in_axes/out_axes"),
    "one axis too many": (lambda: fdg.trace(broken.OneAxisTooMany("")), "names 2 arguments", "for each"),
    "a state of two agents": (lambda: evaluate(many=True), "of 2 agents (num_seeds)", "jax.vmap"),
    "a state of something else": (lambda: evaluate(many=False), "dict is not its state", "init or run"),
    # policies and devices
    "a class as policy": (lambda: place(policy=policies.GPUOnly), "is a class", "write GPUOnly()"),
    "a name as policy": (
        lambda: place(policy="gpu_only"),
        "is the name of a policy",
        "policies.get('gpu_only')()",
    ),
    "no policy": (lambda: place(policy=3), "3 is not a policy", "policies.GPUOnly()"),
    "a network as policy": (
        lambda: place(policy="MlpPolicy"),
        "a network, which follows from the observation",
        "leave it out",
    ),
    "a network by a policy's name": (
        lambda: policies.get("CnnLstmPolicy"),
        "'CnnLstmPolicy' is a network",
        "leave it out",
    ),
    "a network as environment": (
        lambda: algos.PPO("MultiInputPolicy", ENV),
        "env='MultiInputPolicy' is a network",
        "leave it out, and give the environment",
    ),
    "a network as hyperparameter": (
        lambda: ppo(policy="MlpPolicy"),
        "unknown hyperparameter of PPO 'policy'",
        "the network is set by hidden",
    ),
    "steps as policy": (
        lambda: fdg.fit(ppo(), 10_000),
        "10000 is not a policy",
        "name other arguments, as in total_steps=",
    ),
    "a policy that places numbers": (lambda: place(policy=Roleless()), "returned {'actor': 0}", "fdg.Group"),
    "numbers as devices": (lambda: place(devices=[0, 1]), "devices[0] is 0", "jax.devices()[:2]"),
    "more devices than there are": (
        lambda: fdg.compile(broken.Counter(), policies.GPUOnly(), 99),
        "devices=99: there are",
        "fdg.host_devices(99)",
    ),
    "an algorithm of nothing": (lambda: algos.PPO(), "PPO: env is missing", "envs.make('CartPole-v1')"),
    "a word as devices": (lambda: place(devices="cpu"), "devices='cpu'", "jax.devices()"),
    "a device twice": (lambda: place(devices=jax.devices()[:1] * 2), "twice, at 0 and 1", "each device once"),
    "no device": (lambda: place(devices=[]), "0 devices", "at least one"),
    "zero devices": (
        lambda: fdg.compile(Pupil(), policies.GPUOnly(), devices=0),
        "devices=0",
        "give a number from 1 to",
    ),
    "half an agent": (lambda: place(num_seeds=0.5), "num_seeds=0.5", "a whole number of agents"),
    "a role that nobody has": (
        lambda: place(policy=policies.SingleLearnerFine()),
        "has no fragment",
        "mark one with fdg.fragment",
    ),
    "a plan's graph, delayed": (
        lambda: place(fdg.place(Pupil(), policies.SingleLearnerCoarse(staleness=1), 2).graph),
        "already has its staleness",
        "fdg.trace",
    ),
    "another algorithm's state": (
        lambda: run_from({"count": 0, "x": jnp.zeros(4)}),
        "it has state['x'], and lacks state['xs']",
        "of an engine with the same algorithm",
    ),
    "a state of another size": (
        lambda: run_from({"count": 0, "xs": jnp.zeros(3)}),
        "state['xs'] is float32[3], not float32[4]",
        "and sizes",
    ),
    "a number as state": (lambda: run_from(5), "it is 5", "give a state from init or run"),
    "what run returned as state": (
        lambda: run_from((broken.Counter().init(None), {})),
        "this is the pair (state, metrics)",
        "give its first element",
    ),
    "take without a version": (
        lambda: SLOTS.take(SLOTS.init(jax.random.key(0)), 0),
        "take: state is missing",
        "write take(parameters, version, state)",
    ),
    "what take returned as state": (
        lambda: SLOTS.take({}, 0, ({}, SLOTS.init(jax.random.key(0)))),
        "this is the pair (rows, state)",
        "give its second element",
    ),
    "something else as state of a stream": (
        lambda: SLOTS.take(SLOTS.init(jax.random.key(0)), {}, 0),
        "take: 0 is not a state",
        "take(parameters, version, state)",
    ),
    "a range without its kind": (
        lambda: fdg.sweep(ppo(), {"learning_rate": "1e-4..1e-2"}, total_steps=8),
        "is a range",
        "learning_rate=log:1e-4..1e-2x8",
    ),
    "no file of a policy": (
        lambda: fdg.load_exported(__file__),
        "is not an exported policy",
        "give the .jax file that run.export or fdg.export wrote",
    ),
    **{
        f"a sweep of {name}": (
            lambda name=name, values=values: fdg.sweep(ppo(), {name: values}, total_steps=8),
            f"{name} of PPO is not a float",
            f"fdg.search(algorithm, {{'{name}': [...]}})",
        )
        for name, values in {
            "hidden": [(64, 64), (32,)],
            "activation": ["tanh", "relu"],
            "num_steps": [2, 4],
            "env": [ENV],
        }.items()
    },
    "numbers to search for widths": (
        lambda: fdg.search(ppo(), {"hidden": [64, 128]}, trials=1, total_steps=8),
        "PPO(hidden=64)",
        "a tuple of integers",
    ),
    "no iterations": (run_without_iterations, "iterations=0", "at least 1"),
    "more host devices, too late": (
        lambda: fdg.host_devices(3),
        "JAX has already started, with 8",
        "call it before",
    ),
    "no host device": (lambda: fdg.host_devices(0), "host_devices(0)", "from 1"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_error_names_cause_and_fix(mistake, devices):
    do, cause, fix = MISTAKES[mistake]
    with pytest.raises(FdgError) as caught:
        attempt(do)
    text = str(caught.value)
    assert cause in text and fix in text, text
    assert "\n" not in text and len(text) < 400, text


WARNINGS = {
    "a role one letter off": (lambda: place(broken.OfRole("leaner")), "'leaner'", "did you mean 'learner'?"),
    "a role in capitals": (lambda: place(broken.OfRole("Actor")), "'Actor'", "did you mean 'actor'?"),
    "a role cut short": (lambda: place(broken.OfRole("env")), "'env'", "did you mean 'environment'?"),
    "NumPy's random numbers": (broken.DrawsWithNumPy, "of NumPy", "use jax.random"),
    "NumPy's random numbers by a generator": (broken.DrawsWithItsOwnNumPy, "of NumPy", "use jax.random"),
    "a count in a global": (broken.CountsInAGlobal, "TRACES['count'] to", "in the state"),
    "a constant key in step": (
        faulty.Noisy,
        "of environments.py (`noise = jax.random.normal(jax.random.key(0))`) draws from a constant key",
        "use the key that step is given",
    ),
    "a constant key": (broken.DrawsFromAConstant, "a constant key", "or a key in the state"),
    **{
        f"a key that stays: {wrong.__name__}": (
            wrong,
            "draws from state['key'], which it returns unchanged",
            "draw from draw_key and return key",
        )
        for wrong in (broken.Draws, broken.DrawsInAFragment, broken.DrawsInALoop, broken.DrawsFromAPart)
    },
    "Python's random numbers": (broken.DrawsWithPython, "of Python", "use jax.random"),
}


@pytest.mark.parametrize("mistake", WARNINGS)
def test_warning_names_cause_and_fix(mistake):
    do, cause, fix = WARNINGS[mistake]
    with pytest.warns(FdgWarning) as caught:
        attempt(do)
    (one,) = caught
    assert cause in str(one.message) and fix in str(one.message)


def test_valid_code_does_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fdg.place(ppo(), policies.SingleLearnerCoarse(), 2)
        fdg.place(broken.OfRole("dreamer"), policies.GPUOnly(), 2)
        envs.check(ENV)
        envs.check(faulty.Batch())
        envs.check(envs.vectorize(faulty.Corridor()))
        fdg.trace(broken.DrawsByCount())
        envs.make(f"{faulty.__name__}:parameters", slippery=True, size=3, scale=2, loud=False, layout="wide")


def test_training_past_total_steps_warns_once(devices):
    algorithm = ppo(total_steps=24, num_epochs=1, num_minibatches=1)
    engine = fdg.compile(algorithm, policies.GPUOnly(), devices[:1])
    state = engine.run(engine.init(0), 3)[0]
    with pytest.warns(FdgWarning, match="learns for 3 iterations .* anneal_learning_rate=False") as warned:
        state = engine.run(state, 1)[0]
    assert [one.filename for one in warned] == [__file__]  # the warning points to the caller
    engine.run(state, 1)


@pytest.mark.parametrize(
    "wrong",
    [
        value
        for value in vars(faulty).values()
        if isinstance(value, type)
        and hasattr(value, "reset")
        and not issubclass(value, envs.Wrapper)
        and value not in (faulty.Corridor, faulty.Batch)
    ],
)
def test_check_refuses_faulty_environments(wrong):
    with pytest.raises(FdgError):
        envs.check(wrong() if issubclass(wrong, faulty.Batch) else envs.vectorize(wrong()))
