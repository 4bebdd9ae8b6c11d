"""HOST:PORT as text, and the address of this machine."""

import re
import socket

from thinwire.errors import check

# Labels of up to 63 characters, as in DNS; a longer name cannot be looked up.
_LABEL = r"[^\s.:/@\[\]]{1,63}"
_ADDRESS = re.compile(
    rf"(?:\[(?P<ipv6>[0-9A-Fa-f:.%\w]+)\]|(?P<host>{_LABEL}(?:\.{_LABEL})*\.?)):(?P<port>[0-9]{{1,5}})"
)
# A block reserved for documentation, which only the default route leads to.
_DEFAULT_ROUTE = "192.0.2.1"


def split_address(address: str) -> tuple[str, int]:
    """Host and port of HOST:PORT.

    Args:
        address: such as "node1:29400"; an IPv6 host is in brackets.

    Raises:
        ConfigurationError: the host is missing, or the port is not a number from 0 to 65535.

    >>> split_address("node1:29400"), split_address("[::1]:29400")
    (('node1', 29400), ('::1', 29400))
    """
    found = _ADDRESS.fullmatch(address)
    check(
        found is not None and int(found["port"]) <= 65535,
        f"use address {address[:80]!r}",
        because="it is not HOST:PORT with the name of a host and a port up to 65535",
        do="pass something like node1:29400, or [::1]:29400 for IPv6",
    )
    assert found is not None
    return found["ipv6"] or found["host"], int(found["port"])


def address_text(host: str, port: int) -> str:
    """HOST:PORT, with brackets around an IPv6 host.

    >>> address_text("node1", 29400), address_text("::1", 29400)
    ('node1:29400', '[::1]:29400')
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def local_address(towards: str = _DEFAULT_ROUTE) -> str:
    """The sender's address of packets from this machine to `towards`; sends nothing.

    Args:
        towards: a host; the default gives the address on the default route.

    Raises:
        OSError: the host is unknown, or there is no route to it.

    >>> local_address("127.0.0.1")
    '127.0.0.1'
    """
    found = socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM)
    family, kind, protocol, _, target = found[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


def reachable_host(host: str) -> str:
    """The host under which others reach a server that listens on `host`.

    >>> reachable_host("127.0.0.1")
    '127.0.0.1'
    """
    if host not in ("0.0.0.0", "::"):
        return host
    try:
        return local_address()
    except OSError:  # there is no default route
        return socket.gethostname()
