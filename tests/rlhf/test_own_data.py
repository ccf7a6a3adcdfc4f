"""User-defined rewards, tasks and data: arguments of reward functions, and what runs store."""

import dataclasses
import functools
import json
import math
import pathlib
import random
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import algos
import envs
import fdg
import policies
from algos.rlhf.objective import group_advantage, informative
from algos.rlhf.preferences import Minibatch, best_and_worst
from algos.rlhf.responses import Responses, response_log_probs
from envs.text import HostReward, Prompts
from fdg.training import data_copies as data
from fdg.training.data_copies import copied_env_files, copy_data_files
from fdg.training.description import describe
from fdg.training.name_resolver import NameResolver
from fdg.training.run import Run
from fdg.training.run_directory import RunDirectory
from tests.refusing import refuses
from tests.rlhf.small import SMALL

ROWS = [
    {"question": f"{a}+{b}=", "answer": a + b, "level": a, "ünï": [b]} for a in range(4) for b in range(4)
]


def write_jsonl(folder, rows, name="data.jsonl"):
    path = folder / name
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return str(path)


@pytest.fixture
def task(tmp_path):
    return envs.make("text:file", path=write_jsonl(tmp_path, ROWS))


def task_rewards(task, count=5):
    """The task's rewards of the correct answers to `count` problems."""

    @jax.jit
    def run(keys):
        problem, shown = task.sample(keys), task.demonstration(keys)
        return task.reward(problem.answer, shown.responses, shown.mask)

    return run(jax.random.split(jax.random.key(0), count))


def positional(seen):
    def judge(p, r, a):
        seen.update(prompts=p, responses=r, answers=a)
        return [float(x == y) for x, y in zip(r, a, strict=True)]

    return judge


def named_arguments(seen):
    def judge(prompts, responses, answers):
        return positional(seen)(prompts, responses, answers)

    return judge


def trl_style(seen):
    def judge(completions, prompts, answer, level, **kwargs):
        seen.update(prompts=prompts, responses=completions, columns=(answer, level, kwargs["ünï"]))
        return [float(c == str(a)) for c, a in zip(completions, answer, strict=True)]

    return judge


def keyword_columns(seen):
    def judge(*, level, responses, answers, weight=2.0):
        seen.update(responses=responses, answers=answers, level=level, weight=weight)
        return np.array([r == a for r, a in zip(responses, answers, strict=True)])

    return judge


@pytest.mark.parametrize("make", [positional, named_arguments, trl_style, keyword_columns])
def test_calling_conventions_of_rewards(make, task):
    seen = {}
    found = task_rewards(task.with_reward(make(seen)))
    assert found.total.tolist() == [1.0] * 5 and found.parts.keys() == {"judge"}
    rows = {str(row["question"]): row for row in ROWS}
    if "prompts" in seen:
        assert seen["responses"] == [str(rows[p]["answer"]) for p in seen["prompts"]]
    if "columns" in seen:
        wanted = [[rows[p][name] for p in seen["prompts"]] for name in ("answer", "level", "ünï")]
        assert list(seen["columns"]) == wanted
    if "answers" in seen:
        assert seen["answers"] == seen["responses"]


@pytest.mark.parametrize("seed", range(6))
def test_random_columns_are_passed_by_name(seed, tmp_path):
    """A reward function with random parameter names in random order, from source text as a user writes it."""
    rng = random.Random(seed)
    names = rng.sample(["topic", "zahl", "größe", "x1", "meta_data", "解", "Level"], rng.randint(1, 4))
    rows = [
        {"prompt": f"{i}", "completion": f"é{i}", **{n: [rng.random(), n, i] for n in names}}
        for i in range(6)
    ]
    parameters = rng.sample([*names, "responses", "answers", "prompts"], rng.randint(1, len(names)))
    scope = {}
    named = ", ".join(f"{name}={name}" for name in parameters)
    lines = f"def judge({', '.join(parameters)}, **more):", f"  seen.append((dict({named}), more))"
    exec("\n".join([*lines, f"  return [1] * len({parameters[0]})"]), {"seen": (seen := [])}, scope)
    task_rewards(envs.make("text:file", path=write_jsonl(tmp_path, rows)).with_reward(scope["judge"]), 4)
    given = {**seen[0][0], **seen[0][1]}
    order = [int(p) for p in given["prompts"]]
    assert all(given[n] == [rows[i][n] for i in order] for n in names) and set(seen[0][0]) == set(parameters)
    assert given["responses"] == given["completions"] == given["answers"] == [f"é{i}" for i in order]


