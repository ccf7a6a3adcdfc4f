"""What a file says is data: names of registries are looked up, and nothing else happens unasked."""

import json
import shutil

import pytest

import algos
import envs
import fdg
import policies
from fdg.commands import using
from fdg.commands.cli import plan_main, train_main
from fdg.errors import FdgError
from fdg.training.name_resolver import CALLER, NameResolver
from tests.hostile import directories, driver
from tests.hostile.__main__ import commands
from tests.tiny import Walk


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return directories.train_all(tmp_path_factory.mktemp("runs"), directories.QUICK)


@pytest.fixture
def planted(tmp_path, monkeypatch):
    """The file that payloads would write, in a current folder with the modules that they name."""
    here, mark = tmp_path / "here", tmp_path / "mark"
    here.mkdir()
    directories.plant(here, mark)
    monkeypatch.chdir(here)
    monkeypatch.syspath_prepend(here)
    return mark


@pytest.fixture
def edited(runs, tmp_path):
    """Makes a copy of a run whose configuration has other values."""

    def edit(hyperparameters=(), **changes):
        path = tmp_path / "run"
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(runs["ppo"], path)
        config = json.loads((path / "config.json").read_text())
        config["hyperparameters"].update(hyperparameters)
        (path / "config.json").write_text(json.dumps({**config, **changes}))
        return path

    return edit


NAMED = {
    "a class of the standard library": {"algo": "subprocess:Popen"},
    "a module of ours": {"algo": "fdg.ctrl_c:evil"},
    "a function of ours": {"env": "envs.user_code:make?name='evilmod:thing'&overrides={}"},
    "an import of ours": {"env": "envs.rendering:_module?module='evilmod'"},
    "a blank": {"algo": " evilmod:Algo"},
    "a policy": {"policy": "evilmod:Algo"},
    "an environment": {"env": "evilmod:thing"},
    "an environment of the standard library": {"env": "os:system?command='touch MARK'"},
    "Gymnasium's module": {"env": "gymnasium:evilmod:X-v0"},
    "Gymnasium's module twice": {"env": "gymnasium:gymnasium:evilmod:X-v0"},
    "Gymnasium's argument": {"env": "gymnasium:Hopper-v5?xml_file='MARK'"},
    "EnvPool's command": {"env": "envpool:D1Basic-v1?vzd_path='MARK'"},
    "a cluster": {"env": "ray:gymnasium:CartPole-v1"},
    "a download": {"env": "MNISTBandit-bsuite"},
    "a text for other people's code": {"env": "CartPole-v1?gravity='evilmod:thing'"},
    "a network": {"hyperparameters": {"network": "evilmod:thing"}},
    "a network that another value masks": {
        "network": "algos.ppo:PPO",
        "hyperparameters": {"network": "evilmod:thing"},
    },
    "a network without a module": {"hyperparameters": {"network": "evilmod"}},
    "an optimizer": {"hyperparameters": {"optimizer": "evilmod:thing"}},
    "an optimizer and blanks": {"hyperparameters": {"optimizer": "\tevilmod :thing"}},
}


# Loading meets every case, each other command one of every kind of name.
_KINDS = ("a class of the standard library", "a policy", "an environment", "a network", "an optimizer")
_OTHERS = ("plan --config", "train --resume", "train --from")


@pytest.mark.parametrize(
    ("command", "case"),
    [*(("load", case) for case in NAMED), *((command, case) for command in _OTHERS for case in _KINDS)],
)
def test_what_only_a_file_names_is_refused(command, case, edited, planted, tmp_path):
    path = edited(**json.loads(json.dumps(NAMED[case]).replace("MARK", str(planted))))
    found = driver.attempt(commands(path, tmp_path / "out")[command], [tmp_path / "out", path])
    assert not found.faults and not planted.exists(), found
    assert "a file alone may not ask for that" in found.said or "unknown environment" in found.said, found


@pytest.mark.parametrize("command", ["evaluate", "export", "play"])
def test_every_command_that_reads_a_run_refuses_it(command, edited, planted, tmp_path):
    found = driver.attempt(commands(edited(algo="evilmod:Algo"), tmp_path)[command], [tmp_path])
    assert not found.faults and not planted.exists() and found.status == 2, found
    assert "imports the module evilmod" in found.said and "--trust" in found.said


