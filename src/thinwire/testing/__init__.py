"""Contract suites that test your codec, transport or outer optimizer.

Require pytest and hypothesis.
"""

from thinwire.testing.codecs import ODD_SIZES, CodecContract, vector
from thinwire.testing.outer_optimizers import OuterContract
from thinwire.testing.transports import TransportContract, payload_of

__all__ = [
    "ODD_SIZES",
    "CodecContract",
    "OuterContract",
    "TransportContract",
    "payload_of",
    "vector",
]
