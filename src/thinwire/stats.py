"""What an outer loop has done so far."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Stats:
    """What a worker's outer loop has done so far.

    Args:
        rounds: exchanges applied, each fragment's counted.
        sent_bytes: payload bytes handed to the transport, metadata included.
        received_bytes: payload bytes that came from other workers.
        peak_sent_bytes_per_step: the most sent after any one inner step; what is left over at the
            end counts fragment by fragment, for no training goes on beside it.
        wait_s: seconds spent waiting for exchanges.
        overlapped_s: seconds that exchanges travelled while this worker trained on.
        left_out: how often each worker was left out of a mean, by rank.
        contributions: how often that was for which reason, and how often a contribution was used
            but scaled down ("clipped"), by member: its identity in an elastic run.
        peak_outer_device_bytes: the most that anchors, outer optimizer and feedback took on the
            worker's device at any one time.
        peak_outer_host_bytes: the same in the host's memory, where `outer_device="cpu"` keeps them.
        consensus_sent_bytes: sent to gather the mean of outer parameters that differ from worker to
            worker, for evaluations; in no other number here.
        consensus_received_bytes: that came from other workers for it.
        requests: made to an object store since the transport was built, by kind; else empty.
        kernels: what encodes and decodes on the worker's device: "torch", or numba or triton with
            its version. Bytes are the same.
    """

    rounds: int
    sent_bytes: int
    received_bytes: int
    peak_sent_bytes_per_step: int
    wait_s: float
    overlapped_s: float
    left_out: Mapping[int, int]
    contributions: Mapping[str, Mapping[str, int]]
    peak_outer_device_bytes: int
    peak_outer_host_bytes: int
    consensus_sent_bytes: int
    consensus_received_bytes: int
    requests: Mapping[str, int]
    kernels: str
