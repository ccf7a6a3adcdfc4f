"""Text tasks against Python, which parses and solves every sampled problem from its text."""

import collections
import dataclasses
import fractions
import functools
import itertools
import math
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import envs
import fdg
from envs.text import CharacterTokenizer, HostReward, TextTask
from envs.text.characters import literal, to_string
from envs.text.countdown import Content
from envs.text.expressions import evaluate
from tests.refusing import refuses

COUNT = 32
COPYING = envs.make("text:copying")
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
jit = functools.partial(jax.jit, compiler_options=QUICK)  # many programs, each of which runs once


def keys(seed=0, count=COUNT):
    return jax.random.split(jax.random.key(seed), count)


def numbers_in(text):
    return [int(n) for n in text[:-1].split(",")]


SOLUTIONS = {
    "addition": lambda text: str(eval(text[:-1])),
    "subtraction": lambda text: str(eval(text[:-1])),
    "multiplication": lambda text: str(eval(text[:-1])),
    "division": lambda text: str(eval(text[:-1].replace("/", "//"))),
    "remainder": lambda text: str(eval(text[:-1])),
    "divisor": lambda text: str(math.gcd(*numbers_in(text))),
    "comparison": lambda text: "<=>"[
        np.sign(int(text[:-1].split("?")[0]) - int(text[:-1].split("?")[1])) + 1
    ],
    "arithmetic": lambda text: str(eval(text[:-1])),
    "sorting": lambda text: ",".join(map(str, sorted(numbers_in(text)))),
    "maximum": lambda text: str(max(numbers_in(text))),
    "total": lambda text: str(sum(numbers_in(text))),
    "copying": lambda text: text[:-1],
    "reversal": lambda text: text[-2::-1],
    "counting": lambda text: str(text[:-3].count(text[-2])),
    "parity": lambda text: str(text.count("1") % 2),
    "binary": lambda text: bin(int(text[:-1]))[2:],
}
# Contents sampled with NumPy, because `draw` takes seconds to compile.
CONTENTS = {
    "subtraction": lambda rng: rng.integers(0, 100, (COUNT, 2)),
    "multiplication": lambda rng: rng.integers(0, 100, (COUNT, 2)),
    "division": lambda rng: np.cumprod(rng.integers(1, 100, (COUNT, 2)), axis=1)[:, ::-1],
    "remainder": lambda rng: rng.integers(1, 100, (COUNT, 2)),
    "divisor": lambda rng: rng.integers(1, 100, (COUNT, 2)),
    "comparison": lambda rng: rng.integers(0, 100, (COUNT, 2)),
    "maximum": lambda rng: rng.integers(0, 10, (COUNT, 5)),
    "total": lambda rng: rng.integers(0, 10, (COUNT, 5)),
    "copying": lambda rng: rng.integers(97, 123, (COUNT, 6)),
    "reversal": lambda rng: rng.integers(97, 123, (COUNT, 6)),
    "parity": lambda rng: rng.integers(0, 2, (COUNT, 8)),
    "binary": lambda rng: rng.integers(0, 1024, (COUNT, 1)),
}
OPTIONS = {
    "addition": {"digits": 8},
    "multiplication": {"digits": 4},
    "arithmetic": {"terms": 4, "digits": 2},
    "sorting": {"length": 4, "digits": 3},
    "countdown": {"count": 3, "largest": 12},
}


def solved(task, prompt, response):
    """True if plain Python accepts the response."""
    if task.problem.name != "countdown":
        return response == SOLUTIONS[task.problem.name](prompt)
    given, target = re.fullmatch(r"([\d,]+)=(\d+)\?", prompt).groups()
    return sorted(re.findall(r"\d+", response)) == sorted(given.split(",")) and value(response) == int(target)


def value(expression):
    return eval(re.sub(r"(\d+)", r"fractions.Fraction(\1)", expression), {"fractions": fractions})


@pytest.fixture
def drawn():
    """A task with prompts, solutions, and rewards of correct, swapped and unfinished responses."""

    def one(task):
        @jit
        def run(keys):
            content = task.draw(keys)
            responses, mask = task.solutions(content)
            cut = mask & (responses != task.tokenizer.eos)
            several = [(responses, mask), (jnp.roll(responses, 1, 0), jnp.roll(mask, 1, 0)), (responses, cut)]
            three = [jnp.concatenate(parts) for parts in zip(*several, strict=True)]
            contents = jax.tree.map(lambda leaf: jnp.concatenate([leaf] * 3), content)
            reward = jax.tree.map(lambda leaf: leaf.reshape(3, COUNT), task.reward(contents, *three))
            return task.prompts(content), responses, mask, reward

        return task, run(keys())

    return lambda name: one(envs.make(f"text:{name}", **OPTIONS.get(name, {})))


