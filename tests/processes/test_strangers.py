"""Who connects to a starting run without being one of its processes: refused, and nobody waits for him."""

import concurrent.futures
import contextlib
import resource
import secrets
import socket
import struct
import time

import pytest

from fdg.addresses import split_address
from fdg.commands import launch_processes
from fdg.errors import FdgError
from fdg.processes import lines, peers, ports, rendezvous


def connect(address):
    deadline = time.monotonic() + 5
    while True:
        try:
            return socket.create_connection(split_address(address), timeout=5)
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.02)


# What a stranger says. A process of ours says nothing before it has read the challenge.
STRANGERS = {
    "http": b"GET / HTTP/1.0\r\nHost: here\r\n\r\n",
    "a huge message": struct.pack("!i", -1) + struct.pack("!Q", 1 << 62),
    "a greeting as it was": struct.pack("!cQ", b"h", 2) + b"{}",
    "a length that promises more": struct.pack("!i", 200) + b"x",
    "nothing": b"",
    **{f"noise {i}": secrets.token_bytes(1 + 37 * i) for i in range(8)},
}


@pytest.fixture
def address():
    return f"localhost:{ports.free_port('localhost')}"


@pytest.fixture
def together():
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        yield pool


def test_strangers_do_not_disturb_the_start(address, together):
    """All of them at once, each leaving its connection open; then the run starts as if nobody had come."""
    first = together.submit(peers.Peers, address, 3, 0, {"port": 1})
    strangers = [connect(address) for _ in STRANGERS]
    for stranger, words in zip(strangers, STRANGERS.values(), strict=True):
        stranger.sendall(words)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begun = time.monotonic()
    others = [together.submit(peers.Peers, address, 3, i) for i in (1, 2)]
    group = [one.result(20) for one in (first, *others)]
    assert time.monotonic() - begun < 5  # well below the time that the silent one has
    assert [one.notes for one in group] == [{"port": 1}] * 3
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 64 * 1024  # kilobytes
    told = [together.submit(one.exchange, i) for i, one in enumerate(group)]
    assert [one.result(20) for one in told] == [[0, 1, 2]] * 3
    for one in group:
        one.leave()
    for stranger in strangers:
        stranger.close()


def test_a_silent_connection_is_ended(address, monkeypatch):
    monkeypatch.setattr(lines, "HANDSHAKE_SECONDS", 0.3)
    with rendezvous.Rendezvous(*split_address(address)), connect(address) as stranger:
        received = b""
        with contextlib.suppress(ConnectionResetError):
            while more := stranger.recv(1000):
                received += more
        assert b"#CHALLENGE#" in received  # the end came from the other side, in time


def test_a_wrong_key_is_one_line_on_both_sides(address, together, monkeypatch):
    monkeypatch.setattr(peers, "JOIN_SECONDS", 1.5)
    first = together.submit(peers.Peers, address, 2, 0)
    connect(address).close()
    monkeypatch.setenv(lines.KEY_VARIABLE, "another")
    with pytest.raises(
        FdgError, match=r"is not process 0 of this run \(digest sent was rejected\): .* same FDG"
    ):
        peers.Peers(address, 2, 1)
    with pytest.raises(FdgError, match=r"process 1 is missing \(2 connections were refused\)"):
        first.result(20)


def test_the_launcher_gives_each_run_a_key_of_its_own(python, monkeypatch, capfd):
    """As the processes see it; a key that the user has set stays."""
    python("echo $FDG_AUTHKEY")

    def keys():
        assert launch_processes.main(["--num-processes", "2"]) == 0
        return capfd.readouterr().out.split()

    one, two = keys(), keys()
    assert len(one) == 2 and len(set(one)) == 1 and len(one[0]) == 64 and one != two
    monkeypatch.setenv(lines.KEY_VARIABLE, "mine")
    assert keys() == ["mine", "mine"]


def test_long_data_come_in_parts(address, together):
    first = together.submit(peers.Peers, address, 2, 0)
    second = peers.Peers(address, 2, 1)
    data = secrets.token_bytes(2 * lines._MAX_MESSAGE_BYTES + 3)
    sent = together.submit(second.give, data)
    assert first.result(20).take(1) == data
    sent.result(20)
    for size in (0, lines._MAX_MESSAGE_BYTES - 1, lines._MAX_MESSAGE_BYTES):
        sent = together.submit(second.give, data[:size])
        assert first.result().take(1) == data[:size]
    for one in (first.result(), second):
        one.leave()
