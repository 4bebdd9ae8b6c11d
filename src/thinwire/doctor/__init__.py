"""What is looked at before a run: this machine, and the way from it to the others."""

from thinwire.doctor.finding import Finding, Status, examine
from thinwire.doctor.machine import machine_checks
from thinwire.doctor.network import network_findings

__all__ = ["Finding", "Status", "examine", "machine_checks", "network_findings"]