@pytest.mark.parametrize("name", CONTENTS)
def test_prompt_and_solution_match_python(name):
    problem = envs.make(f"text:{name}").problem
    content = jnp.asarray(CONTENTS[name](np.random.default_rng(0)), jnp.int32)
    assert jax.eval_shape(problem.draw, jax.random.key(0)).shape == content.shape[1:]
    write = jit(jax.vmap(lambda one: (problem.prompt(one), problem.solution(one), problem.identity(one))))
    prompts, solutions, identity = write(content)
    for i in range(COUNT):
        prompt, answer = (to_string(jax.tree.map(lambda leaf, i=i: leaf[i], x)) for x in (prompts, solutions))
        assert answer == SOLUTIONS[name](prompt), (prompt, answer)
        assert len(prompt) <= problem.prompt_length and len(answer) <= problem.response_length
    assert len({tuple(row) for row in identity.tolist()}) > COUNT // 2


@pytest.mark.parametrize("name", [name for name in envs.text.names() if name not in CONTENTS])
def test_sampled_problems_match_python(drawn, name):
    task, (batch, responses, mask, reward) = drawn(name)
    assert batch.tokens.shape == batch.mask.shape == (COUNT, task.prompt_length)
    assert responses.shape == mask.shape == (COUNT, task.response_length)
    full, swapped, unfinished = reward.parts["correct"]
    np.testing.assert_array_equal(reward.total[0], 1)
    prompts, answers = task.texts(*batch), task.texts(responses, mask)
    others = np.roll(np.array(answers, object), 1)
    for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        assert solved(task, prompt, answer), (prompt, answer)
        assert full[i] == 1 and unfinished[i] == 0
        assert swapped[i] == solved(task, prompt, others[i]), (prompt, others[i])
        row, valid = np.asarray(batch.tokens[i]), np.asarray(batch.mask[i])
        assert (np.diff(valid.astype(int)) >= 0).all() and valid[-1]  # left-padded
        assert (row[~valid] == 0).all() and list(row[valid]) == [1, *task.tokenizer.encode(prompt)]
        ids = np.asarray(responses[i])[np.asarray(mask[i])]
        assert list(ids) == [*task.tokenizer.encode(answer), 2]
    assert len(set(prompts)) > 3
    again = task.prompts_of(prompts)
    np.testing.assert_array_equal(again.tokens, batch.tokens)
    np.testing.assert_array_equal(again.mask, batch.mask)


def test_splits_are_disjoint():
    task = envs.make("text:addition", digits=1)
    both = jit(lambda keys: [task.sample(keys, split).prompts for split in ("train", "test")])(keys(1, 2048))
    train, test = (
        collections.Counter(tuple(sorted(t[:-1].split("+"))) for t in task.texts(*p)) for p in both
    )
    assert not train.keys() & test.keys()
    # 55 unordered pairs, an eighth of them held out; a+b is equal to b+a, and twice as likely as a+a.
    assert len(train) + len(test) == 55 and 2 <= len(test) <= 12
    unequal = [n for pair, n in train.items() if pair[0] != pair[1]]
    assert max(unequal) < 2.5 * min(unequal)


def test_rows_depend_only_on_their_keys():
    sample = jit(COPYING.sample)
    full, part = sample(keys()), sample(keys()[5:9])
    for a, b in zip(jax.tree.leaves(full), jax.tree.leaves(part), strict=True):
        np.testing.assert_array_equal(a[5:9], b)
    demonstration = jit(COPYING.demonstration)(keys())
    np.testing.assert_array_equal(demonstration.prompts.tokens, full.prompts.tokens)
    np.testing.assert_array_equal(demonstration.responses[:, :6], full.prompts.tokens[:, 1:-1])


EXPRESSIONS = [
    "1", "12+30", "1-2-3", "2*3+4*5", "2+3*4-5", "8/4/2", "(1+2)*3", "2*(3+4)*(5-1)", "1/3+1/6", "7/(3-4)",
    "((((1))))", "-3+5", "3*-2", "(2-5)/(1-7)", "10-(2-(3-4))", "3/0", "5/(2-2)", "", "+", "1+", "(1", "1)",
    "()", "1(2)", "(1)2", "1 2", "2**3", "1//2", "a", "100*100*100*100*100*100", "1++2", "0/5", "99999999+1",
    "1-(-2)",
]  # fmt: skip


