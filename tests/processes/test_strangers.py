"""Foreign connections to a starting run are refused, and delay nothing."""

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


# Messages of foreign clients. A process of the run sends nothing before it has read the challenge.
FOREIGN_MESSAGES = {
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
def pool():
    with concurrent.futures.ThreadPoolExecutor(4) as executor:
        yield executor


def test_foreign_connections_do_not_disturb_start(address, pool):
    """All clients connect and stay connected; then the run starts normally."""
    first = pool.submit(peers.Peers, address, 3, 0, {"port": 1})
    clients = [connect(address) for _ in FOREIGN_MESSAGES]
    for client, words in zip(clients, FOREIGN_MESSAGES.values(), strict=True):
        client.sendall(words)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begun = time.monotonic()
    others = [pool.submit(peers.Peers, address, 3, i) for i in (1, 2)]
    group = [one.result(20) for one in (first, *others)]
    assert time.monotonic() - begun < 5  # well below the handshake time of a silent client
    assert [one.notes for one in group] == [{"port": 1}] * 3
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 64 * 1024  # kilobytes
    exchanged = [pool.submit(one.exchange, i) for i, one in enumerate(group)]
    assert [one.result(20) for one in exchanged] == [[0, 1, 2]] * 3
    for one in group:
        one.leave()
    for client in clients:
        client.close()


def test_silent_connection_is_closed(address, monkeypatch):
    monkeypatch.setattr(lines, "HANDSHAKE_SECONDS", 0.3)
    with rendezvous.Rendezvous(*split_address(address)), connect(address) as client:
        received = b""
        with contextlib.suppress(ConnectionResetError):
            while more := client.recv(1000):
                received += more
        assert b"#CHALLENGE#" in received  # the listener closed the connection in time


def test_wrong_key(address, pool, monkeypatch):
    monkeypatch.setattr(peers, "JOIN_SECONDS", 1.5)
    first = pool.submit(peers.Peers, address, 2, 0)
    connect(address).close()
    monkeypatch.setenv(lines.KEY_VARIABLE, "another")
    with pytest.raises(
        FdgError, match=r"is not process 0 of this run \(digest sent was rejected\): .* same FDG"
    ):
        peers.Peers(address, 2, 1)
    with pytest.raises(FdgError, match=r"process 1 is missing \(2 connections were refused\)"):
        first.result(20)


def test_launcher_generates_a_key_per_run(python, monkeypatch, capfd):
    """All processes of a run get the same key; a key set by the user is kept."""
    python("echo $FDG_AUTHKEY")

    def keys():
        assert launch_processes.main(["--num-processes", "2"]) == 0
        return capfd.readouterr().out.split()

    one, two = keys(), keys()
    assert len(one) == 2 and len(set(one)) == 1 and len(one[0]) == 64 and one != two
    monkeypatch.setenv(lines.KEY_VARIABLE, "mine")
    assert keys() == ["mine", "mine"]


def test_long_data_are_split(address, pool):
    first = pool.submit(peers.Peers, address, 2, 0)
    second = peers.Peers(address, 2, 1)
    data = secrets.token_bytes(2 * lines._MAX_MESSAGE_BYTES + 3)
    sent = pool.submit(second.give, data)
    assert first.result(20).take(1) == data
    sent.result(20)
    for size in (0, lines._MAX_MESSAGE_BYTES - 1, lines._MAX_MESSAGE_BYTES):
        sent = pool.submit(second.give, data[:size])
        assert first.result().take(1) == data[:size]
    for one in (first.result(), second):
        one.leave()
