"""Sizes are arithmetic: they are what encoding makes and what is counted, and cost nothing."""

import pytest

import thinwire as tw
from exchanges import CODECS, LAYOUT, MEAN, delta_of, exchanged, state_of, tag_of
from thinwire import codecs
from thinwire.blocks import DenseVector
from thinwire.exchange import Pairs
from thinwire.exchange.state import peers_of
from thinwire.fragments.layout import Layout
from thinwire.transport import in_process
from thinwire.transport.metered import Metered

EXCHANGES = [
    tw.Gather(),
    tw.ReduceScatter(),
    tw.ReduceScatter(owner_feedback=tw.ErrorFeedback()),
    tw.Automatic(),
    tw.Automatic(few=1),
    Pairs(),
    Pairs(seed=3),
]


@pytest.mark.parametrize("exchange", EXCHANGES, ids=repr)
@pytest.mark.parametrize(
    ("codec", "workers"),
    [(codec, n % 7 + 1) for n, codec in enumerate(CODECS)],
)
def test_sizes_are_those_of_messages_and_of_what_is_counted(exchange, codec, workers: int) -> None:
    meters = [Metered(t) for t in in_process(workers)]
    states = [state_of(exchange, rank, workers, codec=codec) for rank in range(workers)]
    made = [state.encode(DenseVector(delta_of(r)), tag_of()) for r, state in enumerate(states)]
    exchanged(states, meters, encode=lambda rank, _: made[rank])
    for rank, (state, meter) in enumerate(zip(states, meters, strict=True)):
        sizes = exchange.sizes(codec, LAYOUT, MEAN, workers=workers, rank=rank)
        assert sizes == state.sizes
        assert sizes.messages == {name: len(message) for name, message in made[rank].items()}
        assert sizes.messages == {name: len(blank) for name, blank in state.blank().items()}
        counted = meter.counters.sent_bytes, meter.counters.received_bytes
        seed = exchange.seed if isinstance(exchange, Pairs) else None
        if seed is not None and peers_of(workers, round=1, seed=seed)[rank] == rank:
            assert counted == (0, 0)
        else:
            assert counted == (sizes.sent_nbytes, sizes.received_nbytes)


@pytest.mark.parametrize("exchange", EXCHANGES[:3], ids=repr)
def test_a_worker_with_nothing_to_contribute_sends_as_much(exchange) -> None:
    state = state_of(exchange, 1, 3, codec=codecs.Quantise(bits=2), drops_bad_messages=True)
    empty = state.empty_messages(tag_of())
    assert {name: len(message) for name, message in empty.items()} == state.sizes.messages


@pytest.mark.parametrize("exchange", EXCHANGES, ids=repr)
def test_sizes_of_a_model_that_fits_nowhere_are_known(exchange) -> None:
    huge = Layout.of({"weight": (200_000, 50_000), "bias": (50_000,)})
    for codec in (codecs.Identity(), codecs.Quantise(bits=4)):
        sizes = exchange.sizes(codec, huge, MEAN, workers=5, rank=2)
        assert sizes.sent_nbytes > huge.numel // 16
