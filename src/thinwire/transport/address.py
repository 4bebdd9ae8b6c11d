"""HOST:PORT as text, and the addresses of this machine."""

import contextlib
import socket
import struct
from collections.abc import Mapping

from thinwire.errors import ConfigurationError

# A block reserved for documentation, which only the default route leads to.
_DEFAULT_ROUTE = "192.0.2.1"
_GET_ADDRESS = 0x8915  # SIOCGIFADDR


def split_address(address: str) -> tuple[str, int]:
    """Host and port of HOST:PORT.

    Args:
        address: such as "node1:29400"; an IPv6 host is in brackets.

    Raises:
        ConfigurationError: the host is missing, or the port is not a number from 0 to 65535.

    >>> split_address("node1:29400"), split_address("[::1]:29400")
    (('node1', 29400), ('::1', 29400))
    """
    host, colon, port = address.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    bare = host[1:-1] if bracketed else host
    # int() refuses thousands of digits by an error of its own.
    is_number = port.isascii() and port.isdigit() and len(port) <= 5
    known = colon and is_number and int(port) <= 65535
    if not known or not _is_host(bare) or (":" in bare and not bracketed):
        raise ConfigurationError(
            f"use address {address[:80]!r}",
            because="it is not HOST:PORT with the name of a host and a port up to 65535",
            do="pass something like node1:29400, or [::1]:29400 for IPv6",
        )
    return bare, int(port)


def _is_host(host: str) -> bool:
    # What cannot be looked up ends in an error of another kind there.
    try:
        return bool(host.encode("idna"))
    except UnicodeError:
        return False


def address_text(host: str, port: int) -> str:
    """HOST:PORT, with brackets around an IPv6 host.

    >>> address_text("node1", 29400), address_text("::1", 29400)
    ('node1:29400', '[::1]:29400')
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def local_address(towards: str = _DEFAULT_ROUTE) -> str:
    """The address of this machine that packets to `towards` have as their sender; sends nothing.

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


def interface_addresses() -> Mapping[str, str]:
    """The IPv4 address of every network interface by its name; empty on other kernels than Linux.

    >>> interface_addresses().get("lo", "127.0.0.1")
    '127.0.0.1'
    """
    try:
        import fcntl
    except ImportError:
        return {}
    addresses: dict[str, str] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):  # an interface without an address
                reply = fcntl.ioctl(probe.fileno(), _GET_ADDRESS, request)
                addresses[name] = socket.inet_ntoa(reply[20:24])
    return addresses