def test_messages_and_responses(tmp_path):
    prompts = [[{"role": "user", "content": f"{i}?"}] for i in range(4)]
    rows = [{"prompt": one, "completion": [{"role": "assistant", "content": "ja"}]} for one in prompts]
    seen = []

    def judge(prompts, completions, responses):
        seen.extend([prompts, completions, responses])
        return [len(c[0]["content"]) for c in completions]

    assert task_rewards(
        envs.make("text:file", path=write_jsonl(tmp_path, rows)).with_reward(judge), 2
    ).total.tolist() == [2, 2]
    assert all(one in prompts for one in seen[0]) and seen[2] == ["ja", "ja"]
    assert seen[1] == [[{"role": "assistant", "content": "ja"}]] * 2


def test_weighted_rewards_and_none(task):
    def even(level, responses):
        return [1.0 if one % 2 == 0 else None for one in level]

    def low(level, responses):
        return [2.0 if one < 2 else None for one in level]

    found = task_rewards(task.with_reward([even, low], weights=[0.5, 3]), 12)
    numbers = task.problem.rows
    order = [numbers[int(i)].columns["level"] for i in task.draw(jax.random.split(jax.random.key(0), 12))]
    assert {0, 3} <= set(order)
    assert found.total.tolist() == [{0: 6.5, 1: 6.0, 2: 0.5, 3: 0.0}[level] for level in order]
    assert found.given.tolist() == [level < 3 for level in order]
    assert {name: part.tolist() for name, part in found.parts.items()} == {
        "even": [float(level % 2 == 0) for level in order], "low": [2.0 * (level < 2) for level in order]
    }  # fmt: skip


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (
            lambda prompts, grund: [],
            "takes 'grund', but there is no such column. It can take prompts, responses, completions,"
            " answers, question",
        ),
        (lambda p, r, a, b: [], "takes 'p', but there is no such column"),
        (
            lambda responses, answers, levels: [],
            "takes 'levels', but there is no such column: did you mean 'level'?",
        ),
        (lambda prompts, responses, levels: [], "did you mean 'level'?"),
        (lambda responses, levels: [], "did you mean 'level'?"),
        (lambda responses, *, levels: [], "did you mean 'level'?"),
        (lambda p, r, levels: [], "takes 'p'"),
        (lambda p, r, *, a: [], "takes 'p'"),
        (lambda response, prompt, answer: [], "did you mean 'responses'?"),
    ],
)
def test_unknown_arguments_are_refused(function, words, task):
    with refuses(words, "level and ünï"):
        task.with_reward(function)
    with pytest.raises(
        fdg.FdgError, match="number of functions 1, of weights 2: give one weight per function"
    ):
        task.with_reward(function, weights=[1, 2])


@pytest.mark.parametrize("result", [None, "12345", b"12345", dict.fromkeys(range(5)), set(range(5))])
def test_reward_that_returns_no_list(result, task):
    with pytest.raises(Exception) as error:
        jax.block_until_ready(task_rewards(task.with_reward(lambda p, r, a: result)).total)
    found = fdg.errors.host_error(error.value)
    assert f"gave {result!r}: return a list of 5 numbers" in str(found)


def test_weights_of_rewards_are_finite_numbers(task):
    for weights in ([np.float32(0.5), 3], np.array([0.5, 3]), [jnp.float32(0.5), np.int64(3)]):
        assert HostReward((len, len), weights) == HostReward((len, len), [0.5, 3])
    for weight in (10**400, 1e39, math.nan, -math.inf, "1", None, [1.0]):
        with refuses("HostReward: weights=(", "must be finite numbers (float32)"):
            task.with_reward(lambda responses: [], weights=[weight])


def test_responses_without_a_reward_are_ignored():
    """Groups of four, some without a reward; expected values, by hand, use only those with a reward."""
    reward = jnp.array([1.0, 9.0, 3.0, 9.0, 2.0, 9.0, 9.0, 9.0])
    given = jnp.array([True, False, True, False, True, False, False, False])
    for scale, expected in (("none", [-1, 0, 1, 0]), ("group", [-1 / math.sqrt(2), 0, 1 / math.sqrt(2), 0])):
        found = group_advantage(reward, 4, "group", scale, 0.0 if scale == "none" else 1e-9, True, given)
        np.testing.assert_allclose(found, [*expected, 0, 0, 0, 0], atol=1e-6)
    found = group_advantage(reward, 4, "leave_one_out", "none", 0.0, True, given)
    np.testing.assert_allclose(found, [-2, 0, 2, 0, 0, 0, 0, 0], atol=1e-6)
    assert informative(reward, 4, given).tolist() == [True, False]
    tokens, mask = jnp.arange(8)[:, None], jnp.ones((8, 1), bool)
    pairs = best_and_worst(Responses(Prompts(tokens, mask), tokens, mask, mask & given[:, None]), reward, 4)
    assert pairs.chosen.tokens[0, 0] == 2 and pairs.rejected.tokens[0, 0] == 0
    assert pairs.differ.tolist() == [True, False]


