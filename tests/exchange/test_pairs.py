"""Pairs: each worker swaps with one other, and no message goes anywhere else."""

import itertools

import pytest
import torch

import thinwire as tw
from exchanges import LAYOUT, delta_of, exchanged, flipped, state_of, tag_of
from thinwire import codecs
from thinwire.blocks import DenseVector
from thinwire.exchange import Pairs
from thinwire.exchange.message import HEADER_NBYTES
from thinwire.exchange.pairs import peers_of
from thinwire.testing.faults import Change, Changing
from thinwire.transport import in_process
from thinwire.transport.metered import Metered
from toy import OwnAnchors, Team, adamw

LOSSY = [codecs.CastBF16(), codecs.Quantise(bits=2), codecs.TopK(k=64)]


@pytest.mark.parametrize("workers", range(1, 10))
def test_peers_are_a_perfect_matching(workers: int) -> None:
    for round, seed in itertools.product(range(1, 40), (0, 5)):
        peers = peers_of(workers, round=round, seed=seed)
        assert [peers[peer] for peer in peers] == list(range(workers))
        assert sum(peer == rank for rank, peer in enumerate(peers)) == workers % 2
        assert peers == peers_of(workers, round=round, seed=seed)


@pytest.mark.parametrize("workers", range(3, 10))
def test_peers_change_from_round_to_round_and_with_the_seed(workers: int) -> None:
    drawn = [tuple(peers_of(workers, round=round, seed=0)) for round in range(1, 60)]
    assert any(a != b for a, b in itertools.pairwise(drawn))
    assert drawn != [tuple(peers_of(workers, round=round, seed=1)) for round in range(1, 60)]
    # Every pair meets.
    met = {(rank, peer) for peers in drawn for rank, peer in enumerate(peers) if rank != peer}
    assert len(met) == workers * (workers - 1)


@pytest.mark.parametrize(
    ("codec", "workers"),
    [(codecs.Identity(), w) for w in range(1, 8)] + [(c, 3) for c in LOSSY] + [(LOSSY[1], 4)],
)
def test_the_mean_is_that_of_a_worker_and_its_peer(codec, workers: int) -> None:
    bound = codec.bind(LAYOUT)
    states = [state_of(Pairs(), rank, workers, codec=codec) for rank in range(workers)]
    transports = in_process(workers)
    for round in (1, 2, 3):
        results = exchanged(states, transports, round=round)
        peers = peers_of(workers, round=round, seed=0)
        sent = [
            bound.decode(bound.encode(delta_of(rank, round=round), round=round), round=round)
            for rank in range(workers)
        ]
        for rank, (peer, result) in enumerate(zip(peers, results, strict=True)):
            first, last = sorted((rank, peer))
            pair = [first] if first == last else [first, last]
            expected = sum(sent[member] * (1.0 / len(pair)) for member in pair)
            assert torch.equal(result.mean.whole(), expected)
            assert torch.equal(result.mean.whole(), results[peer].mean.whole())
            assert not result.left_out


def test_feedback_keeps_what_a_message_lacks() -> None:
    codec = codecs.Quantise(bits=1)
    states = [
        state_of(Pairs(), rank, 3, codec=codec, feedback=tw.ErrorFeedback()) for rank in range(3)
    ]
    exchanged(states, in_process(3))
    bound = codec.bind(LAYOUT)
    for rank, state in enumerate(states):
        delta = delta_of(rank)
        lacking = delta - bound.decode(bound.encode(delta.clone(), round=1), round=1)
        torch.testing.assert_close(state.state_dict()["residual"], lacking)


@pytest.mark.parametrize("codec", [codecs.Identity(), codecs.Quantise(bits=2)])
def test_bytes_do_not_grow_with_the_workers(codec) -> None:
    nbytes = HEADER_NBYTES + codec.bind(LAYOUT).nbytes
    for workers in range(2, 10):
        meters = [Metered(t) for t in in_process(workers)]
        exchanged([state_of(Pairs(), r, workers, codec=codec) for r in range(workers)], meters)
        counted = sorted((m.counters.sent_bytes, m.counters.received_bytes) for m in meters)
        odd_one_out = [(0, 0)] * (workers % 2)
        assert counted == odd_one_out + [(nbytes, nbytes)] * (workers - workers % 2)


class Flipped(Change):
    """One bit of what a worker gets in a swap is another."""

    def __init__(self, place: int) -> None:
        self.place = place

    def arrived(self, post, received):
        return {sender: flipped(payload, self.place) for sender, payload in received.items()}


@pytest.mark.parametrize(
    ("place", "reason"), [(HEADER_NBYTES, "body does not match"), (50, "header does not match")]
)
def test_a_damaged_message_is_refused_by_sender_and_round(place: int, reason: str) -> None:
    transports = [Changing(t, Flipped(place)) for t in in_process(2)]
    states = [state_of(Pairs(), rank, 2) for rank in range(2)]
    with pytest.raises(tw.ExchangeError, match=f"message of worker 1 for round 1.*{reason}"):
        exchanged(states, transports)


def test_a_message_of_an_earlier_round_is_refused() -> None:
    states, transports = [state_of(Pairs(), rank, 2) for rank in range(2)], in_process(2)
    old = states[1].encode(DenseVector(delta_of(1)), tag_of(1))
    with pytest.raises(tw.ExchangeError, match=r"worker 1 for round 2.*round is 1, not 2"):
        exchanged(
            states,
            transports,
            round=2,
            encode=lambda rank, state: (
                old if rank else state.encode(DenseVector(delta_of(0)), tag_of(2))
            ),
        )


OUTER = tw.outer.SGD(lr=0.7, momentum=0.9, nesterov=True)


def method(exchange, codec, outer=OUTER) -> tw.Method:
    feedback = tw.ErrorFeedback()
    return tw.presets.diloco(
        sync_every=2, outer=outer, codec=codec, feedback=feedback, exchange=exchange
    )


@pytest.mark.parametrize("codec", [codecs.Identity(), *LOSSY], ids=lambda codec: codec.id)
def test_two_workers_in_pairs_are_two_that_gather_and_three_are_not(codec) -> None:
    def digests(exchange, workers: int) -> list[str]:
        anchors = OwnAnchors(outer=OUTER)
        return Team(method(exchange, codec, anchors), adamw, workers).train(8).digests()

    assert digests(Pairs(), 2) == digests(tw.Gather(), 2)
    assert len({*digests(tw.Gather(), 3)}) == 1 < len({*digests(Pairs(), 3)})


def test_what_pairs_cannot_do_is_refused() -> None:
    with pytest.raises(tw.ConfigurationError, match=r"in pairs among workers that come and go"):
        state_of(Pairs(), 0, 2, drops_bad_messages=True)
    with pytest.raises(tw.ConfigurationError, match=r"in pairs with SGD.*Gossip"):
        method(Pairs(), codecs.Identity())
