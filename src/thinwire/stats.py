"""Counters of an outer loop."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Stats:
    """Counters of a worker's outer loop.

    Args:
        rounds: rounds applied, over all fragments.
        sent_bytes: payload bytes passed to the transport, metadata included.
        received_bytes: payload bytes from other workers.
        peak_sent_bytes_per_step: maximum sent after one inner step. The last round counts each
            fragment alone, because the worker no longer trains.
        wait_s: seconds spent waiting for exchanges.
        overlapped_s: seconds of exchanges during which this worker trained.
        left_out: number of means without a worker's contribution, by rank.
        contributions: number of contributions left out, by reason, and of those scaled down
            ("clipped"), by member: the worker's identity in an elastic run.
        peak_outer_device_bytes: peak memory of anchors, outer optimizer and feedback on the
            worker's device.
        peak_outer_host_bytes: the same in the host's memory (`outer_device="cpu"`).
        consensus_sent_bytes: sent to average the anchors of all workers for evaluations; not in
            `sent_bytes`.
        consensus_received_bytes: received for the same.
        requests: to an object store since the transport was built, by kind; else empty.
        kernels: that encode and decode on the worker's device: "torch", or numba or triton with
            its version. All produce the same bytes.
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
