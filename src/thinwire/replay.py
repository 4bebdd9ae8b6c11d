"""What a round leaves for those who missed it, and how they take its outer step."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from thinwire.elastic.shared_state import RoundRecord, Snapshot
from thinwire.errors import MismatchError
from thinwire.exchange import Place, RoundResult
from thinwire.fragment_builder import FragmentBuilder
from thinwire.fragment_state import FragmentState, PendingRound
from thinwire.rejection import RejectReason
from thinwire.transport import Label

__all__ = ["check_follows", "copy_of", "describe_round", "remake"]


def describe_round(
    index: int, flight: PendingRound, outcome: RoundResult, names: Sequence[str], *, before: bytes
) -> dict[str, Any]:
    """The facts of a record.

    Args:
        index: of the fragment.
        flight: that came back.
        outcome: what came of it.
        names: of the workers, in rank order.
        before: digest of the fragment's outer parameters before the step.
    """
    flaws = outcome.left_out
    return {
        "track": index,
        "round": flight.round,
        "sent_at_step": flight.sent_at_step,
        "anchor": flight.exchange.place.anchor.hex(),
        "before": before.hex(),
        "workers": len(names),
        "left_out": sorted(flaws),
        # What was refused for good is over, too: its sender must not try again.
        "counted": [n for r, n in enumerate(names) if r not in flaws or flaws[r].is_final],
        # Nothing is wrong with somebody who has just come.
        "flaws": {r: str(f) for r, f in flaws.items() if f.fault is not RejectReason.NOTHING},
    }


def copy_of(tracks: Sequence[FragmentState], facts: Mapping[str, Any]) -> Snapshot:
    """What all workers share of `tracks`, with `facts` of their run."""
    tensors = {
        f"{index}.{key}": value.detach().cpu().clone()
        for index, track in enumerate(tracks)
        for key, value in track.shared().items()
    }
    each = [_rounds_of(track) for track in tracks]
    return Snapshot(facts={**facts, "tracks": each}, tensors=tensors)


def _rounds_of(track: FragmentState) -> dict[str, Any]:
    """What is known of the rounds of `track` that counted."""
    return {
        "sends": track.sends - len(track.flights),
        "sent_at_step": track.counted_at_step,
        "counted": list(track.counted.items()),
    }


def check_follows(record: RoundRecord, track: FragmentState, *, version: int) -> None:
    """Raise `MismatchError` unless `record` is of the step after `version` of `track`."""
    here = f"version {version} with digest {track.digest().hex()}"
    needed = f"version {record.version - 1} with digest {record.facts['before']}"
    if here != needed:
        raise MismatchError(
            f"take the outer step of {track.fragment.name} in a round that was missed",
            because=f"it follows on {needed}, and here is {here}",
            do="take over a snapshot",
        )


def remake(record: RoundRecord, track: FragmentState, assembly: FragmentBuilder) -> Tensor:
    """The mean of the round that `record` is of.

    Raises:
        ExchangeError: its messages are damaged.
    """
    facts = record.facts
    label = Label(what=track.fragment.name, round=int(facts["round"]))
    # With overlap they were sent before the step that this one follows on.
    place = Place(label=label, anchor=bytes.fromhex(facts["anchor"]))
    reader = assembly.reader(track.fragment, int(facts["workers"]))
    return reader.remake(record.messages, place, left_out=[int(r) for r in facts["left_out"]])
