"""Traffic and scenarios for tests of the planner: messages of any size, sent at any time."""

import math
from dataclasses import replace
from typing import Any

from thinwire.fragments import Fragments, Strided
from thinwire.fragments.layers import Part
from thinwire.plan.compute import Compute
from thinwire.plan.link import Link
from thinwire.plan.simulate import Scenario
from thinwire.plan.traffic import MessageSpec, Traffic


def message(**fields: Any) -> MessageSpec:
    """A message to gather, with an odd size."""
    sizes = {"payload_nbytes": 12_347, "sent_nbytes": 12_347, "received_nbytes": 12_347}
    given = {"parameters": 1009, "result_nbytes": 0} | sizes
    given |= {"offset": 0, "first": 1, "sent_count": 1, "received_count": 2, "exchange": "gather"}
    return MessageSpec(**(given | fields))


def one_message(*, every: int = 7, tau: int = 0, workers: int = 3, **fields: Any) -> Scenario:
    """A scenario in which everything takes time, with one message a round."""
    seconds = {"encode": 3e-5, "decode": 7e-6, "outer": 2e-6}
    sent = message(**{"first": every, **fields})
    return Scenario(
        traffic=Traffic(sync_every=every, tau=tau, messages=(sent,), workers=workers),
        compute=Compute(
            step_s=0.13, **{f"{name}_s_per_parameter": s for name, s in seconds.items()}
        ),
        link=Link(up_bits_per_s=1e6, down_bits_per_s=3e5, latency_s=0.017),
    )


def streaming(
    fragments: Fragments | None = None,
    *,
    parameters: int = 70_001,
    layers: int = 11,
    every: int = 10,
    tau: int = 1,
    workers: int = 2,
) -> Traffic:
    """Fragments of about equal layers, in two bytes a number."""
    each, more = divmod(parameters, layers)
    parts = {
        str(i): Part(name=str(i), aliases=(str(i),), numel=each + (i < more), layer=i)
        for i in range(layers)
    }
    messages = []
    for part in (fragments or Strided(layers=3)).plan([*parts.values()], sync_every=every):
        numel = sum(parts[name].numel for name in part.names)
        sizes = {"payload_nbytes": 2 * numel, "sent_nbytes": 2 * numel, "parameters": numel}
        sizes["received_nbytes"] = 2 * numel * (workers - 1)
        messages.append(message(offset=part.offset_steps, first=part.first_step, **sizes))
    return Traffic(sync_every=every, tau=tau, messages=tuple(messages), workers=workers)


def peak_sent_after(sent: Traffic, steps: int) -> int:
    """The most bytes that a run of `steps` inner steps sent after any one of them.

    What is left over at the end counts fragment by fragment, because no training runs meanwhile.
    """
    last = {m: m.last_due(steps, sync_every=sent.sync_every) for m in sent.messages}
    begun = tuple(m for m in sent.messages if last[m])
    at_the_end = (m.sent_nbytes for m in sent.messages if last[m] < steps)
    return max(replace(sent, messages=begun).peak_sent_per_step, *at_the_end, 0)


def plain(sent: Traffic, rate: float = 1e6, latency_s: float = 0.0) -> Scenario:
    """Steps of 0.1 s, and coding that takes no time."""
    return Scenario(
        traffic=sent, compute=Compute(step_s=0.1), link=Link.of(rate, latency_s=latency_s)
    )


def same(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=1e-9)