def test_expressions_match_python():
    width = max(map(len, EXPRESSIONS))
    codes = jnp.stack([jnp.pad(literal(t).codes, (0, width - len(t))) for t in EXPRESSIONS])
    lengths = jnp.array([len(t) for t in EXPRESSIONS])
    values = jit(jax.vmap(lambda c, n: evaluate(envs.text.Text(c, n))))(codes, lengths)
    for i, text in enumerate(EXPRESSIONS):
        try:
            assert re.fullmatch(r"[-+*/()\d]+", text) and not re.search(r"\*\*|//|\+\+", text)
            expected = value(text)
            assert abs(expected) < 2**30
        except (AssertionError, SyntaxError, ZeroDivisionError, TypeError):
            assert not values.valid[i], text
        else:
            assert values.valid[i], text
            assert fractions.Fraction(int(values.numerator[i]), int(values.denominator[i])) == expected, text


@pytest.fixture(scope="module")
def countdown():
    """The problem `3,2,4=20?` and its reward function."""
    task = envs.make("text:countdown", count=3, largest=9)
    content = Content(*map(jnp.array, ([[3, 2, 4]], [20], [[2, 3, 4]], [[0, 2]])))
    return task, jit(lambda tokens, mask: task.reward(content, tokens, mask))


@pytest.mark.parametrize(
    ("response", "total", "parts"),
    [
        ("(2+3)*4", 1.0, {"correct": 1.0, "format": 0.0}),
        ("4*3+4*2", 0.0, {"correct": 0.0, "format": 0.0}),  # 4 is given once
        ("2+3*4", 0.1, {"correct": 0.0, "format": 0.1}),
        ("20", 0.0, {"correct": 0.0, "format": 0.0}),
        ("4*5", 0.0, {"correct": 0.0, "format": 0.0}),
        ("(2+3)*4=", 0.0, {"correct": 0.0, "format": 0.0}),
        (" (2+3)*4 ", 1.0, {"correct": 1.0, "format": 0.0}),
    ],
)
def test_countdown_by_hand(response, total, parts, countdown):
    task, reward = countdown
    ids = [*task.tokenizer.encode(response), 2]
    tokens = jnp.array([ids + [0] * (task.response_length - len(ids))])
    found = reward(tokens, tokens > 0)
    assert float(found.total[0]) == pytest.approx(total)
    assert {name: float(part[0]) for name, part in found.parts.items()} == pytest.approx(parts)


# --- user problems and rewards ---


@dataclasses.dataclass(frozen=True)
class Echo:
    """The answer to `5` is `5!`."""

    name = "echo"
    instruction = "Shout."
    prompt_length = 2
    response_length = 3

    def draw(self, key):
        return jax.random.randint(key, (1,), 0, 100)

    def prompt(self, content):
        return envs.text.characters.number(content[0], 2)

    def solution(self, content):
        return envs.text.characters.concatenate(self.prompt(content), literal("!"))

    def identity(self, content):
        return content

    def score(self, content, response):
        return envs.text.exact(self, content, response)


def test_custom_problem_with_host_reward():
    seen = []

    def louder(prompts, responses, answers):
        seen.append((prompts, responses, answers))
        return [len(r) for r in responses]

    task = TextTask(Echo()).with_reward(louder)

    @jit
    def run(keys):
        problem, demonstration = task.sample(keys), task.demonstration(keys)
        return task.reward(problem.answer, demonstration.responses, demonstration.mask)

    found = run(keys(0, 3))
    (prompts, responses, answers) = seen[0]
    assert len(seen) == 1 and responses == [p + "!" for p in prompts]
    assert [str(answer[0]) for answer in answers] == prompts
    assert found.total.tolist() == [len(r) for r in responses] and found.parts.keys() == {"louder"}


class Mute(Exception):
    __str__ = None


