"""For tests, yours and ours: contract suites (with pytest and hypothesis) and reference loops."""

from thinwire.testing.codecs import ODD_SIZES, CodecContract, vector
from thinwire.testing.outer_optimizers import OuterContract
from thinwire.testing.reference import (
    reference_ddp,
    reference_diloco,
    reference_sparseloco,
    reference_streaming,
)
from thinwire.testing.transports import (
    TransportContract,
    check_background,
    check_worker,
    payload_of,
)

__all__ = [
    "ODD_SIZES",
    "CodecContract",
    "OuterContract",
    "TransportContract",
    "check_background",
    "check_worker",
    "payload_of",
    "reference_ddp",
    "reference_diloco",
    "reference_sparseloco",
    "reference_streaming",
    "vector",
]
