"""Asynchronous training: a server holds theta, and no worker waits for another.

A worker fetches theta, trains on it by itself, and sends what it moved by; the server takes an
outer step for every such arrival. `AsyncServer` and `AsyncWorker` are the two states, without a
network; `Simulation` runs them by a virtual clock, and `thinwire.asynchronous.objects` over an
object store.
"""

from thinwire.asynchronous.assignment import Assignment, AsyncOptions, AsyncStats, dynamic_steps
from thinwire.asynchronous.server import AsyncServer
from thinwire.asynchronous.simulation import Simulation
from thinwire.asynchronous.worker import AsyncWorker

__all__ = [
    "Assignment",
    "AsyncOptions",
    "AsyncServer",
    "AsyncStats",
    "AsyncWorker",
    "Simulation",
    "dynamic_steps",
]
