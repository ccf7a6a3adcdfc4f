"""Rendezvous, within one process: early and late processes, and a missing process 0."""

import concurrent.futures
import json
import threading
import time

import pytest

from fdg.commands import launch_processes
from fdg.errors import FdgError
from fdg.processes import distributed, lines, peers, ports
from fdg.processes.rendezvous import Hello, Rendezvous, connect_to_first

HELLO = json.dumps({"who": "process 1", "process": 1, "processes": 2}).encode()


@pytest.fixture
def port():
    return ports.free_port("localhost")


@pytest.mark.parametrize("late", ["listener", "process"])
def test_either_may_be_late(port, late):
    """The listener waits for late processes; an early process retries until process 0 listens."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        early = pool.submit(connect_to_first, "localhost", port, 10) if late == "listener" else None
        time.sleep(0.25)
        with Rendezvous("localhost", port) as listener:
            assert early is not None or listener.wait(0.25) is None
            one = connect_to_first("localhost", port, 10) if early is None else early.result(10)
            one.send(lines.HELLO, HELLO)
            found = listener.wait(10)
            assert found is not None and found[1] == Hello("process 1", 1, 2) and listener.refused == 0
            found[0].close()
            one.close()


def test_nobody_is_there(port):
    with pytest.raises(
        FdgError, match=rf"process 0 did not listen at localhost:{port} within 0 s: .*refused"
    ):
        connect_to_first("localhost", port, 0)


def test_two_listeners_at_one_address(port):
    with Rendezvous("localhost", port), pytest.raises(FdgError, match=f"cannot listen on localhost:{port}: "):
        Rendezvous("localhost", port)


def test_where_every_port_in_question_is_taken_it_is_another(monkeypatch):
    usual = ports.listen

    def listen(host, port):
        if port:
            raise OSError("taken")
        return usual(host, port)

    monkeypatch.setattr(ports, "listen", listen)
    assert 0 < ports.free_port("localhost") < 65536


def test_processes_are_joined_once(monkeypatch):
    monkeypatch.setattr(peers, "JOIN_SECONDS", 0.1)  # as long as the wrong answer would take
    monkeypatch.setattr(distributed, "_peers", object())
    with pytest.raises(FdgError, match=r"distributed\.initialize was called before"):
        distributed.initialize("localhost:1", 2, 1)


def test_the_launcher_does_not_wait_for_what_its_processes_leave_behind(python):
    """Here a child that keeps standard error open: what reads it must not keep the launcher alive."""
    python("sleep 3 &")
    before = set(threading.enumerate())
    assert launch_processes.main(["--num-processes", "2"]) == 0
    left = set(threading.enumerate()) - before
    assert left and all(thread.daemon for thread in left)
