"""HOST:PORT."""

import pytest

from thinwire.errors import ConfigurationError
from thinwire.transport.address import split_address


@pytest.mark.parametrize(
    "address",
    [
        *("", "node", ":1", "node:", "node:x", "node:65536", "::1:5", "..:1"),
        *("node:" + "0" * 5000, "a" * 64 + ":1", "a" * 5000 + ":1"),
    ],
    ids=lambda address: address[:9],
)
def test_what_is_no_address_is_refused_and_not_printed_whole(address: str) -> None:
    with pytest.raises(ConfigurationError, match="not HOST:PORT") as caught:
        split_address(address)
    assert len(str(caught.value)) < 300


def test_hosts_and_ports_are_split() -> None:
    found = [split_address(each) for each in ("node:0", "10.0.0.1:65535", "[fe80::1]:7")]
    assert found == [("node", 0), ("10.0.0.1", 65535), ("fe80::1", 7)]
