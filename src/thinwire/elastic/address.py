"""HOST:PORT in and out of text, and which address of this machine others can see."""

import socket

from thinwire.errors import ConfigurationError

__all__ = ["address_text", "local_address", "split_address"]

# Of a block that is for documentation: the route to it is the one to everywhere else.
_ELSEWHERE = "192.0.2.1"


def split_address(address: str) -> tuple[str, int]:
    """Host and port of HOST:PORT.

    Args:
        address: such as "node1:29400"; an IPv6 host stands in brackets.

    Raises:
        ConfigurationError: it has no host or no port from 0 to 65535.

    >>> split_address("node1:29400"), split_address("[::1]:29400")
    (('node1', 29400), ('::1', 29400))
    """
    host, colon, port = address.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    bare = host[1:-1] if bracketed else host
    known = colon and port.isascii() and port.isdigit() and int(port) <= 65535
    if not known or not bare or (":" in bare and not bracketed):
        raise ConfigurationError(
            f"use address {address!r}",
            because="it is not HOST:PORT with a port up to 65535",
            do="pass something like node1:29400, or [::1]:29400 for IPv6",
        )
    return bare, int(port)


def address_text(host: str, port: int) -> str:
    """HOST:PORT, with brackets around an IPv6 host.

    >>> address_text("node1", 29400), address_text("::1", 29400)
    ('node1:29400', '[::1]:29400')
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def local_address(towards: str = _ELSEWHERE) -> str:
    """The address of this machine from which it reaches `towards`; nothing is sent.

    Args:
        towards: a host; by default one to which only the default route leads.

    Raises:
        OSError: the name is unknown, or no route leads there.

    >>> local_address("127.0.0.1")
    '127.0.0.1'
    """
    found = socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM)
    family, kind, protocol, _, target = found[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])