def mute():
    raise Mute("x")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda p, r, a: 1 / 0, "raised ZeroDivisionError: division by zero (test_text.py, line LINE) for"),
        (
            lambda p, r, a: [1 / len(x.strip("ab=")) for x in r],
            "raised ZeroDivisionError: division by zero (test_text.py, line LINE) for the response 'ab=' to"
            " the prompt 'ab='",
        ),
        (
            lambda p, r, a: [float(int(x, 16)) for x in p if x[0] == "c"],
            "raised ValueError: invalid literal for int() with base 16: 'cd=' (test_text.py, line LINE)"
            " for the response 'cd=' to the prompt 'cd='",
        ),
        (
            lambda p, r, a: [1.0, math.nan],
            "gave nan for the response 'cd=' to the prompt 'cd=': return a finite number, or None",
        ),
        (lambda p, r, a: [1.0, -math.inf], "gave -inf for the response '"),
        (
            lambda p, r, a: [1.0, 1e39],
            "gave 1e+39 for the response 'cd=' to the prompt 'cd=': return a finite",
        ),
        (
            lambda p, r, a: sys.exit(3),
            "raised SystemExit: 3 (test_text.py, line LINE) for the response 'ab='",
        ),
        (lambda p, r, a: mute(), "raised Mute: no message (test_text.py, line LINE) for the response 'ab='"),
        (lambda p, r, a: [1.0], "gave 1 numbers for 2 responses"),
        (lambda p, r, a: ["good", "bad"], "raised ValueError: could not convert string to float: 'good'"),
    ],
)
def test_failing_reward_names_response_and_error(function, message):
    task = COPYING.with_reward(function)
    prompts = task.prompts_of(["ab=", "cd="])
    answer = {"content": jnp.zeros((2, 6)), "prompt": prompts.tokens, "prompt_mask": prompts.mask}
    with pytest.raises(Exception) as error:
        jax.block_until_ready(task.reward(answer, prompts.tokens, prompts.mask))
    found, at = fdg.errors.host_error(error.value), re.compile(r"line \d+")
    assert found is not None and f"reward 'lambda' of task 'text:copying' {message}" in at.sub(
        "line LINE", str(found)
    )


# --- values and errors ---


def test_tasks_are_values():
    a, b = (envs.make("text:addition", digits=3) for _ in range(2))
    assert a == b and hash(a) == hash(b) and a != envs.make("text:subtraction", digits=3)
    assert len({envs.make(f"text:{name}") for name in envs.text.names()}) == len(envs.text.names())
    assert a.name == "text:addition" and a.stop_tokens == (2,) and a.response_length == 6
    assert jax.eval_shape(a.sample, keys()).prompts.tokens.shape == (COUNT, a.prompt_length)
    assert envs.make("text:addition", max_response=3).response_length == 3


def test_reversed_answers_and_padded_numbers():
    """The answer to `12-34=` is `22-`; problems and splits do not change."""
    plain, reverse = (envs.make("text:subtraction", reverse=reverse) for reverse in (False, True))
    for pair, answer in (((12, 34), "22-"), ((99, 9), "09")):
        content = jnp.array(pair)
        assert to_string(reverse.problem.solution(content)) == answer
        scores = [reverse.problem.score(content, literal(x))["correct"] for x in (answer, answer[::-1])]
        assert scores == [1.0, float(answer == answer[::-1])]
        assert to_string(plain.problem.solution(content)) == answer[::-1]
        assert (reverse.problem.identity(content) == plain.problem.identity(content)).all()
    assert reverse.overrides == (("reverse", True),) and reverse.prompt_length == plain.prompt_length
    assert "Write it from its last character" in reverse.problem.instruction
    padded = envs.make("text:division", padded=True)
    assert to_string(padded.problem.prompt(jnp.array([408, 2]))) == "0408/02="
    assert padded.prompt_length == envs.make("text:division").prompt_length


