"""Checks before a run: this machine, and the network between it and the others."""

from thinwire.doctor.machine import Finding, RunAdvice, Status, examine, machine_checks
from thinwire.doctor.method import ExpectedRun
from thinwire.doctor.network import network_findings, store_findings

__all__ = [
    "ExpectedRun",
    "Finding",
    "RunAdvice",
    "Status",
    "examine",
    "machine_checks",
    "network_findings",
    "store_findings",
]
