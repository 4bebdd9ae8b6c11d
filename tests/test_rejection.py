"""The table of consequences, and that exchanges do what its rows say."""

from functools import partial

import pytest
import torch

import thinwire as tw
from changes import Changing, Wire, of_worker_1
from exchanges import Messages, delta_of, exchanged, flipped, poisoned, state_of, tag_of
from thinwire import codecs
from thinwire.blocks import DenseVector
from thinwire.errors import RoundDiscarded
from thinwire.exchange import Exchange, ExchangeState, RoundResult
from thinwire.rejection import Consequence, Kind, Rejection, RejectReason
from thinwire.transport import in_process

SKIPPED, SENT_AGAIN = Consequence.SKIPPED, Consequence.SENT_AGAIN
LOST, DISCARDED = Consequence.LOST, Consequence.DISCARDED
# Of a whole pseudo-gradient, and of a shard.
TABLE = {
    RejectReason.EMPTY: (SKIPPED, SKIPPED),
    RejectReason.DAMAGED: (SENT_AGAIN, DISCARDED),
    RejectReason.DRIFTED: (LOST, LOST),
    RejectReason.NOT_FINITE: (LOST, LOST),
    RejectReason.OUTLIER: (LOST, LOST),
}


def team_with_damage(*, shards: bool) -> list[Changing]:
    """All that read what worker 1 sends, in all-gathers or as shards, find it damaged."""
    wires = [Wire(rank, 3) for rank in range(3)]
    for wire in wires:
        if not shards:
            wire.arriving = of_worker_1(flipped)
        elif wire.rank != 1:
            wire.shards = of_worker_1(flipped)
    return list(map(Changing, in_process(3), wires))


def messages_of(reason: RejectReason, rank: int, state: ExchangeState) -> Messages:
    """What a worker sends if `reason` is what is wrong with worker 1."""
    if rank != 1 or reason is RejectReason.DAMAGED:
        return state.encode(DenseVector(delta_of(rank)), tag_of())
    match reason:
        case RejectReason.EMPTY:
            return state.empty_messages(tag_of())
        case RejectReason.DRIFTED:
            return state.encode(DenseVector(delta_of(rank)), tag_of(anchor=b"elsewher"))
        case RejectReason.NOT_FINITE:
            good = state.encode(DenseVector(delta_of(rank)), tag_of())
            return {name: poisoned(message) for name, message in good.items()}
        case _:
            return state.encode(DenseVector(delta_of(rank) * 1e6), tag_of())


def states_of(exchange: Exchange) -> list[ExchangeState]:
    how = {"aggregate": tw.aggregate.DropOutliers(), "drops_bad_messages": True}
    return [state_of(exchange, rank, 3, codec=codecs.CastBF16(), **how) for rank in range(3)]


@pytest.mark.parametrize("reason", TABLE)
@pytest.mark.parametrize("kind", [Kind.WHOLE, Kind.SHARD])
def test_an_exchange_does_what_the_row_says(kind: Kind, reason: RejectReason) -> None:
    rejection, consequence = Rejection(reason=reason), TABLE[reason][kind]
    assert rejection.consequence(kind) is consequence
    assert rejection.consequence(Kind.MEAN) is DISCARDED
    exchange = tw.Gather() if kind is Kind.WHOLE else tw.ReduceScatter()
    is_damaged = reason is RejectReason.DAMAGED
    transports = team_with_damage(shards=kind is Kind.SHARD) if is_damaged else in_process(3)
    states = states_of(exchange)

    def run() -> list[RoundResult]:
        return exchanged(states, transports, encode=partial(messages_of, reason))

    if consequence is DISCARDED:
        with pytest.raises(RoundDiscarded, match="worker 1: its message did not arrive"):
            run()
        return
    results = run()
    without = exchanged(
        [state_of(exchange, rank, 2, codec=codecs.CastBF16()) for rank in range(2)],
        in_process(2),
        encode=lambda rank, state: state.encode(DenseVector(delta_of(2 * rank)), tag_of()),
    )
    for result in results:
        assert {rank: why.reason for rank, why in result.left_out.items()} == {1: reason}
        # Shards have other sizes among two workers, but every number is rounded for itself.
        assert torch.equal(result.mean.whole(), without[0].mean.whole())


def test_a_result_that_is_damaged_discards_the_round() -> None:
    transports = team_with_damage(shards=False)
    with pytest.raises(RoundDiscarded, match=r"worker 1: .*does not match its checksum"):
        exchanged(states_of(tw.ReduceScatter()), transports)


@pytest.mark.parametrize("exchange", [tw.Gather(), tw.ReduceScatter()])
def test_a_round_without_any_contribution_is_discarded(exchange) -> None:
    with pytest.raises(RoundDiscarded, match="it has just joined"):
        exchanged(
            states_of(exchange),
            in_process(3),
            encode=lambda rank, state: state.empty_messages(tag_of()),
        )
