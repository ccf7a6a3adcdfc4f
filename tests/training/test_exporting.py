"""Exported policies: actions match the run's, in a process without fdg and in ONNX too."""

import io
import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import algos
import envs
import fdg
from fdg.errors import FdgError
from fdg.export import main as export_main
from tests.refusing import refuses
from tests.training.own import Guesser
from tests.training.trained import fitted, small

CASES = {
    "ppo": small(normalize_observation=True),
    "recurrent_ppo": small("recurrent_ppo", memory_size=8),
    "sac": small("sac", "Pendulum-v1", hidden=(8,), buffer_size=64, batch_size=8, updates_per_step=0.25),
    "dqn": small("dqn", hidden=(8,), buffer_size=64, batch_size=8, learning_starts=0, dueling=True),
    "images": small(env="Breakout-MinAtar", num_envs=2, num_steps=2),
    "gaussian": small(env="Pendulum-v1"),
    "agents": small("ippo", "probe:agents"),
}


@pytest.fixture(scope="module", params=CASES)
def run(request):
    algorithm = CASES[request.param]
    state = jax.jit(algorithm.init)(jax.random.key(1))
    return fdg.Run(algorithm, state, 0)


def observations(run, count=1000):
    env = run.algorithm.env
    agents = () if envs.num_agents(env) is None else (envs.num_agents(env),)
    key = jax.random.key(7)
    return np.asarray(jax.random.normal(key, (count, *agents, *env.observation_space.shape)), np.float32)


class Half:
    """Acts by the sum of its observations, in bfloat16."""

    env, steps_per_iteration = envs.make("CartPole-v1"), 8

    def init(self, key):
        return {}

    def iterate(self, state):
        return state, {}

    def actor(self, state):
        def act(memory, observation, start, keys, greedy):
            memory = jnp.where(start, 0, memory) + observation[:, 0].astype(jnp.bfloat16)
            return (memory > 0.1).astype(jnp.int32), memory

        return algos.Actor(memory=lambda count: jnp.zeros(count, jnp.bfloat16), act=act)


def test_bfloat16_memory(tmp_path):
    run = fdg.Run(Half(), {}, 0)
    policy, seen = fdg.load_exported(run.export(tmp_path / "policy.jax")), observations(run, 9)
    for _ in range(2):
        np.testing.assert_array_equal(policy(seen), run.policy(seen))
    assert policy.memory[0].dtype == jnp.bfloat16


def test_onnx_actions_match(run, tmp_path, caplog):
    pytest.importorskip("jax2onnx")
    runtime = pytest.importorskip("onnxruntime")
    session = runtime.InferenceSession(str(run.export(tmp_path / "policy.onnx")))
    assert not [record for record in caplog.records if record.name.startswith("onnx_ir")]
    seen = observations(run)
    memory = jax.tree.leaves(run.actor().memory(len(seen)))
    start = np.ones(len(seen), bool)
    for _ in range(2):
        arguments = [seen, *map(np.asarray, memory), *([start] if memory else [])]
        names = [one.name for one in session.get_inputs()]
        action, *memory = session.run(None, dict(zip(names, arguments, strict=True)))
        expected = run.policy(seen, start=start)
        start = np.zeros(len(seen), bool)
        np.testing.assert_allclose(action, expected, rtol=1e-4, atol=1e-5)
        assert action.dtype == expected.dtype and action.shape == expected.shape


def test_starts_masks_and_seeds_that_do_not_fit(tmp_path):
    algorithm = small(env="probe:masked")
    run = fdg.Run(algorithm, jax.jit(algorithm.init)(jax.random.key(1)), 0)
    policy = fdg.load_exported(run.export(tmp_path / "policy.jax", greedy=False))
    seen, mask = np.zeros((2, *algorithm.env.observation_space.shape), np.float32), np.ones((2, 3), bool)
    for act in (run.policy, policy):
        for start in ([True, False, True], "yes"):
            with refuses(f"start={start!r}: give a bool, or one for each of 2 observations"):
                act(envs.MaskedObservation(seen, mask), start=start)
        for other in (mask[0], mask[:, :2], np.ones((3, 3), bool)):
            with pytest.raises(FdgError, match=r"action mask of shape \["):
                act(envs.MaskedObservation(seen, other))
        assert act(envs.MaskedObservation(seen, mask), start=np.float32([1, 0])).shape == (2,)
    for seed in (-1, 2**32):
        with refuses(f"seed={seed}: give an integer from 0 to 4294967295"):
            policy(envs.MaskedObservation(seen, mask), seed=seed)


def test_command_line(tmp_path, capsys):
    run = fitted(tmp_path / "run", Guesser(), iterations=1)
    assert export_main([str(run.path), "--trust"]) == 0
    assert capsys.readouterr().out == f"{run.path / 'policy.jax'}\n"
    assert fdg.load_exported(run.path / "policy.jax")(np.eye(4)).tolist() == run.policy(np.eye(4)).tolist()
    assert export_main([str(run.path), "--trust", "--format", "tflite"]) == 2
    assert "it must be one of jax, onnx" in capsys.readouterr().err


def test_exported_policy_needs_no_fdg(package, tmp_path):
    """Runs an exported policy in a process that imports neither fdg nor Flax."""
    path = tmp_path / "policy.jax"
    path.write_bytes(package)
    code = f"""
import sys, zipfile, jax, numpy
with zipfile.ZipFile({str(path)!r}) as file:
    policy = jax.export.deserialize(bytearray(file.read("policy.jax")))
print(numpy.asarray(policy.call(numpy.eye(4, dtype="float32"))[0]).tolist())
assert not {{"fdg", "algos", "envs", "flax"}} & set(sys.modules)
"""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=True
    )
    assert json.loads(result.stdout) == fdg.load_exported(path)(np.eye(4)).tolist()
    assert set(zipfile.ZipFile(path).namelist()) == {"policy.jax", "policy.json", "memory.npz"}


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    algorithm = CASES["ppo"]
    run = fdg.Run(algorithm, jax.jit(algorithm.init)(jax.random.key(1)), 0)
    return run.export(tmp_path_factory.mktemp("package") / "policy.jax").read_bytes()