def test_weights_of_a_run_are_no_way_around(edited, planted, tmp_path):
    """`--from` takes weights of a run whose names the command line replaces."""
    path = edited(algo="evilmod:Algo", env="evilmod:thing")
    words = ["--algo", "ppo", "--env", "CartPole-v1", "--from", str(path), "--out", str(tmp_path / "out")]
    found = driver.attempt(lambda: train_main([*words, "--total-steps", "1000"]), [tmp_path])
    assert not found.faults and not planted.exists() and found.status == 2, found
    with pytest.raises(FdgError, match="a file alone may not ask"):
        fdg.fit(algos.PPO(env=envs.make("CartPole-v1")), start_from=path, out=tmp_path / "out")


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_metrics_go_to_no_service_unasked(name, edited, capsys):
    path = edited(**{name: "evil"})
    assert train_main(["--resume", str(path), "--total-steps", "64"]) == 2
    assert f"{name} = evil, which sends metrics to a service" in capsys.readouterr().err


def test_networks_to_search_among_are_named(edited, capsys):
    pytest.importorskip("optuna")
    path = edited(optuna=2, search="network=none|evilmod:thing")
    assert plan_main(["--config", str(path / "config.json")]) == 2
    assert "imports the module evilmod" in capsys.readouterr().err


def test_what_the_caller_names_or_trusts_is_resolved(tmp_path):
    file = tmp_path / "config.json"
    name = f"{Walk.__module__}:{Walk.__qualname__}"
    for resolver in (CALLER, NameResolver(file, {"algo": name}), NameResolver(file, trust=True)):
        assert resolver.algorithm_class(name) is Walk
    for named in (None, {"algo": "tests.tiny:Other"}, {"env": name}):
        with pytest.raises(FdgError, match=r"imports the module tests\.tiny"):  # imported already: no trust
            NameResolver(file, named).algorithm_class(name)


def test_names_of_ours_need_no_trust(tmp_path):
    resolver = NameResolver(tmp_path / "config.json")
    assert resolver.algorithm_class("algos.ppo:PPO") is resolver.algorithm_class("ppo") is algos.PPO
    assert resolver.policy_class("policies.gpu_only:GPUOnly") is policies.GPUOnly
    for text in ("CartPole-v1?gravity=9.0", "brax:ant:spring", "gymnasium:Hopper-v5?frame_skip=8"):
        resolver.environment(text)
    (tmp_path / "problems.jsonl").touch()
    for text in (f"text:file?path={tmp_path}/problems.jsonl", "envpool:HalfCheetah-v4?num_threads=2"):
        resolver.environment(text)
    for name in ("algos.ppo:_PPO", "algos.networks:PPO", "algos:get", "policies:get"):
        with pytest.raises(FdgError, match="imports the module"):
            resolver.algorithm_class(name)


@pytest.mark.parametrize(
    ("ask", "name", "message"),
    [
        ("algorithm_class", "subprocess:Popen", r"a class with init\(key\) and iterate\(state\)"),
        ("algorithm_class", "os:system", "a class with init"),
        ("policy_class", "subprocess:Popen", "a policy is a class with place"),
        ("policy_class", "tests.tiny:Walk", "a policy is a class with place"),
        ("algorithm_class", "nowhere.at_all:Mine", "there is no module"),
        ("algorithm_class", 3, "is not a name"),
        ("policy_class", None, "is not a name"),
    ],
)
def test_also_what_is_trusted_has_to_be_what_it_is_for(ask, name, message):
    with pytest.raises(FdgError, match=message):
        getattr(CALLER, ask)(name)


def test_a_user_may_register_an_environment_and_its_file_is_loaded(runs, edited, monkeypatch):
    monkeypatch.setattr(envs.registry, "_registered", {})
    envs.register("mine", lambda gravity=9.8: envs.make("CartPole-v1", gravity=gravity))
    assert fdg.load(edited(env="mine?gravity=9.8")).algorithm.env == envs.make("CartPole-v1", gravity=9.8)
    with pytest.raises(FdgError, match="passes the text gravity='evilmod:thing'"):
        fdg.load(edited(env="mine?gravity='evilmod:thing'"))


def test_random_hostile_directories(runs, planted, tmp_path):
    """A few of `python -m tests.hostile`, through what compiles nothing."""
    for number in range(16):
        folder = tmp_path / str(number)
        folder.mkdir()
        path, changes = directories.hostile(runs, folder, number, 1, planted)
        command = ("load", "plan --config", "plot", "load")[number % 4]
        found = driver.attempt(commands(path, folder)[command], [folder])
        assert not found.faults and not planted.exists(), (number, command, changes, found)


def test_evaluating_in_another_environment_names_it(runs, planted, tmp_path, capsys):
    """`--env` of `fdg.evaluate` is the caller's."""
    words = [str(runs["ppo"]), "--env", "nowhere:maze", "--out", str(tmp_path / "e.jsonl")]
    assert using.COMMANDS["evaluate"](words) == 2
    assert "there is no module 'nowhere'" in capsys.readouterr().err
