"""A forwarded port stays open after its target closes."""

import socket
import struct

import pytest

from fdg.processes import ports


@pytest.mark.parametrize("reset", [False, True])
def test_forwarded_port_survives_target(reset):
    with ports.listen("localhost", 0) as upstream:
        port = ports.forward_to(upstream.getsockname())
        local = socket.create_connection(("localhost", port), timeout=10)
        remote, _ = upstream.accept()
        local.sendall(b"there?")
        assert remote.recv(16) == b"there?"
        remote.sendall(b"here")
        assert local.recv(16) == b"here"
        if reset:  # as when a process dies with unread data
            remote.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        remote.close()
    local.settimeout(0.1)
    for _ in range(5):
        local.sendall(b"and now?")
        with pytest.raises(TimeoutError):
            local.recv(16)
    local.close()
