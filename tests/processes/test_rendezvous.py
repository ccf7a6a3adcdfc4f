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
def test_late_process(port, late):
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


def test_no_listener(port):
    with pytest.raises(
        FdgError, match=rf"process 0 did not listen at localhost:{port} within 0 s: .*refused"
    ):
        connect_to_first("localhost", port, 0)


def test_two_listeners_at_one_address(port):
    with Rendezvous("localhost", port), pytest.raises(FdgError, match=f"cannot listen on localhost:{port}: "):
        Rendezvous("localhost", port)


def test_free_port_when_preferred_ports_are_taken(monkeypatch):
    usual = ports.listen

    def listen(host, port):
        if port:
            raise OSError("taken")
        return usual(host, port)

    monkeypatch.setattr(ports, "listen", listen)
    assert 0 < ports.free_port("localhost") < 65536


def test_second_initialize_is_refused(monkeypatch):
    monkeypatch.setattr(peers, "JOIN_SECONDS", 0.1)  # limits the time of a failing test
    monkeypatch.setattr(distributed, "_peers", object())
    with pytest.raises(FdgError, match=r"distributed\.initialize was called before"):
        distributed.initialize("localhost:1", 2, 1)


def test_launcher_does_not_wait_for_orphans(python):
    """An orphan keeps standard error open: the thread that reads it must not keep the launcher alive."""
    python("sleep 3 &")
    before = set(threading.enumerate())
    assert launch_processes.main(["--num-processes", "2"]) == 0
    left = set(threading.enumerate()) - before
    assert left and all(thread.daemon for thread in left)
