"""Free ports, listening sockets, and a forwarding port that stays open when its target closes."""

import contextlib
import random
import socket
import threading
from collections.abc import Sequence
from typing import Any

_NON_EPHEMERAL_PORTS = range(20_000, 32_000)  # below the range of outgoing connections


def is_local(host: str) -> bool:
    """Whether a host name means this machine."""
    return host in ("localhost", "127.0.0.1")


def free_port(host: str) -> int:
    """A free port. It is outside the range of outgoing connections, which could take the port first."""
    for port in random.SystemRandom().sample(_NON_EPHEMERAL_PORTS, 100):
        with contextlib.suppress(OSError), listen(host, port):
            return port
    with listen(host, 0) as server:
        return server.getsockname()[1]


def listen(host: str, port: int) -> socket.socket:
    """A listening socket, which accepts only local connections if `host` is this machine."""
    if is_local(host):
        return socket.create_server(("127.0.0.1", port))
    if socket.has_dualstack_ipv6():
        return socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def forward_to(upstream: Sequence[Any]) -> int:
    """Opens a port on this machine that forwards connections to `upstream` (host, port); returns its number.

    A connection to the port stays open when `upstream` closes.
    """

    def serve() -> None:
        while True:
            local = server.accept()[0]
            try:
                remote = socket.create_connection(tuple(upstream), timeout=10)
            except OSError:
                local.close()  # the client will try again
                continue
            remote.settimeout(None)
            threading.Thread(target=forward, args=(local, remote), daemon=True).start()
            threading.Thread(target=pump, args=(remote, local), daemon=True).start()

    def forward(local: socket.socket, remote: socket.socket) -> None:
        pump(local, remote)
        # Data that still arrives is discarded until the sender closes.
        with contextlib.suppress(OSError):
            while local.recv(65536):
                pass
        for connection in (local, remote):
            with contextlib.suppress(OSError):
                connection.close()

    def pump(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while data := source.recv(65536):
                target.sendall(data)

    server = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=serve, daemon=True).start()
    return server.getsockname()[1]
