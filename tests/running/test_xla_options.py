"""Options for XLA's compiler: unknown options are left out, and options given by the user take precedence."""

import jax
import jax.numpy as jnp
import pytest

import fdg
import policies
from fdg.errors import FdgError
from fdg.profiling.repeating import Repeated, compile_all
from fdg.profiling.sites import inputs_of
from fdg.running import program, xla_options
from fdg.running.xla_options import PRESETS, choose_xla_options
from fdg.training.collecting import collect
from fdg.training.evaluation import random_returns
from tests.tiny import Walk
from tests.training.own import Guesser


@pytest.fixture(autouse=True)
def _reset_options(monkeypatch):
    monkeypatch.setattr(xla_options, "has_wide_vectors", lambda: False)
    monkeypatch.setattr(xla_options, "_LOW_OPTIMIZATION", {})
    yield
    choose_xla_options(None)


def test_preset_omits_unknown_options_and_those_of_the_user(monkeypatch):
    known = {"xla_gpu_triton_gemm_any": True, "xla_gpu_graph_min_graph_size": 2}
    monkeypatch.setattr(xla_options, "PRESETS", {"gpu": {**known, "xla_gpu_of_another_day": 1}})
    assert xla_options.xla_options("gpu") == {}
    choose_xla_options("preset")
    assert xla_options.xla_options("cuda") == known
    assert xla_options.xla_options("cpu") == {}
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_graph_min_graph_size=7")
    assert xla_options.xla_options("gpu") == {"xla_gpu_triton_gemm_any": True}


def test_wide_vectors_by_default(monkeypatch):
    monkeypatch.setattr(xla_options, "has_wide_vectors", lambda: True)
    wide = {"xla_cpu_prefer_vector_width": 512}
    assert xla_options.xla_options("cpu") == wide and xla_options.xla_options("gpu") == {}
    choose_xla_options("preset")
    assert xla_options.xla_options("cpu") == wide
    choose_xla_options("none")
    assert xla_options.xla_options("cpu") == {}
    choose_xla_options(None)
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_prefer_vector_width=256")
    assert xla_options.xla_options("cpu") == {}


def test_optimization_level_1_by_default(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(xla_options, "has_wide_vectors", lambda: False)
    monkeypatch.setenv("XLA_FLAGS", "")
    assert xla_options.xla_options("cpu") == {"xla_backend_optimization_level": 1}
    assert xla_options.xla_options("gpu") == {}
    monkeypatch.setenv("XLA_FLAGS", "--xla_backend_optimization_level=3")
    assert xla_options.xla_options("cpu") == {}
    monkeypatch.setenv("XLA_FLAGS", "")
    choose_xla_options("none")
    assert xla_options.xla_options("cpu") == {}


def test_presets_are_known_to_the_installed_xla():
    choose_xla_options("preset")
    for platform, preset in PRESETS.items():
        assert xla_options.xla_options(platform) == preset


def test_programs_are_compiled_with_the_options():
    compiled_with = []
    engine = fdg.compile(Walk(), policies.GPUOnly(), jax.devices()[:1])
    choose_xla_options("xla_cpu_emitter_verification_level=0")
    lowered = engine.programs[0].function.lower(*engine.programs[0].arguments)

    class Function:
        def lower(self, *_):
            return self

        def compile(self, compiler_options=None):
            compiled_with.append(compiler_options)
            return lowered.compile(compiler_options=compiler_options)

    engine.programs[0].function = Function()
    engine.compile()
    assert compiled_with == [{"xla_cpu_emitter_verification_level": 0}]


def test_profiles_compile_with_the_options():
    choose_xla_options("xla_gpu_quick=true")
    with pytest.raises(FdgError, match="No such compile option"):
        compile_all([Repeated(lambda x: [x + 1], [jnp.float32(1)])])
    graph = fdg.trace(Walk())
    with pytest.raises(FdgError, match="No such compile option"):
        inputs_of(graph, jax.tree.leaves(Walk().init(jax.random.key(0))))


@pytest.mark.parametrize(
    "use",
    [
        lambda run, path: run.policy(jnp.zeros(4)),
        lambda run, path: run.play(path / "video.gif", max_steps=2),
        lambda run, path: pytest.importorskip("h5py") and collect(run, path / "data", 8),
        lambda run, path: random_returns(run.algorithm.env, 2),
    ],
)
def test_programs_of_runs_have_the_options_of_training(use, tmp_path):
    run = fdg.Run(Guesser(), Guesser().init(jax.random.key(0)), 0)
    choose_xla_options("xla_of_another_day=1")
    with pytest.raises(FdgError, match="No such compile option"):
        use(run, tmp_path)


@pytest.mark.parametrize("makes_function", [False, True])
def test_fallback_to_the_older_emitter(monkeypatch, makes_function):
    """Of training's programs, and of functions that are jitted, which keep it for later calls."""
    jitted, tried = jax.jit, []
    older = {"xla_cpu_use_fusion_emitters": False}
    monkeypatch.setattr(xla_options, "_refusal_reason", lambda name, value: "" if name in older else "no")

    class Failing:
        def __init__(self, message, options=None):
            self.message, self.options = message, options

        def compile(self, compiler_options=None):
            tried.append(compiler_options or {})
            if tried[-1] != older:
                raise jax.errors.JaxRuntimeError(self.message)
            return jitted(lambda x: x + 1)

        def __call__(self, x):
            return self.compile(self.options)(x)

    def made(message):
        if not makes_function:
            return program.compile_lowered(Failing(message), "cpu")
        monkeypatch.setattr(jax, "jit", lambda function, compiler_options: Failing(message, compiler_options))
        return xla_options.jit(None, "cpu")

    function = made("UNKNOWN: Unknown MLIR failure")
    assert function(1.0) == function(1.0) == 2.0
    assert tried == [{}, older] + [older] * makes_function
    for message, platform in (("RESOURCE_EXHAUSTED", "cpu"), ("Unknown MLIR failure", "gpu")):
        assert xla_options.older_emitter_options(platform, ValueError(message)) is None
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE"):
        made("RESOURCE_EXHAUSTED")(1.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fast", "'fast' is not NAME=VALUE"),
        ("xla_a=1,xla_a=2", "xla_a is given twice: give it once"),
        ("xla_gpu_quick=true", "No such compile option: 'xla_gpu_quick'"),
        ("xla_gpu_enable_command_buffer=WARP", "not a valid enum value"),
    ],
)
def test_invalid_options(text, message):
    with pytest.raises(FdgError, match=message):
        choose_xla_options(text)
        xla_options.xla_options("cpu")
