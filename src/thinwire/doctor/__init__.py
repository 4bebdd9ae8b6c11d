"""Checks before a run: this machine, and the store in which workers meet."""

from thinwire.doctor.machine import Finding, RunAdvice, Status, examine, machine_checks
from thinwire.doctor.method import ExpectedRun
from thinwire.doctor.store import store_findings

__all__ = [
    "ExpectedRun",
    "Finding",
    "RunAdvice",
    "Status",
    "examine",
    "machine_checks",
    "store_findings",
]
