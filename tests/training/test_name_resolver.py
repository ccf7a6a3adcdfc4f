"""Names in configuration files: registered names resolve, other modules are imported only with trust."""

import json
import shutil

import pytest

import algos
import envs
import fdg
import policies
from algos import presets
from fdg.commands import using
from fdg.commands.cli import plan_main, train_main
from fdg.errors import FdgError
from fdg.training.name_resolver import PERMIT_ALL, NameResolver
from tests.hostile import directories, driver
from tests.hostile.__main__ import commands
from tests.tiny import Walk


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return directories.train_all(tmp_path_factory.mktemp("runs"), directories.QUICK)


@pytest.fixture
def marker(tmp_path, monkeypatch):
    """The file that payloads would write; the current folder has the modules that they name."""
    here, mark = tmp_path / "here", tmp_path / "mark"
    here.mkdir()
    directories.plant(here, mark)
    monkeypatch.chdir(here)
    monkeypatch.syspath_prepend(here)
    return mark


@pytest.fixture
def edited(runs, tmp_path):
    """A function that copies a run and changes its configuration."""

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
    "a module of fdg": {"algo": "fdg.ctrl_c:evil"},
    "a function of fdg": {"env": "envs.user_code:make?name='evilmod:thing'&overrides={}"},
    "an import by fdg": {"env": "envs.rendering:_module?module='evilmod'"},
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
    "a text argument": {"env": "CartPole-v1?gravity='evilmod:thing'"},
    "a network": {"hyperparameters": {"network": "evilmod:thing"}},
    "a network that another value masks": {
        "network": "algos.ppo:PPO",
        "hyperparameters": {"network": "evilmod:thing"},
    },
    "a network without a module": {"hyperparameters": {"network": "evilmod"}},
    "an optimizer": {"hyperparameters": {"optimizer": "evilmod:thing"}},
    "an optimizer and blanks": {"hyperparameters": {"optimizer": "\tevilmod :thing"}},
}


# `load` runs every case, the other commands one case of each kind of name.
_KINDS = ("a class of the standard library", "a policy", "an environment", "a network", "an optimizer")
_OTHERS = ("plan --config", "train --resume", "train --from")


@pytest.mark.parametrize(
    ("command", "case"),
    [*(("load", case) for case in NAMED), *((command, case) for command in _OTHERS for case in _KINDS)],
)
def test_names_in_a_file_are_refused(command, case, edited, marker, tmp_path):
    path = edited(**json.loads(json.dumps(NAMED[case]).replace("MARK", str(marker))))
    found = driver.attempt(commands(path, tmp_path / "out")[command], [tmp_path / "out", path])
    assert not found.faults and not marker.exists(), found
    assert "a file alone may not ask for that" in found.said or "unknown environment" in found.said, found


@pytest.mark.parametrize("command", ["evaluate", "export", "play"])
def test_commands_refuse_foreign_names(command, edited, marker, tmp_path):
    found = driver.attempt(commands(edited(algo="evilmod:Algo"), tmp_path)[command], [tmp_path])
    assert not found.faults and not marker.exists() and found.status == 2, found
    assert "imports the module evilmod" in found.said and "--trust" in found.said


def test_start_from_refuses_foreign_names(edited, marker, tmp_path):
    """Also where the command line gives another algorithm and environment."""
    path = edited(algo="evilmod:Algo", env="evilmod:thing")
    words = ["--algo", "ppo", "--env", "CartPole-v1", "--from", str(path), "--out", str(tmp_path / "out")]
    found = driver.attempt(lambda: train_main([*words, "--total-steps", "1000"]), [tmp_path])
    assert not found.faults and not marker.exists() and found.status == 2, found
    with pytest.raises(FdgError, match="a file alone may not ask"):
        fdg.fit(algos.PPO(env=envs.make("CartPole-v1")), start_from=path, out=tmp_path / "out")


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_trackers_in_a_file_are_refused(name, edited, capsys):
    path = edited(**{name: "evil"})
    assert train_main(["--resume", str(path), "--total-steps", "64"]) == 2
    assert f"{name} = evil, which sends metrics to a service" in capsys.readouterr().err