def test_bit_flips_are_detected(package, tmp_path):
    path, rng = tmp_path / "policy.jax", np.random.default_rng(0)
    for at in rng.integers(0, 8 * len(package), 200):
        flipped = bytearray(package)
        flipped[at // 8] ^= 1 << at % 8
        path.write_bytes(flipped)
        with pytest.raises(FdgError, match="is not an exported policy"):
            fdg.load_exported(path)


def repacked(path, package, **changes):
    """Writes a package with other members and no checksum, as earlier versions did."""
    with (
        zipfile.ZipFile(io.BytesIO(package)) as read,
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file,
    ):
        for name in read.namelist():
            file.writestr(name, changes.get(name.replace(".", "_"), read.read(name)))
    return path


def custom_call(name):
    """A serialised program that calls a native function of the process."""
    shape = jax.ShapeDtypeStruct((4,), jnp.float32)
    checks = [jax.export.DisabledSafetyCheck.custom_call(name)]
    function = jax.jit(jax.ffi.ffi_call(name, shape))
    return bytes(jax.export.export(function, disabled_checks=checks)(shape).serialize())


@pytest.mark.parametrize("shape", [(), (2,), (0,)])
def test_memory_of_another_shape_is_refused(tmp_path, shape):
    run = fdg.Run(Half(), {}, 0)
    package = run.export(tmp_path / "policy.jax").read_bytes()
    memory = io.BytesIO()
    np.savez(memory, np.zeros(shape, jnp.bfloat16))
    with refuses(f"its memory has shape {list(shape)}, expected [1, ...]"):
        fdg.load_exported(repacked(tmp_path / "other.jax", package, memory_npz=memory.getvalue()))


def test_other_jax_versions_are_named(package, tmp_path):
    """The error names both versions and the fix; with equal versions, an invalid program is damage."""
    path = tmp_path / "policy.jax"
    with zipfile.ZipFile(io.BytesIO(package)) as read:
        facts = json.loads(read.read("policy.json"))
    assert facts["jax"] == jax.__version__
    assert facts["calling_convention"] == jax.export.maximum_supported_calling_convention_version
    for version in (1, 99):
        other = json.dumps({**facts, "jax": "0.4.1", "calling_convention": version})
        with pytest.raises(FdgError, match=rf"by JAX 0\.4\.1, which JAX .* {version}, .*: export again, or"):
            fdg.load_exported(repacked(path, package, policy_json=other))
    old = json.dumps({**facts, "jax": "0.4.1"})
    with pytest.raises(FdgError, match=r"written by JAX 0\.4\.1"):
        fdg.load_exported(repacked(path, package, policy_json=old, policy_jax=b"nothing"))
    with pytest.raises(FdgError, match="is not an exported policy"):
        fdg.load_exported(repacked(path, package, policy_jax=b"nothing"))


def test_old_and_tampered_packages(package, tmp_path):
    path = tmp_path / "policy.jax"
    with zipfile.ZipFile(io.BytesIO(package)) as read:
        facts = json.loads(read.read("policy.json"))
    assert fdg.load_exported(repacked(path, package)).facts == facts
    earlier = {key: facts[key] for key in ("arguments", "actions", "environment")}
    earlier["observation"] = {"shape": ["N", 4], "dtype": "float32"}
    read = fdg.load_exported(repacked(path, package, policy_json=json.dumps(earlier)))
    assert read(np.zeros((2, 4))).shape == (2,)

    def refused(message, **changes):
        with refuses(match=message):
            fdg.load_exported(repacked(path, package, **changes))

    refused("bytes that inflate to 300000", policy_jax=bytes(300_000_000))
    refused("calls 'xla_ffi_python_cpu_callback'", policy_jax=custom_call("xla_ffi_python_cpu_callback"))
    wide = {**facts, "observation": {"shape": ["N", 5], "dtype": "float32"}}
    refused(r"float32 \[5\], where its program has float32\[N,4\]", policy_json=json.dumps(wide))
    refused("its arguments are not", policy_json=json.dumps({**facts, "arguments": ["observation", "mask"]}))
    refused("observation has ..parts.*shape", policy_json=json.dumps({**facts, "observation": {"parts": {}}}))
    refused("its actions or results do not match", policy_json=json.dumps({**facts, "actions": "both"}))
    path.write_bytes(package[:-100] + package[-100:].replace(b"sha256:", b"sha999:"))
    with pytest.raises(FdgError, match="it is damaged"):
        fdg.load_exported(path)


def test_documented_onnx_loop(tmp_path, monkeypatch):
    text = (Path(__file__).parents[2] / "docs" / "using.md").read_text()
    (block,) = [one for one in re.findall(r"```py\n(.*?)```", text, re.DOTALL) if "next_{name}" in one]
    algorithm = CASES["recurrent_ppo"]
    run = fdg.Run(algorithm, jax.jit(algorithm.init)(jax.random.key(1)), 0)
    monkeypatch.chdir(tmp_path)
    run.export("policy.onnx")
    seen = observations(run, 4)
    actions: list = []
    kept = block.replace("    memory = {name:", "    actions.append(action)\n    memory = {name:")
    exec(kept, {"observations": seen, "actions": actions})
    assert len(actions) == 4
    assert [int(one) for one in actions] == [int(run.policy(one)) for one in seen]