def test_rows_without_an_answer_need_a_reward(tmp_path):
    task = envs.make("text:file", path=write_jsonl(tmp_path, [*ROWS, {"question": "why?"}]))
    assert task.problem.rows[-1].answer is None
    for name, words in (("sft", "give one in each row"), ("grpo", "or a reward (task.with_reward)")):
        with refuses(f"data.jsonl, line {len(ROWS) + 1}: has no answer", words):
            algos.get(name)(env=task, **SMALL)
    algos.GRPO(env=task.with_reward(lambda p, r, a: [0.0] * len(r)), **SMALL)


PAIRS = [{"prompt": f"{i}=", "chosen": f"{i}", "rejected": f"no {i}"} for i in range(16)]


def test_dpo_loss_by_hand(tmp_path):
    """-log sigmoid(beta (log p(y+)/q(y+) - log p(y-)/q(y-))), arXiv 2305.18290, equation 7."""
    env = envs.make("text:preferences", path=write_jsonl(tmp_path, PAIRS))
    algorithm = algos.DPO(env=env, **SMALL, beta=0.5)
    policy, reference = (jax.jit(algorithm.network.init)(jax.random.key(i)) for i in (1, 2))
    chosen, rejected = (dataclasses.replace(env, problem=side) for side in env.problem.sides)
    prompts = env.prompts_of(["3="])

    def log_prob(parameters, task, text):
        responses = Responses(prompts, *(found := task.responses_of([text], ["3="])), found[1])
        return float(jnp.sum(score(parameters, responses)))

    @jax.jit
    def score(parameters, responses):
        return response_log_probs(algorithm.network, parameters, responses, 1.0)[0]

    gains = [
        log_prob(policy, *one) - log_prob(reference, *one) for one in ((chosen, "3"), (rejected, "no 3"))
    ]
    expected = math.log1p(math.exp(-0.5 * (gains[0] - gains[1])))
    keys, row = jax.random.split(jax.random.key(0), 1), [r.text for r in env.problem.rows].index("3=")
    place = int(np.flatnonzero(np.flatnonzero(~env.problem.held_out) == row)[0])
    pairs = algorithm.read(keys, (jnp.array([place]),))

    @jax.jit
    def loss_of(policy, reference, pairs):
        return algorithm._loss(policy, (), Minibatch(pairs, algorithm.refer(reference, pairs), jnp.ones(1)))

    loss, measures = loss_of(policy, reference, pairs)
    assert float(loss) == pytest.approx(expected, abs=1e-4)
    assert float(measures["margin"]) == pytest.approx(gains[0] - gains[1], abs=1e-4)