def test_networks_in_a_search_space_are_refused(edited, capsys):
    pytest.importorskip("optuna")
    path = edited(optuna=2, search="network=none|evilmod:thing")
    assert plan_main(["--config", str(path / "config.json")]) == 2
    assert "imports the module evilmod" in capsys.readouterr().err


def test_named_or_trusted_modules_resolve(tmp_path):
    file = tmp_path / "config.json"
    name = f"{Walk.__module__}:{Walk.__qualname__}"
    for resolver in (PERMIT_ALL, NameResolver(file, {"algo": name}), NameResolver(file, trust=True)):
        assert resolver.algorithm_class(name) is Walk
    for named in (None, {"algo": "tests.tiny:Other"}, {"env": name}):
        with pytest.raises(FdgError, match=r"imports the module tests\.tiny"):  # imported, not trusted
            NameResolver(file, named).algorithm_class(name)


def test_fdg_names_need_no_trust(tmp_path):
    resolver = NameResolver(tmp_path / "config.json")
    assert resolver.algorithm_class("algos.ppo:PPO") is resolver.algorithm_class("ppo") is algos.PPO
    assert resolver.policy_class("policies.gpu_only:GPUOnly") is policies.GPUOnly
    resolver.check_fields(algos.SAC, presets.of("SAC", "MountainCarContinuous-v0"))
    for text in ("CartPole-v1?gravity=9.0", "brax:ant:spring", "gymnasium:Hopper-v5?frame_skip=8"):
        resolver.environment(text)
    (tmp_path / "problems.jsonl").touch()
    for text in (f"text:file?path={tmp_path}/problems.jsonl", "envpool:HalfCheetah-v4?num_threads=2"):
        resolver.environment(text)
    for name in ("algos.ppo:_PPO", "algos.networks:PPO", "algos:get", "policies:get"):
        with pytest.raises(FdgError, match="imports the module"):
            resolver.algorithm_class(name)


@pytest.mark.parametrize(
    ("method", "name", "message"),
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
def test_trusted_names_must_have_the_right_type(method, name, message):
    with pytest.raises(FdgError, match=message):
        getattr(PERMIT_ALL, method)(name)


def test_registered_environment_is_loaded(runs, edited, monkeypatch):
    monkeypatch.setattr(envs.registry, "_registered", {})
    envs.register("mine", lambda gravity=9.8: envs.make("CartPole-v1", gravity=gravity))
    assert fdg.load(edited(env="mine?gravity=9.8")).algorithm.env == envs.make("CartPole-v1", gravity=9.8)
    with pytest.raises(FdgError, match="passes the text gravity='evilmod:thing'"):
        fdg.load(edited(env="mine?gravity='evilmod:thing'"))


def test_random_hostile_directories(runs, marker, tmp_path):
    """A few cases of `python -m tests.hostile`, with commands that compile nothing."""
    for number in range(16):
        folder = tmp_path / str(number)
        folder.mkdir()
        path, changes = directories.hostile(runs, folder, number, 1, marker)
        command = ("load", "plan --config", "plot", "load")[number % 4]
        found = driver.attempt(commands(path, folder)[command], [folder])
        assert not found.faults and not marker.exists(), (number, command, changes, found)


def test_env_flag_of_evaluate_is_trusted(runs, marker, tmp_path, capsys):
    """The caller gives `--env`, so its module is imported."""
    words = [str(runs["ppo"]), "--env", "nowhere:maze", "--out", str(tmp_path / "e.jsonl")]
    assert using.COMMANDS["evaluate"](words) == 2
    assert "there is no module 'nowhere'" in capsys.readouterr().err
