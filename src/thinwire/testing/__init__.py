"""For tests, yours and ours: contract suites (they need pytest) and reference loops."""

from thinwire.testing.codecs import ODD_SIZES, CodecContract, vector
from thinwire.testing.outer_optimizers import OuterContract
from thinwire.testing.reference import reference_ddp, reference_diloco
from thinwire.testing.transports import TransportContract, payload_of

__all__ = [
    "ODD_SIZES",
    "CodecContract",
    "OuterContract",
    "TransportContract",
    "payload_of",
    "reference_ddp",
    "reference_diloco",
    "vector",
]
