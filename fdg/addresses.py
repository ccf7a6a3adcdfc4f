"""Parses and writes HOST:PORT."""

from fdg.errors import FdgError


def split_address(address: str, label: str | None = None, example: str = "10.0.0.1:1234") -> tuple[str, int]:
    """Splits HOST:PORT into the host (without brackets) and the port, from 1 to 65535.

    The error message begins with `label`, by default the address, and ends with `example`.

    >>> split_address("localhost:1234"), split_address("[::1]:80")
    (('localhost', 1234), ('::1', 80))
    >>> split_address("far.away:65535")[1], split_address("far.away:1")[1]
    (65535, 1)
    >>> split_address("far.away:65536", "--coordinator-address far.away:65536")
    Traceback (most recent call last):
    fdg.errors.FdgError: --coordinator-address far.away:65536: write HOST:PORT, such as 10.0.0.1:1234
    >>> split_address("far.away:ssh")
    Traceback (most recent call last):
    fdg.errors.FdgError: 'far.away:ssh': write HOST:PORT, such as 10.0.0.1:1234
    """
    host, _, port = address.rpartition(":")
    # Python's `isdigit` also accepts non-ASCII digits.
    if not host or not (port.isascii() and port.isdecimal()) or not 0 < int(port[:6]) < 65536:
        raise FdgError(f"{label or f'{address!r:.60}'}: write HOST:PORT, such as {example}")
    return host.strip("[]"), int(port)


def join_address(host: str, port: int) -> str:
    """HOST:PORT, with an IPv6 address in brackets: the inverse of `split_address`.

    >>> join_address("localhost", 1234), join_address("::1", 80)
    ('localhost:1234', '[::1]:80')
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
