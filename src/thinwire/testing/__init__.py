"""For tests, yours and ours: contract suites (with pytest and hypothesis), reference loops, and
elastic workers without a network."""

from typing import TYPE_CHECKING, Any

from thinwire.testing.codecs import ODD_SIZES, CodecContract, vector
from thinwire.testing.faults import Change, Changing
from thinwire.testing.outer_optimizers import OuterContract
from thinwire.testing.reference import (
    ReleasedRound,
    reference_ddp,
    reference_decoupled_momentum,
    reference_demo,
    reference_diloco,
    reference_released_sparseloco,
    reference_sparseloco,
    reference_streaming,
)
from thinwire.testing.transports import (
    TransportContract,
    check_background,
    check_worker,
    payload_of,
)

if TYPE_CHECKING:
    from thinwire.testing.elastic import ElasticHub, HubTransport

__all__ = [
    "ODD_SIZES",
    "Change",
    "Changing",
    "CodecContract",
    "ElasticHub",
    "HubTransport",
    "OuterContract",
    "ReleasedRound",
    "TransportContract",
    "check_background",
    "check_worker",
    "payload_of",
    "reference_ddp",
    "reference_decoupled_momentum",
    "reference_demo",
    "reference_diloco",
    "reference_released_sparseloco",
    "reference_sparseloco",
    "reference_streaming",
    "vector",
]


def __getattr__(name: str) -> Any:
    # Contract suites for codecs or transports do not need elastic runs.
    if name in ("ElasticHub", "HubTransport"):
        from thinwire.testing import elastic

        return getattr(elastic, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
