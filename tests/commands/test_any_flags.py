"""Every command line runs, or ends with a one-line error and status 2: a sample of `tools/break_it`."""

import dataclasses
import random
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, given, settings, strategies

from fdg.commands import cli, parse
from tests.commands.any_flags import draw_words, outcome


@settings(
    max_examples=15,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(seed=strategies.integers(0, 2**32))
def test_random_flags(seed, capsys):
    words = draw_words(random.Random(seed))

    def read(argv):
        parse.parse(argv, "train", "")
        return 0

    wrong = outcome(lambda words: cli.guarded(read, words), words, capsys)
    assert wrong is None, (words, wrong)


REGRESSIONS = [  # each once ended in a traceback
    "--devices=--",
    "--staleness=--",
    "--",
    "--algo dqn --updates-per-step 1e400",
    "--devices 4294967295",
    "--env CartPole-v1?gravity={{}}",
    "--env CartPole-v1?{{}}",
    "--env MPE_simple_spread_v3?num_agents=0",
    "--env CartPole-v1?max_steps_in_episode=99999999999999999999",
    "--num-envs 99999999999999999999",
    "--algo tests.tiny:Walk --num-seeds 4294967296",
]


@pytest.mark.parametrize("words", REGRESSIONS)
def test_regressions(words, capsys):
    wrong = outcome(cli.plan_main, words.split(), capsys)
    assert wrong is None, wrong


@pytest.mark.parametrize("alias", ["--lr 0.5", "--lr=0.5", "--step_size 0.5"])
def test_flag_aliases(alias):
    assert parse.parse(alias.split(), "train", "").algorithm.learning_rate == 0.5
    job = parse.parse(
        "--gamma 0.5 --total-timesteps 1024 --seeds 2 --env-id Pendulum-v1".split(), "train", ""
    )
    assert job.algorithm.discount == 0.5 and job.algorithm.total_steps == 1024
    assert job.agents == 2 and job.config["env"] == "Pendulum-v1"


def test_user_fields_take_precedence_over_aliases():
    job = parse.parse("--algo tests.commands.test_any_flags:Own --lr 3".split(), "train", "")
    assert (job.algorithm.lr, job.algorithm.learning_rate) == (3, 1)


@dataclasses.dataclass(frozen=True)
class Own:
    learning_rate: int = 1
    lr: int = 2
    steps_per_iteration: ClassVar[int] = 1

    def init(self, key):
        return key

    def iterate(self, state):
        return state, {}
