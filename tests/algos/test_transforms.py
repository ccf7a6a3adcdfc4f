"""Transforms of samples before learning: reanalysis, changed rewards, placement and errors."""

import pytest

import algos
import envs
import fdg
import policies
from algos.networks import actor_critic, policy_and_value
from algos.one_update import over_time
from tests.algos.offline.data import random_steps

ENV = envs.make("CartPole-v1")
SMALL = {"num_envs": 4, "num_steps": 4, "hidden": (4,)}
NETWORK = actor_critic(ENV.observation_space, ENV.action_space, hidden=(4,))


def reanalyse(rows, parameters, key):
    """Replaces recorded values by those of the current parameters."""

    def value_of(observation):
        return policy_and_value(NETWORK, parameters, observation, ENV.action_space)[1]

    value = over_time(value_of, rows.observation)
    return rows._replace(decision=rows.decision._replace(value=value))


def doubled(rows, parameters, key):
    """Doubles rewards."""
    return rows._replace(time_step=rows.time_step._replace(reward=2 * rows.time_step.reward))


def ppo(**fields):
    return algos.PPO(**{"env": ENV, **SMALL, "num_epochs": 1, "num_minibatches": 2, **fields})


def test_transform_runs_with_buffer():
    algorithm = algos.A2C(env=ENV, **SMALL, transform=doubled)
    plan = fdg.place(algorithm, policies.Workers(environments=1, buffers=2), 5)
    assert dict(plan.assignment)["transform"] == "buffers"


@pytest.mark.parametrize("cls", [algos.IQL, algos.TD3BC, algos.ReBRAC, algos.CQL])
def test_dataset_transform(cls):
    rows = []

    def spy(given, parameters, key):
        rows.append(given.reward.shape)
        return given

    dataset = random_steps("probe:continuous")
    made = cls(env=envs.make("probe:continuous"), dataset=dataset, num_envs=4, batch_size=8, transform=spy)
    assert "transform" in [fragment.name for fragment in fdg.trace(made).fragments]
    assert rows[0] == (made.updates_per_iteration, 8)


@pytest.mark.parametrize(
    ("transform", "words"),
    [
        (
            3,
            r"transform=3: it must be a function of \(rows, parameters, key\), 'module:name' of one, or None",
        ),
        (lambda rows: rows, r"transform takes \(rows\), but is called with \(rows, parameters, key\)"),
        (lambda rows, parameters, key: rows.action, "transform gives .*: give rows of the structure"),
        (
            lambda rows, parameters, key: rows._replace(action=rows.action[:1]),
            r"rows.action of shape \(1, 4\) and dtype int32: give shape \(4, 4\)",
        ),
        ("tests.algos.test_transforms:nowhere", "--transform"),
    ],
)
def test_invalid_transform(transform, words):
    with pytest.raises(fdg.FdgError, match=words):
        fdg.trace(ppo(transform=transform))


def test_algorithm_without_transform():
    with pytest.raises(fdg.FdgError, match="transform: A3C does not transform rollouts; use A2C"):
        algos.A3C(env=ENV, transform=doubled)
