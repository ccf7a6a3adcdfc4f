"""Environments in workers on a Ray cluster: names, flags, errors and values."""

import re

import pytest

import envs
from envs import from_ray
from fdg import ray_cluster
from fdg.commands.cli import train_main
from fdg.errors import FdgError, HostError
from tests.refusing import refused


def test_unreachable_cluster(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "localhost:1")
    monkeypatch.setattr(ray_cluster.module(), "is_initialized", lambda: False)
    source = envs.make("ray:gymnasium:CartPole-v1").source
    with pytest.raises(
        HostError, match="environment 'ray:gymnasium:CartPole-v1': RAY_ADDRESS=localhost:1: connection failed"
    ):
        from_ray.fleet(source)


ERRORS = {
    "ray:CartPole-v1": "'CartPole-v1' is compiled into the program and needs no workers",
    "ray:ray:gymnasium:CartPole-v1": "write ray: once",
    "ray:envpool:CartPol-v1": "unknown environment of EnvPool 'CartPol-v1'",
    "ray:gymnasium:CartPole-v1?workers=0": "workers=0 must be an integer of at least 1",
    "ray:gymnasium:CartPole-v1?cpus=0": "cpus=0 must be above 0 and finite",
    "ray:gymnasium:CartPole-v1?restarts=-1": "restarts=-1 must be 0 or more",
}


@pytest.mark.parametrize("name", ERRORS)
def test_invalid_fleets_are_refused(name):
    with pytest.raises(FdgError, match=re.escape(ERRORS[name])):
        made, overrides = envs.parse(name)
        envs.make(made, **overrides)


FLAGS = {
    "--env envpool:CartPole-v1 --env-workers 2": "'envpool:CartPole-v1' has threads: write ?num_threads=N",
    "--env mine:Mine --env-workers 2": "if it is a Gymnasium environment, write gymnasium:mine:Mine",
    "--env text:sorting --env-workers 2": "'text:sorting' runs in the program",
    "--env-workers 2": "'CartPole-v1' runs in the program",
    "--env ray:gymnasium:CartPole-v1 --env-workers 0": "--env-workers 0: it must be at least 1",
    "--algo tests.tiny:Pupil --env-workers 2": "--env-workers 2: tests.tiny:Pupil has its own environment",
}


@pytest.mark.parametrize("words", FLAGS)
def test_bad_flags_are_refused(words, capsys):
    assert FLAGS[words] in refused(capsys, words.split(), train_main)


def test_fleet_is_a_value():
    one, two = (envs.make("ray:gymnasium:CartPole-v1", workers=2, timeout=5.0) for _ in range(2))
    assert one == two and hash(one) == hash(two)
    assert (one.name, one.max_episode_steps, one.timeout) == ("ray:gymnasium:CartPole-v1", 500, 5.0)
    assert one.restarts == from_ray.RESTARTS
    pool = envs.make("ray:envpool:CartPole-v1").source.source.with_cores(3)
    assert dict(pool.options) == {"num_threads": 3}
