"""Environments of `verifiers`, with a stub package and, where installed, with the real one."""

import re
import sys
from importlib.util import find_spec

import jax
import pytest

import envs
import fdg
from envs.text import verifiers
from tests.envs import stand_in_verifiers
from tests.refusing import refuses

SUMS = """
import asyncio
import verifiers.v1 as vf


class Config(vf.TasksetConfig):
    largest: int = 3
    polite: bool = False


class Data(vf.TaskData):
    answer: str


class Sum(vf.Task[Data]):
    @vf.reward
    async def right(self, trace):
        await asyncio.sleep(0)
        said = trace.last_reply
        if said == "raise":
            raise ValueError("no such sum")
        if said in ("stop", "exit"):
            raise {"stop": asyncio.CancelledError, "exit": SystemExit}[said]("no judge")
        return {"nan": float("nan"), "text": "much"}.get(said, float(said == self.data.answer))

    @vf.reward(weight=0.5)
    async def asked(self, trace):
        return float("+" in trace.messages[-2].content)


class Sums(vf.Taskset[Sum, Config]):
    def load(self):
        for a in range(self.config.largest + 1):
            for b in range(self.config.largest + 1):
                system = "Be brief." if self.config.polite else None
                yield Sum(Data(prompt=f"{a}+{b}=", answer=str(a + b), system_prompt=system), self.config.task)


__all__ = ["Sums"]
"""

REFUSED = {
    "of_turns": ("class Own(vf.Env[vf.EnvConfig]):\n    async def run(self, task, agents): ...\n", "Own.run"),
    "harnessed": ("class Own(vf.Harness[vf.HarnessConfig]): ...\n", "has a harness of its own"),
    "rewritten": ("@vf.intercept\ndef f(self, response): ...\nSum.f = f\n", "rewrites prompts or responses"),
    "of_tools": ("Sum.toolsets = classmethod(lambda cls, config: [1])\n", "gives the model tools"),
    "in_a_box": ("Sum.NEEDS_CONTAINER = True\n", "needs a container"),
    "prepared": ("async def f(self, trace, runtime): ...\nSum.setup = f\n", r"runs programs \(setup"),
    "unscored": ("del Sum.right, Sum.asked\n", "has no reward"),
    "unasked": ("Sums.load = lambda self: [Sum(Data(answer='1'), self.config.task)]\n", "has no prompt"),
    "empty": ("Sums.load = lambda self: []\n", "has no tasks"),
    "broken": ("1 / 0\n", r"cannot be loaded: ZeroDivisionError: division by zero \(broken.py"),
    "old": ("del __all__\ndef load_environment(): ...\n", "cannot be loaded: "),
}


@pytest.fixture(params=["stand-in", "real"])
def folder(request, tmp_path, monkeypatch):
    """A folder of environments, from which modules are imported."""
    if request.param == "real" and find_spec("verifiers") is None:
        pytest.skip("verifiers is not installed")
    if request.param == "stand-in":
        for name in [name for name in sys.modules if name.partition(".")[0] == "verifiers"]:
            monkeypatch.delitem(sys.modules, name)
        stand_in_verifiers.write(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "sums.py").write_text(SUMS)
    yield tmp_path
    for name in [name for name in sys.modules if name in ("sums", "slow", *REFUSED)]:
        del sys.modules[name]
    for name in [name for name in sys.modules if name.partition(".")[0] == "verifiers"]:
        if request.param == "stand-in":
            del sys.modules[name]
    for cached in (verifiers._tasks, verifiers._rows):
        cached.cache_clear()


def rewards_of(task, *responses):
    """Rewards of responses to task 5, `1+1=`."""
    return task.host_reward.function(list(responses), [5] * len(responses))


