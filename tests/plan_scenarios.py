"""Traffic and scenarios for tests of the planner: messages of any size, sent at any time."""

import math
from typing import Any

from thinwire.fragments import Fragments, Strided
from thinwire.fragments.layers import Part
from thinwire.plan.compute import Coding, Compute
from thinwire.plan.link import Link
from thinwire.plan.simulate import Scenario
from thinwire.plan.traffic import MessageSpec, Traffic


def message(**fields: Any) -> MessageSpec:
    """One that is gathered, with a size that divides nothing."""
    given = {
        "offset": 0,
        "first": 1,
        "parameters": 1009,
        "payload_nbytes": 12_347,
        "result_nbytes": 0,
        "sent_nbytes": 12_347,
        "received_nbytes": 12_347,
        "sent_count": 1,
        "received_count": 2,
        "vote_nbytes": 0,
        "exchange": "gather",
    }
    return MessageSpec(**(given | fields))


def traffic_of(*messages: MessageSpec, every: int = 7, tau: int = 0, workers: int = 3) -> Traffic:
    return Traffic(sync_every=every, tau=tau, messages=messages, workers=workers)


def one_message(*, every: int = 7, tau: int = 0, workers: int = 3, **fields: Any) -> Scenario:
    """A scenario in which everything takes time, with one message a round."""
    sent = message(**{"first": every, **fields})
    return Scenario(
        traffic=traffic_of(sent, every=every, tau=tau, workers=workers),
        compute=Compute(step_s=0.13),
        link=Link(up_bits_per_s=1e6, down_bits_per_s=3e5, latency_s=0.017),
        coding=Coding(
            encode_s_per_parameter=3e-5, decode_s_per_parameter=7e-6, outer_s_per_parameter=2e-6
        ),
    )


def streaming(
    fragments: Fragments | None = None,
    *,
    every: int = 10,
    tau: int = 1,
    workers: int = 2,
    parameters: int = 70_001,
    layers: int = 11,
) -> Traffic:
    """Fragments of about equal layers, in two bytes a number."""
    each, more = divmod(parameters, layers)
    parts = {
        str(i): Part(name=str(i), aliases=(str(i),), numel=each + (i < more), layer=i)
        for i in range(layers)
    }
    planned = (fragments or Strided(layers=3)).plan([*parts.values()], sync_every=every)
    messages = []
    for fragment in planned:
        numel = sum(parts[name].numel for name in fragment.names)
        messages.append(
            message(
                offset=fragment.offset_steps,
                first=fragment.first_step,
                parameters=numel,
                payload_nbytes=2 * numel,
                sent_nbytes=2 * numel,
                received_nbytes=2 * numel * (workers - 1),
            )
        )
    return traffic_of(*messages, every=every, tau=tau, workers=workers)


def plain(sent: Traffic, rate: float = 1e6, latency_s: float = 0.0) -> Scenario:
    """Steps of 0.1 s, and coding that takes no time."""
    return Scenario(
        traffic=sent, compute=Compute(step_s=0.1), link=Link.of(rate, latency_s=latency_s)
    )


def same(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=1e-9)