def test_user_task_by_name(tmp_path, monkeypatch):
    """A task, a problem, or a function that returns one; rebuilt from `config.json`."""
    (tmp_path / "mine_task.py").write_text(
        "import envs\nfrom envs.text import problems\n"
        "def judge(prompts, responses, answers):\n    return [float(len(r)) for r in responses]\n"
        "def task(digits=1):\n    return envs.make('text:addition', digits=digits).with_reward(judge)\n"
        "class Sums(problems.Addition):\n    name = 'sums'\n"
        "class Half:\n    def draw(self, key): ...\n    def prompt(self, content): ...\n"
        "game = envs.text.Guess()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert envs.make("mine_task:task", digits=2).host_reward.names == ("judge",)
    assert envs.make("mine_task:Sums").name == "text:sums" and envs.make("mine_task:game").name == "guess"
    with pytest.raises(fdg.FdgError, match="Half is a TextProblem without"):
        envs.make("mine_task:Half")
    algorithm = algos.GRPO(env=envs.make("mine_task:task", digits=2), **SMALL, max_response=3)
    assert algos.GRPO.preset("mine_task:task", algorithm.env) == algos.GRPO.preset("text:addition")
    config = describe(algorithm, policies.GPUOnly())
    assert config["env"] == "mine_task:task?digits=2" and config.get("rebuilds", True)
    resolver = NameResolver(tmp_path / "config.json")
    with pytest.raises(fdg.FdgError, match="imports the module mine_task"):
        resolver.environment(config["env"])


def test_checkpoints_with_other_characters(tmp_path, task):
    """Vocabularies of the same size with different characters: token ids would change their meaning."""

    def learner(letter):
        rows = [{**row, "question": str(row["question"]).replace("=", letter)} for row in ROWS]
        return algos.SFT(
            env=envs.make("text:file", path=write_jsonl(tmp_path, rows, f"{letter}.jsonl")), **SMALL
        )

    one, two, other, more = algos.SFT(env=task, **SMALL), learner("é"), learner("ü"), learner("=é")
    assert (
        one.reason_incompatible_with(one) is None
        and algos.GRPO(env=task, **SMALL).reason_incompatible_with(one) is None
    )
    assert two.network == other.network and "no token for 'ü'" in other.reason_incompatible_with(two)
    assert "no token for 'é'" in more.reason_incompatible_with(one)
    assert "in other orders" in one.reason_incompatible_with(more)
    [(name, value)] = one.fields_from_run(more).items()  # the run has all of its characters
    assert (name, value) == ("tokenizer", f"characters={more.env.tokenizer.alphabet}")
    wider = one.changed(tokenizer=value)
    assert wider.reason_incompatible_with(more) is None and wider.env.tokenizer.vocab_size == 57
    assert wider.env.tokenizer == more.env.tokenizer and not wider.fields_from_run(two)
    assert not two.fields_from_run(one) and not one.fields_from_run(one)
    with pytest.raises(fdg.FdgError, match=r"is the single character '\+'"):
        two.changed(tokenizer="characters=123")


def test_rewards_compare_by_value():
    judge = HostReward(len)
    assert judge == HostReward(len) and hash(judge) == hash(HostReward(len)) and judge.names == ("len",)
    assert HostReward((len, len)).names == ("len", "len_2")


def test_digest_of_large_files(tmp_path, task, monkeypatch):
    monkeypatch.setattr(data, "_MAX_BYTES", 99)
    path, run = pathlib.Path(task.problem.path), RunDirectory.create(tmp_path / "run", {})
    path.write_text(path.read_text() + "\n" * 100)
    algorithm = algos.SFT(env=task, **SMALL)
    for _ in range(2):
        copy_data_files(run, algorithm)
    assert [one.name for one in (run.path / "data").iterdir()] == ["path.jsonl.sha256"]
    assert copied_env_files(run.path, "text:file", {"path": str(path)}) == {}
    path.write_text(path.read_text() + "\n")
    with pytest.raises(
        fdg.FdgError,
        match=r"has changed since the run .*: bring back the file whose checksum is in .*sha256, or",
    ):
        copy_data_files(run, algorithm)
    run.close()


def test_data_files_are_copied(tmp_path, task):
    """The copy is used if the file is moved; a changed file is refused."""
    path, run = pathlib.Path(task.problem.path), RunDirectory.create(tmp_path / "run", {})
    algorithm = algos.SFT(env=task, **SMALL)
    parameters = {"path": str(path), "max_response": 3}
    assert copied_env_files(run.path, "text:file", parameters) == {}
    copy_data_files(run, algorithm)
    copy_data_files(run, algorithm)
    copy = run.path / "data" / "path.jsonl"
    assert copy.read_bytes() == path.read_bytes()
    assert copied_env_files(run.path, "text:file", parameters) == {"path": str(copy)}
    assert copied_env_files(run.path, "CartPole-v1", parameters) == {}
    config = {"env": f"text:file?path={path}"}
    path.rename(tmp_path / "moved.jsonl")
    assert NameResolver(run.path / "config.json").environment(config["env"])[1] == {"path": str(copy)}
    copy.rename(tmp_path / "copy.jsonl")
    with pytest.raises(
        fdg.FdgError, match=r"config.json names .*data.jsonl, which does not exist: restore it"
    ):
        NameResolver(run.path / "config.json").environment(config["env"])
    copy.write_text("{}")
    path.write_text((tmp_path / "moved.jsonl").read_text())
    with pytest.raises(fdg.FdgError, match=r"has changed since the run in .* began: put the copy"):
        copy_data_files(run, algorithm)
    run.close()


# From Python 3.12 on, the traceback has no frame of a comprehension, hence not the response.
ROW = "" if sys.version_info < (3, 12) else ".*"


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (
            lambda responses: [1 / len(one) for one in responses],
            f"division by zero .* for the response '{ROW}' to the prompt '",
        ),
        (lambda responses: [1.0], "gave 1 numbers for 3 responses"),
    ],
)
def test_failing_reward_raises_before_compilation(reward, message, task, tmp_path, monkeypatch):
    monkeypatch.setattr(fdg, "compile", None)
    for one in (task, envs.make("text:addition")):
        algorithm = algos.GRPO(env=one.with_reward(reward), group_size=2, **SMALL)
        with pytest.raises(fdg.FdgError, match=message):
            fdg.fit(algorithm, total_steps=8, out=tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()


def test_evaluation_uses_each_held_out_row_once(tmp_path):
    train = write_jsonl(tmp_path, [{"prompt": "+=", "answer": "1"}])
    prompts = [f"{i}=" for i in range(300)]
    held_out = write_jsonl(tmp_path, [{"prompt": one, "answer": "1"} for one in prompts], "test.jsonl")
    seen = []

    def judge(prompts):
        seen.extend(prompts)
        return [float(int(prompt[:-1])) for prompt in prompts]

    task = envs.make("text:file", path=train, test_path=held_out, max_response=2).with_reward(judge)
    algorithm = algos.SFT(env=task, **SMALL)
    run = Run(algorithm, jax.jit(algorithm.init)(jax.random.key(0)), 0)
    for episodes, expected in ((None, prompts), (3, prompts[:3])):
        seen.clear()
        found = run.evaluate(episodes)
        assert sorted(seen) == sorted(expected) and found.episodes == len(expected)
        assert found.returns[0].tolist() == [*range(len(expected))]


ASKED = {"role": "user", "content": "1"}


@pytest.mark.parametrize("prompts", ["1+1=", None, 3, ASKED, [], [None], [ASKED], [[{"rol": "user"}]], [3]])
def test_invalid_prompts_are_refused(prompts):
    task = envs.make("text:addition")
    for take in (task.prompts_of, functools.partial(algos.SFT(env=task, **SMALL).answer, None)):
        with pytest.raises(fdg.FdgError, match=r"prompts=.*: give a list of texts or of lists of messages"):
            take(prompts)


@pytest.mark.parametrize(
    "prompts",
    [
        *(np.array(["1+1="]), np.array(["1+1=", "2+2="]), np.zeros(3), [np.ones(2)]),
        [[{"role": "user", "content": np.array(["1", "2"])}]],
    ],
)
def test_arrays_are_no_prompts(prompts):
    with refuses("prompts=", "give a list of texts or of lists of messages"):
        envs.make("text:addition").prompts_of(prompts)


@pytest.mark.parametrize(
    ("setting", "fix"),
    [
        ({"max_new_tokens": 1.5}, "answer(max_new_tokens=1.5): give an integer"),
        ({"max_new_tokens": "3"}, "answer(max_new_tokens='3'): give an integer or None: write 3"),
        ({"temperature": "a"}, "answer(temperature='a'): give a number or None"),
        ({"temperature": math.nan}, "answer(temperature=nan): give a number or None"),
        ({"temperature": -1}, "temperature=-1: it must be 0 or more"),
        ({"system": 3}, "answer(system=3): give a string or None"),
        ({"seed": None}, "answer(seed=None): give an integer"),
    ],
)
def test_invalid_settings_of_answers_are_refused(setting, fix):
    with refuses(fix):
        algos.SFT(env=envs.make("text:addition"), **SMALL).answer(None, ["1+1="], **setting)


def test_games_answer_no_prompts():
    with pytest.raises(fdg.FdgError, match=r"'guess' is a game, which asks its own prompts: use evaluate"):
        algos.GRPO(env=envs.text.Guess(), **SMALL).answer(None, ["0-99?"])


def test_short_prompts_leave_room_for_long_answers():
    """A prompt is not padded beyond what the context leaves, even if the task's prompts are longer."""
    task = envs.make("text:addition")
    assert task.prompt_length == 7 and task.prompts_of(["1+2="], longest=5).tokens.shape == (1, 5)
    with pytest.raises(fdg.FdgError, match=r"prompt 0 '12\+34=' has 7 tokens, .* allows 5: shorten it"):
        task.prompts_of(["12+34="], longest=5)


def test_default_response_length_without_answers(tmp_path):
    rows = [{"prompt": f"{i}="} for i in range(9)]
    task = envs.make("text:file", path=write_jsonl(tmp_path, rows)).with_reward(lambda responses: [0.0])
    assert task.response_length == 64 and dataclasses.replace(task, max_response=3).response_length == 3
