"""Names and IPv4 addresses of this machine's network interfaces."""

import contextlib
import socket
import struct
from collections.abc import Mapping

__all__ = ["interface_addresses"]

_GET_ADDRESS = 0x8915  # SIOCGIFADDR


def interface_addresses() -> Mapping[str, str]:
    """The IPv4 address of every interface that has one; empty where the kernel is not Linux.

    >>> interface_addresses().get("lo", "127.0.0.1")
    '127.0.0.1'
    """
    try:
        import fcntl
    except ImportError:
        return {}
    addresses: dict[str, str] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
        for _, name in socket.if_nameindex():
            question = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):  # it has no address
                answer = fcntl.ioctl(asker.fileno(), _GET_ADDRESS, question)
                addresses[name] = socket.inet_ntoa(answer[20:24])
    return addresses
