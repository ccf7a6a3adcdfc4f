"""The launcher: processes and hosts that it starts, errors for lost processes, restarts."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from fdg import ray_cluster
from fdg.commands import launch_processes
from fdg.launching import ray_host
from fdg.launching.restarting import Ending, Process, ending_of
from fdg.process_exit import LAUNCHER_PIPE
from tests.refusing import refused


def name(index):
    return f"process {index} (host a, pid {index})"


@pytest.mark.parametrize(
    ("processes", "ending"),
    [
        ([Process(name(0), 0), Process(name(1), 0)], Ending(0)),
        ([Process(name(0), 1), Process(name(1), 0)], Ending(1)),
        # A killed process ends the others, which are noticed first.
        ([Process(name(0), 1), Process(name(1), -9)], Ending(137, f"{name(1)} was killed by SIGKILL")),
        ([Process(name(0), -6), Process(name(1), None, "x")], Ending(1, f"{name(1)} is gone: x")),
        # A waiting process may abort before the killed one is noticed.
        ([Process(name(0), -6), Process(name(1), -9)], Ending(137, f"{name(1)} was killed by SIGKILL")),
        ([Process(name(0), 1), Process(name(1), -6)], Ending(134, f"{name(1)} was killed by SIGABRT")),
        ([Process(name(0), 2)], Ending(2)),
        ([Process(name(0), 2, "no folder")], Ending(2, f"{name(0)}: no folder")),
    ],
)
def test_ending_names_cause(processes, ending):
    assert ending_of(processes) == ending


def test_can_restart():
    assert all(Ending(status).can_restart for status in (1, 7, 134, 137))
    assert not any(Ending(status).can_restart for status in (0, 2, 130, 143))
    assert not Ending(137, interrupted=True).can_restart


class Engine:
    """Has two hosts, then one; the first run fails."""

    def __init__(self, *_):
        self.counts, self.endings, self.words = (
            [2, 1, 1],
            [Ending(137, "process 1 was killed"), Ending(0)],
            [],
        )

    def reserve(self, first):
        return self.counts.pop(0)

    def run(self, words):
        self.words.append(words)
        self.after_run()
        return self.endings.pop(0)

    def after_run(self):
        """Called after each run; tests override it to create files."""

    def close(self):
        pass


@pytest.fixture
def engine(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    engine = Engine()
    monkeypatch.setattr(launch_processes, "Here", lambda count: engine)
    return engine


def test_restart_resumes_with_remaining_processes(engine, tmp_path, capsys):
    names = {"algo": "a2c", "policy": "gpu_only", "policy_fields": {}, "hyperparameters": {}}
    config = json.dumps({**names, "devices": 8})
    engine.after_run = lambda: (
        (tmp_path / "run").mkdir(exist_ok=True) or (tmp_path / "run" / "config.json").write_text(config)
    )
    words = "--env Pendulum-v1 --devices 8 --hidden 64 64 --config old.json --out run"
    assert launch_processes.main(["--restarts", "1", *words.split()]) == 0
    assert engine.words == [
        words.split(),
        "--env Pendulum-v1 --hidden 64 64 --resume run --devices 4".split(),
    ]
    err = capsys.readouterr().err
    assert err == "error: process 1 was killed\nrestart 1 of 1, with 1 process\n"


@pytest.mark.parametrize(("words", "devices"), [("--resume run --devices 8", 8), ("--resume run", 6)])
def test_restarts_keep_the_devices_of_the_first_start(words, devices, engine, tmp_path):
    """A restart with fewer processes writes its own number of devices; an early crash leaves an older one."""
    (tmp_path / "run").mkdir()

    def write_config(devices):
        fields = {"algo": "a2c", "policy": "gpu_only", "policy_fields": {}, "hyperparameters": {}}
        (tmp_path / "run" / "config.json").write_text(json.dumps({**fields, "devices": devices}))

    write_config(6)
    engine.counts, engine.endings = [2, 1, 1], [Ending(137), Ending(137), Ending(0)]
    engine.after_run = lambda: write_config(devices // 2) if len(engine.words) == 2 else None
    assert launch_processes.main(["--restarts", "2", *words.split()]) == 0
    assert engine.words[1:] == [["--resume", "run", "--devices", str(devices // 2)]] * 2


def test_restart_without_run_directory(engine):
    words = "--restarts 3 -- --env Pendulum-v1 --algo sac --seed 5 --devices 8"
    assert launch_processes.main(words.split()) == 0
    first, second = engine.words
    assert first[:-1] == "--env Pendulum-v1 --algo sac --seed 5 --devices 8 --out".split()
    assert first[-1].startswith("runs/Pendulum-v1-sac-5-")
    assert second == [*first, "--devices", "4"]


def test_launches_in_one_second_have_their_own_directories(engine, tmp_path):
    """Each keeps its name from its start on, and leaves no empty folder if it is refused."""
    words, names = ["--restarts", "1", "--seed", "5"], []
    engine.counts, engine.endings = [1, 1], [Ending(2), Ending(2)]

    def start_another():
        names.append(engine.words[-1][-1])
        if len(names) == 1:
            launch_processes.main(words)

    engine.after_run = start_another
    launch_processes.main(words)
    assert len({*names}) == 2 and not any((tmp_path / "runs").iterdir())


def test_arguments_without_restarts(engine):
    assert launch_processes.main("--num-steps 4 --resume runs/old".split()) == 137
    assert engine.words == ["--num-steps 4 --resume runs/old".split()]


def test_restart_of_killed_process(python, monkeypatch, tmp_path, capfd):
    """With real processes that run a shell script instead of training."""
    monkeypatch.chdir(tmp_path)
    # The second process is killed on the first start; all record their arguments.
    python(
        'echo "$@" >> words$last\n'
        "if [ $last = 1 ] && [ ! -e again ]; then touch again; kill -9 $$; fi\n[ -e again ] || exec sleep 9\n"
    )
    monkeypatch.setattr("fdg.launching.here.LOST_SECONDS", 0.5)
    assert launch_processes.main("--restarts 1 --out run".split()) == 0
    assert len((tmp_path / "words1").read_text().splitlines()) == 2
    err = capfd.readouterr().err
    assert "error: process 1 (host " in err and "was killed by SIGKILL\nrestart 1 of 1, with 2 proc" in err


@pytest.mark.parametrize(("seconds", "first_fails"), [(0.3, False), (60.0, True)])
def test_stopped_process_is_named(seconds, first_fails, python, monkeypatch, tmp_path, capfd):
    """After a long silence, or after the failure of a process that waited for it; no process is left."""
    python(
        "echo $$ >> pids\n"
        f"[ $last = 1 ] && kill -STOP $$\n{'sleep 0.5; exit 1' if first_fails else 'exec sleep 60'}\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("fdg.launching.here.LOST_SECONDS", 0.3)
    monkeypatch.setattr("fdg.processes.lines.SILENT_SECONDS", seconds)
    assert launch_processes.main([]) == 1
    err = capfd.readouterr().err
    assert err.startswith("error: process 1 (host ") and "is gone: a signal stopped it" in err
    assert not any(alive(int(pid)) for pid in (tmp_path / "pids").read_text().split())


def test_continued_process_is_not_lost(python, monkeypatch, capfd):
    python("[ $last = 0 ] && sleep 0.5 && exit 0\n(sleep 0.2; kill -CONT $$) &\nkill -STOP $$\nsleep 0.5\n")
    monkeypatch.setattr("fdg.processes.lines.SILENT_SECONDS", 0.4)
    assert launch_processes.main([]) == 0
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("statuses", "error"),
    [("2 2", "error: of 0\n"), ("1 2", "error: of 0\n[1] error: of 1\n"), ("0 1", "[1] error: of 1\n")],
)
def test_common_error_is_printed_once(statuses, error, python, capfd):
    python(f"set {statuses} $@\nshift $last\n[ $1 = 0 ] || echo error: of $last >&2\nexit $1\n")
    assert launch_processes.main([]) in map(int, statuses.split())
    assert capfd.readouterr().err == error


def test_lines_that_are_not_utf8_are_forwarded(python, capfd):
    python("[ $last = 0 ] && exit 1\nprintf 'caf\\351\\nerror: of 1\\n' >&2\nexit 1\n")
    assert launch_processes.main([]) == 1
    assert capfd.readouterr().err == "[1] caf\\xe9\n[1] error: of 1\n"


ERRORS = {
    "--restarts -1": "--restarts -1: it must be 0 or more",
    "--num-processes 0": "--num-processes 0: it must be at least 1",
    "--nodes 2": "--nodes is for a Ray cluster: give --ray too",
    "--ray --nodes 0": "--nodes 0: it must be at least 1",
    "--ray --nodes two": "--nodes: 'two' is not an integer or none",
    "-- --num-processes 3": "--num-processes is for the launcher: write it before the --",
    "--num-processes 2 --process-id=1": "--process-id is set for each process by the launcher: leave it out",
    "--ray --num-processes 2": "--num-processes is for one machine: with --ray, give --nodes",
    "--ray --cpus-per-node=-1": "--cpus-per-node -1.0: it must be above 0 and finite",
    "--nods 2 -- --seed 1": "unknown flag '--nods': did you mean '--nodes'?",
    "--ray --ray-address ray://there:10001": "--ray-address ray://there:10001: addresses of Ray Client",
    "--ray --ray-address there": "--ray-address there: write HOST:PORT, such as 10.0.0.1:6379",
    "--ray --ray-address localhost:0": "--ray-address localhost:0: write HOST:PORT",
    "--ray --ray-address localhost:65536": "--ray-address localhost:65536: write HOST:PORT",
    "--ray --ray-address localhost:1": "--ray-address localhost:1: connection failed (Connection refused)",
}


@pytest.mark.parametrize("words", ERRORS)
def test_invalid_flags(words, capsys):
    assert refused(capsys, words, launch_processes.main).startswith(f"error: {ERRORS[words]}")


def test_ray_is_not_installed(monkeypatch, capsys):
    monkeypatch.setattr(ray_cluster.importlib.util, "find_spec", lambda name: None)
    assert launch_processes.main(["--ray"]) == 2
    assert capsys.readouterr().err == "error: Ray is not installed: pip install 'fdg[ray]'\n"


def test_stale_cluster_address(monkeypatch, tmp_path, capsys):
    """A killed Ray cluster leaves its address in a file."""
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text("localhost:1")
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    monkeypatch.setattr("ray._private.services.find_gcs_addresses", lambda: {"localhost:2"})
    assert launch_processes.main(["--ray"]) == 2
    assert capsys.readouterr().err.startswith("error: RAY_ADDRESS=auto: this machine is not in a Ray cluster")


def test_inherited_variables():
    given = {
        "MINE": "1",
        "JAX_PLATFORMS": "cpu",
        "RAY_JOB_ID": "2",
        "PATH": "/bin",
        "CUDA_VISIBLE_DEVICES": "",
    }
    assert ray_cluster.inherited_variables(given) == {"MINE": "1", "JAX_PLATFORMS": "cpu"}


# --- hosts ---


def output_and_status(host):
    lines, status, end = [], None, time.monotonic() + 30
    while status is None and time.monotonic() < end:
        some, status = host.follow(0.2)
        lines += some
    return lines, status


def test_host_returns_lines_and_exit_status(tmp_path):
    host = ray_host.Host()
    code = "import os, sys; print(os.environ['MINE'], os.getcwd()); print('x', file=sys.stderr); sys.exit(3)"
    pid, refusal = host.start(["-c", code], {"MINE": "y"}, str(tmp_path))
    assert pid > 0 and not refusal
    lines, status = output_and_status(host)
    assert sorted(lines) == [("err", "x"), ("out", f"y {tmp_path}")] and status == 3


def test_host_without_folder(tmp_path):
    pid, refusal = ray_host.Host().start(["-c", ""], {}, str(tmp_path / "x"))
    assert pid == 0 and "start from a folder that all hosts share" in refusal


def test_process_ends_with_its_launcher(tmp_path):
    """A process ends after its launcher is killed; its children inherit neither pipe nor variable."""
    sleeper = tmp_path / "fdg"  # the name of the command
    sleeper.write_text(
        "import os, subprocess, sys, time\nimport fdg.process_exit\n"
        "print(sys.stdin.read() == '', os.environ.get('FDG_TIED'), flush=True)\ntime.sleep(60)\n"
    )
    starter = (
        "import subprocess, sys, time\n"
        f"child = subprocess.Popen([sys.executable, {str(sleeper)!r}], stdin=subprocess.PIPE)\n"
        "print(child.pid, flush=True)\ntime.sleep(60)"
    )
    environment = {**os.environ, "PYTHONPATH": os.getcwd(), LAUNCHER_PIPE: "1"}
    with subprocess.Popen(
        [sys.executable, "-c", starter], stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        child = int(process.stdout.readline())
        assert process.stdout.readline() == "True None\n" and alive(child)
        process.send_signal(signal.SIGKILL)
        end = time.monotonic() + 20
        while alive(child) and time.monotonic() < end:
            time.sleep(0.05)
        assert not alive(child)


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