def test_prompts_and_weighted_rewards(folder):
    task = envs.make("verifiers:sums")
    assert task == envs.make("text:verifiers", environment="sums") and task.num_rows + task.num_held_out == 16
    assert [row.prompt for row in task.problem.rows[:2]] == ["0+0=", "0+1="]
    assert task.problem.rows[5].columns == {"answer": "2", "idx": 5}
    assert rewards_of(task, "2", "3", " 2") == [1.5, 0.5, 1.5]
    assert envs.name_with_parameters(envs.make("verifiers:sums", size=4)) == "verifiers:sums?size=4"

    @jax.jit
    def rewards(keys):
        problem, right = task.sample(keys), task.demonstration(keys)
        return task.reward(problem.answer, right.responses, right.mask & (jax.numpy.arange(3) != 1)[:, None])

    reward = rewards(jax.random.split(jax.random.key(0), 3))
    assert reward.total.tolist() == [1.5, 0.5, 1.5] and list(reward.parts) == ["sums"]


def test_taskset_arguments(folder):
    task = envs.make("verifiers:sums", arguments={"largest": 1, "polite": True}, size=3)
    system = {"role": "system", "content": "Be brief."}
    assert [row.prompt for row in task.problem.rows] == [
        (system, {"role": "user", "content": asked}) for asked in ("0+0=", "0+1=", "1+0=")
    ]
    with pytest.raises(fdg.FdgError, match=r"environment 'sums' cannot be loaded: .*lrgest"):
        envs.make("verifiers:sums", arguments='{"lrgest": 1}')
    with pytest.raises(fdg.FdgError, match=r"arguments='largest' must be a mapping by name"):
        envs.make("verifiers:sums", arguments="largest")
    with pytest.raises(fdg.FdgError, match=r"no parameter 'largest': it has .*environment, arguments, size"):
        envs.make("verifiers:sums", largest=1)


@pytest.mark.parametrize(
    ("response", "message"),
    [
        (
            "raise",
            r"reward of environment 'sums' raised ValueError: no such sum \(sums.py, line 21\) for",
        ),
        ("exit", r"reward of environment 'sums' raised SystemExit: no judge .* for the response 'exit'"),
        ("stop", r"reward of environment 'sums' raised CancelledError: no judge .* for the response 'stop'"),
        (
            "text",
            "raised ValueError: could not convert string to float: 'much'.* for the response 'text' to the",
        ),
        ("nan", "reward 'sums' of task 'text:verifiers' gave nan for the response 'nan'"),
    ],
)
def test_failing_reward_is_named(folder, response, message):
    alphabet = envs.text.CharacterTokenizer("0123456789+=raisetnxop")
    task = envs.make("verifiers:sums").with_tokenizer(alphabet, max_response=8)
    tokens, mask = task.responses_of(["2", response])
    answer = task.sample(jax.random.split(jax.random.key(0), 2)).answer
    answer = {**answer, "content": jax.numpy.array([5, 5])}
    with pytest.raises(Exception) as error:
        jax.block_until_ready(task.reward(answer, tokens, mask).total)
    assert re.search(message, str(fdg.errors.host_error(error.value)))


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_environments_are_refused(folder, name):
    change, message = REFUSED[name]
    names = "\n__all__ = ['Sums', 'Own']\n" if "class Own" in change else ""
    (folder / f"{name}.py").write_text(SUMS + change + names)
    with refuses(f"environment '{name}'", match=message):
        envs.make(f"verifiers:{name}")


def test_slow_reward_ends_at_the_timeout_of_its_task(folder):
    slow = SUMS.replace("asyncio.sleep(0)", "asyncio.sleep(60)").replace(
        "system_prompt=system)", "system_prompt=system, timeout=vf.TaskTimeout(scoring=0.01))"
    )
    (folder / "slow.py").write_text(slow)
    with pytest.raises(fdg.FdgError, match=r"reward of environment 'slow' raised TimeoutError: .* '1\+1='"):
        rewards_of(envs.make("verifiers:slow"), "2")


def test_name_imports_a_module():
    assert envs.trust_reason("verifiers:sums", {}) == "imports the module sums"
    assert envs.trust_reason("text:verifiers", {"environment": "sums"}) == "imports the module sums"
    assert envs.trust_reason("text:sorting", {}) is None


@pytest.mark.skipif(find_spec("verifiers") is not None, reason="verifiers is installed")
def test_missing_package():
    with pytest.raises(fdg.FdgError, match=r"pip install 'verifiers>=0\.4'"):
        envs.make("verifiers:sums")