@pytest.mark.parametrize("name", ["addition", "remainder", "division"])
def test_smallest_number(name):
    problem = envs.make(f"text:{name}", smallest=90).problem
    drawn = jax.vmap(problem.draw)(jax.random.split(jax.random.key(0), 500))
    numbers = drawn if name != "division" else jnp.stack([drawn[:, 0] // drawn[:, 1], drawn[:, 1]])
    assert [int(numbers.min()), int(numbers.max())] == [90, 99]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: envs.make("text:adition"), "unknown text task 'adition': did you mean 'addition'?"),
        (
            lambda: envs.make("text:addition", digit=3),
            "no parameter 'digit': it has digits, padded, reverse, smallest, max_response, system,",
        ),
        (lambda: envs.make("text:addition", reverse=1), "reverse=1 must be True or False"),
        (lambda: envs.make("text:addition", smallest=100), "smallest=100 must be an integer from 0 to 99"),
        (lambda: envs.make("text:addition", smallest=93), "49 such problems, too few to hold some out"),
        (lambda: envs.make("text:addition", digits=9), "digits=9 must be an integer from 1 to 8"),
        (
            lambda: envs.make("text:parity", length=4),
            "16 such problems, too few to hold some out: use length=6",
        ),
        (lambda: envs.make("text:countdown", target=30), "target=30 must be at least twice largest=20"),
        (lambda: envs.make("text:arithmetic", terms=8, digits=2), "may have more than 9 digits"),
        (lambda: envs.make("text:copying", max_response=0), "max_response=0 must be at least 1"),
        (lambda: COPYING.sample(keys(), "tset"), "split='tset' must be 'train' or 'test'"),
        (lambda: COPYING.sample(jax.random.key(0)), "one typed PRNG key per environment"),
        (lambda: COPYING.prompts_of(["abcdefgh="]), "prompt 0 'abcdefgh=' has 10 tokens"),
        (lambda: COPYING.prompts_of(["A="]), "text 'A=': 'A' at 0 is not in the alphabet"),
        (lambda: COPYING.with_tokenizer(CharacterTokenizer("012")), "the single character '3'"),
        (lambda: CharacterTokenizer("aba"), "'a' occurs twice in its alphabet 'aba'"),
        (lambda: CharacterTokenizer("ab").decode([7]), "token 7 at 0 is not in the vocabulary"),
        (lambda: HostReward(3), "HostReward(3): give a function"),
        (lambda: COPYING.with_reward(len, weights=0.5), "weights=0.5 must be a list, with a number for each"),
        (lambda: COPYING.with_reward(len, weights=None), "weights=None must be a list, with a number for"),
    ],
)
def test_errors_are_one_line(make, message):
    with refuses(message):
        make()


def test_tasks_share_a_tokenizer():
    """All tasks have equal tokenizers; the vocabulary size is a multiple of 8, for 8 devices."""
    assert {envs.make(f"text:{name}").tokenizer for name in envs.text.names()} == {CharacterTokenizer()}
    assert CharacterTokenizer().vocab_size % 8 == 0
    assert all(len(c) == 1 for c in itertools.chain(CharacterTokenizer().alphabet))


@pytest.mark.parametrize("kind", [envs.text.TextGame, envs.text.TextProblem])
def test_missing_attribute_is_named(kind, monkeypatch):
    parts = [name for name in vars(kind) if not name.startswith("_")]
    for missing in parts:
        attributes = {name: staticmethod(lambda *_: None) for name in parts if name != missing}
        monkeypatch.setitem(globals(), "Mine", type("Mine", (), attributes))
        with pytest.raises(fdg.FdgError, match=f"Mine is a {kind.__name__} without {missing}: "):
            envs.make(f"{__name__}:Mine")


@dataclasses.dataclass(frozen=True)
class Pairs:
    """A tokenizer of one's own, with the documented members; each token but two is a pair of characters."""

    alphabet: str = "0123456789+= "
    pad: int = 0
    stops: tuple[int, ...] = (1,)

    @property
    def vocab_size(self):
        return 2 + len(self.alphabet) ** 2

    def encode(self, text):
        numbers = [self.alphabet.index(c) for c in (text if len(text) % 2 == 0 else " " + text)]
        return [2 + a * len(self.alphabet) + b for a, b in zip(numbers[::2], numbers[1::2], strict=True)]

    def decode(self, ids):
        pairs = [divmod(i - 2, len(self.alphabet)) for i in ids if i > 1]
        return "".join(self.alphabet[a] + self.alphabet[b] for a, b in pairs).lstrip()

    def encode_rows(self, rows, instruction="", system="", arguments=()):
        return [(self.encode(row.text), self.encode(row.answer or "")) for row in rows]


def test_tokenizer_of_documented_members(tmp_path):
    file = tmp_path / "sums.jsonl"
    file.write_text("".join(f'{{"problem": "{i}+{i}=", "answer": "{2 * i}"}}\n' for i in range(80)))
    task = TextTask(envs.make("text:file", path=str(file)).problem, Pairs())

    @jit
    def run(keys):
        content = task.draw(keys)
        tokens, mask = task.solutions(content)
        return [task.reward(content, *one).total for one in ((tokens, mask), (tokens + (tokens > 1), mask))]

    right, wrong = run(keys())
    assert right.tolist() == [1] * COUNT and wrong.tolist() == [0] * COUNT
    with refuses("no token of its tokenizer is the single character '-'"):
        envs.make("text:addition").with_tokenizer(Pairs())
