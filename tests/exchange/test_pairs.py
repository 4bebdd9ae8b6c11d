"""Pairs: each worker swaps with one other, and no message goes anywhere else."""

import itertools

import pytest
import torch

import thinwire as tw
from exchanges import LAYOUT, delta_of, exchanged, state_of
from thinwire import codecs
from thinwire.exchange import Pairs
from thinwire.exchange.state import peers_of
from thinwire.transport import in_process
from toy import OwnAnchors, Team, adamw

LOSSY = [codecs.CastBF16(), codecs.Quantise(bits=2), codecs.TopK(k=64)]


@pytest.mark.parametrize("workers", range(1, 10))
def test_peers_are_another_perfect_matching_in_every_round_and_by_every_seed(workers: int) -> None:
    drawn = [
        [tuple(peers_of(workers, round=round, seed=seed)) for round in range(1, 60)]
        for seed in (0, 5)
    ]
    for peers in itertools.chain(*drawn):
        assert [peers[peer] for peer in peers] == list(range(workers))
        assert sum(peer == rank for rank, peer in enumerate(peers)) == workers % 2
    if workers > 2:
        assert any(a != b for a, b in itertools.pairwise(drawn[0]))
        assert drawn[0] != drawn[1]
        # Every pair meets.
        met = {(rank, peer) for peers in drawn[0] for rank, peer in enumerate(peers)}
        assert len(met - {(rank, rank) for rank in range(workers)}) == workers * (workers - 1)


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
            bound.decode(bound.encode(delta_of(rank, round), round=round), round=round)
            for rank in range(workers)
        ]
        for rank, (peer, result) in enumerate(zip(peers, results, strict=True)):
            pair = sorted({rank, peer})
            expected = sum(sent[member] * (1.0 / len(pair)) for member in pair)
            assert torch.equal(result.mean.whole(), expected)
            assert torch.equal(result.mean.whole(), results[peer].mean.whole())
            assert not result.left_out


OUTER = tw.outer.SGD(lr=0.7, momentum=0.9, nesterov=True)


@pytest.mark.parametrize("codec", [codecs.Identity(), *LOSSY], ids=lambda codec: codec.id)
def test_two_workers_in_pairs_are_two_that_gather_and_three_are_not(codec) -> None:
    def digests(exchange, workers: int) -> list[str]:
        slots = {"codec": codec, "feedback": tw.ErrorFeedback(), "exchange": exchange}
        method = tw.presets.diloco(sync_every=2, outer=OwnAnchors(outer=OUTER), **slots)
        return Team(method, adamw, workers).train(8).digests()

    assert digests(Pairs(), 2) == digests(tw.Gather(), 2)
    assert len({*digests(tw.Gather(), 3)}) == 1 < len({*digests(Pairs(), 3)})


def test_what_pairs_cannot_do_is_refused() -> None:
    mine = tw.presets.diloco(outer=OwnAnchors(outer=OUTER), exchange=Pairs())
    with pytest.raises(tw.ConfigurationError, match=r"OwnAnchors where workers come and go"):
        mine.check_elastic()
    with pytest.raises(tw.ConfigurationError, match=r"in pairs with SGD.*Gossip"):
        tw.presets.diloco(outer=OUTER, exchange=Pairs())
