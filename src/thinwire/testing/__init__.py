"""Contract suites for tests of your own codec, transport or outer optimizer, and faults on purpose.

They need pytest and hypothesis.
"""

from thinwire.testing.codecs import ODD_SIZES, CodecContract, vector
from thinwire.testing.faults import Change, Changing
from thinwire.testing.outer_optimizers import OuterContract
from thinwire.testing.transports import (
    TransportContract,
    check_background,
    check_worker,
    payload_of,
)

__all__ = [
    "ODD_SIZES",
    "Change",
    "Changing",
    "CodecContract",
    "OuterContract",
    "TransportContract",
    "check_background",
    "check_worker",
    "payload_of",
    "vector",
]
