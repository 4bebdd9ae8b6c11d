"""What travels sealed: nobody reads it, and what was changed or moved on its way is refused."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import thinwire as tw
from exchanges import exchanged, state_of
from forked import Forked
from processes import free_port, rank_environment
from thinwire.rejection import RejectReason
from thinwire.testing.faults import Change, Changing
from thinwire.testing.transports import announced, gathered, payload_of, reduced, swapped
from thinwire.transport import (
    AllGather,
    AllToAll,
    Metered,
    RoundTag,
    Sealed,
    in_process,
    sealed_by_default,
)
from thinwire.transport.base import with_payloads
from toy import adamw, build_model

SECRET = "a secret of many characters"
TAG = RoundTag(what="x", round=1)
RANKS = str(Path(__file__).parent.parent / "rendezvous_ranks.py")


def sealed_team(workers: int, *, change: Change | None = None, tokens=None) -> list[Sealed]:
    """Workers of which worker 1's payloads are changed on their way."""
    inner = in_process(workers)
    if change is not None:
        inner[1] = Changing(inner[1], change)
    return [Sealed(t, (tokens or {}).get(t.rank, SECRET)) for t in inner]


class Seen(Change):
    """Keeps what travels."""

    def __init__(self) -> None:
        self.payloads: list[bytes] = []

    def sent(self, request):
        with_payloads(request, lambda p: self.payloads.append(bytes(p.tolist())) or p)
        return request


@pytest.mark.parametrize(
    "requests",
    [
        lambda rank: gathered(payload_of(rank, 99)),
        lambda rank: reduced([payload_of(rank, 99)] * 2, lambda received: payload_of(rank, 99)),
        lambda rank: swapped(payload_of(rank, 99), 1 - rank),
    ],
    ids=["gather", "scatter", "swap"],
)
def test_nothing_that_travels_can_be_read(requests) -> None:
    seen = Seen()
    rounds = [t.run(requests(t.rank), TAG) for t in sealed_team(2, change=seen)]
    for each in rounds:
        each.wait()
    assert seen.payloads
    plain = bytes(payload_of(1, 99).tolist())
    for payload in seen.payloads:
        assert len(payload) == 99 + 28
        assert not any(plain[at : at + 4] in payload for at in range(96))


class Tampered(Change):
    """Changes what worker 1 sends, as `how` says."""

    def __init__(self, how) -> None:
        self.how = how

    def sent(self, request):
        return with_payloads(request, self.how)


def flipped(payload: torch.Tensor) -> torch.Tensor:
    payload = payload.clone()
    payload[len(payload) // 2] ^= 4
    return payload


def test_a_changed_payload_is_an_error_that_names_its_sender() -> None:
    transports = sealed_team(3, change=Tampered(flipped))
    rounds = [t.run(gathered(payload_of(t.rank, 9)), TAG) for t in transports]
    with pytest.raises(tw.ExchangeError, match=r"worker 1 sent for x in round 1; .* does not open"):
        rounds[0].wait()


@pytest.mark.parametrize("kind", ["gather", "scatter", "swap", "announce"])
def test_another_token_is_refused_by_name(kind: str) -> None:
    requests = {
        "gather": lambda rank: gathered(payload_of(rank, 9)),
        "scatter": lambda rank: reduced([payload_of(rank, 9)] * 2, lambda received: received[0]),
        "swap": lambda rank: swapped(payload_of(rank, 9), 1 - rank),
        "announce": lambda rank: announced(b"card"),
    }[kind]
    transports = sealed_team(2, tokens={1: "another secret of many"})

    def exchange() -> None:
        for each in [t.run(requests(t.rank), TAG) for t in transports]:
            each.wait()

    with pytest.raises(tw.ExchangeError, match=r"worker [01] sent for x in round 1"):
        exchange()


class Recorded(Change):
    """Sends what was sent at an earlier request in place of the last one."""

    def __init__(self) -> None:
        self.kept: list = []

    def sent(self, request):
        if not isinstance(request, AllGather):
            return request
        self.kept.append(request)
        return self.kept[0] if len(self.kept) > 1 else request


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (RoundTag(what="x", round=1), RoundTag(what="x", round=2)),
        (RoundTag(what="x", round=1), RoundTag(what="y", round=1)),
    ],
    ids=["round", "fragment"],
)
def test_a_payload_of_another_exchange_is_refused(first: RoundTag, second: RoundTag) -> None:
    transports = sealed_team(2, change=Recorded())
    for each in [t.run(gathered(payload_of(t.rank, 9)), first) for t in transports]:
        each.wait()
    rounds = [t.run(gathered(payload_of(t.rank, 9)), second) for t in transports]
    with pytest.raises(tw.ExchangeError, match=f"worker 1 sent for {second}"):
        rounds[0].wait()


def two_gathers(rank: int):
    yield AllGather(payload_of(rank, 9))
    yield AllGather(payload_of(rank + 10, 9))


def test_a_payload_of_an_earlier_request_is_refused() -> None:
    rounds = [t.run(two_gathers(t.rank), TAG) for t in sealed_team(2, change=Recorded())]
    with pytest.raises(tw.ExchangeError, match="worker 1 sent for x"):
        rounds[0].wait()


class Exchanged(Change):
    """Swaps what two workers sent, on arrival."""

    def arrived(self, request, answer):
        return [answer[0], *answer[:0:-1]] if isinstance(answer, list) else answer


@pytest.mark.parametrize("kind", ["gather", "scatter"])
def test_the_payload_of_another_sender_is_refused(kind: str) -> None:
    inner = in_process(3)
    transports = [Sealed(t, SECRET) for t in (Changing(inner[0], Exchanged()), *inner[1:])]
    rounds = [
        t.run(
            gathered(payload_of(t.rank, 9))
            if kind == "gather"
            else reduced([payload_of(t.rank, 9)] * 3, lambda received: received[0]),
            TAG,
        )
        for t in transports
    ]
    with pytest.raises(tw.ExchangeError, match="worker 1 sent for x"):
        rounds[0].wait()


class Redirected(Change):
    """Sends to worker 2 what was sealed for worker 0."""

    def sent(self, request):
        if isinstance(request, AllToAll):
            return AllToAll([request.payloads[0]] * len(request.payloads))
        return request


def test_the_payload_for_another_receiver_is_refused() -> None:
    rounds = [
        t.run(reduced([payload_of(t.rank, 9)] * 3, lambda received: received[0]), TAG)
        for t in sealed_team(3, change=Redirected())
    ]
    with pytest.raises(tw.ExchangeError, match="worker 1 sent for x"):
        rounds[2].wait()


def test_a_token_on_some_workers_only_is_refused() -> None:
    plain, sealed = in_process(2)
    model = build_model()
    method = tw.presets.diloco(sync_every=2)
    tw.OuterLoop(model, adamw(model), method, transport=Sealed(sealed, SECRET))
    with pytest.raises(tw.MismatchError, match=r"worker [01] says .* cannot be read; .* sealed"):
        tw.OuterLoop(model, adamw(model), method, transport=plain)
    plain, sealed = in_process(2)
    tw.OuterLoop(model, adamw(model), method, transport=plain)
    with pytest.raises(tw.ExchangeError, match="worker 0 sent for the workers' descriptions"):
        tw.OuterLoop(model, adamw(model), method, transport=Sealed(sealed, SECRET))


# -- where workers vote ----------------------------------------------------------------------------


class First(Change):
    """Changes the first payloads that worker 1 sends, or those of its vote."""

    def __init__(self, *, vote: bool) -> None:
        self.count, self.vote = 0, vote

    def sent(self, request):
        self.count += 1
        hit = self.count == (2 if self.vote else 1)
        return with_payloads(request, flipped) if hit else request


def test_where_workers_vote_a_changed_message_is_left_out_by_name() -> None:
    states = [state_of(tw.Gather(), rank, 3, drops_bad_messages=True) for rank in range(3)]
    found = exchanged(states, sealed_team(3, change=First(vote=False)))
    for result in found:
        assert {rank: why.reason for rank, why in result.left_out.items()} == {
            1: RejectReason.DAMAGED
        }
    others = [state_of(tw.Gather(), rank, 3, drops_bad_messages=True) for rank in range(3)]
    whole = exchanged(others, in_process(3))[0].mean.whole()
    means = [result.mean.whole() for result in found]
    assert torch.equal(means[0], means[1])
    assert torch.equal(means[0], means[2])
    assert not torch.equal(means[0], whole)
    # Worker 1 knows its own message as it was; the others say why.
    assert "forged or changed" in str(found[0].left_out[1])
    assert "worker 0, 2 found" in str(found[1].left_out[1])


def test_a_changed_vote_is_an_error() -> None:
    """A vote of zeros would hide from one worker what the others leave out."""
    states = [state_of(tw.Gather(), rank, 3, drops_bad_messages=True) for rank in range(3)]
    with pytest.raises(tw.ExchangeError, match="worker 1 sent for the fragment"):
        exchanged(states, sealed_team(3, change=First(vote=True)))


def test_a_changed_shard_discards_the_round() -> None:
    states = [state_of(tw.ReduceScatter(), rank, 3, drops_bad_messages=True) for rank in range(3)]
    with pytest.raises(tw.errors.RoundDiscarded, match="worker 1: its message did not arrive"):
        exchanged(states, sealed_team(3, change=First(vote=False)))


# -- what it costs ---------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
def test_what_is_added_is_counted(workers: int) -> None:
    def counted(exchange, wrap) -> list[tuple[int, int]]:
        meters = [Metered(wrap(t)) for t in in_process(workers)]
        for each in [m.run(exchange(m.rank), TAG) for m in meters]:
            each.wait()
        return [(m.counters.sent_bytes, m.counters.received_bytes) for m in meters]

    def added(exchange) -> list[tuple[int, int]]:
        plain = counted(exchange, lambda t: t)
        sealed = counted(exchange, lambda t: Sealed(t, SECRET))
        return [(s[0] - p[0], s[1] - p[1]) for s, p in zip(sealed, plain, strict=True)]

    others, one = workers - 1, torch.ones(1, dtype=torch.uint8)
    assert added(lambda rank: gathered(one)) == [(28 * min(others, 1), 28 * others)] * workers
    reductions = added(lambda rank: reduced([one] * workers, lambda received: one))
    assert reductions == [(28 * (others + min(others, 1)), 56 * others)] * workers
    peers = [rank ^ 1 if rank ^ 1 < workers else rank for rank in range(workers)]
    swaps = added(lambda rank: swapped(one, peers[rank]))
    assert swaps == [(28 * (peer != rank),) * 2 for rank, peer in enumerate(peers)]


# -- by default ------------------------------------------------------------------------------------


def test_a_token_in_the_environment_seals_what_a_script_without_a_transport_sends(
    monkeypatch,
) -> None:
    alone, (first, _) = in_process(1)[0], in_process(2)
    assert sealed_by_default(first) is first
    monkeypatch.setenv("THINWIRE_TOKEN", SECRET)
    assert sealed_by_default(alone) is alone
    assert isinstance(sealed_by_default(first), Sealed)
    monkeypatch.setenv("THINWIRE_TOKEN", "short")
    with pytest.raises(tw.ConfigurationError, match="5 characters"):
        sealed_by_default(first)


def trained(port: int, tokens: list[str]) -> list[Forked]:
    processes = []
    for worker, token in enumerate(tokens):
        environment = rank_environment(0, 1, free_port()) | {
            "THINWIRE_MEET": f"127.0.0.1:{port}",
            "THINWIRE_WORKER": str(worker),
            "THINWIRE_WORKERS": str(len(tokens)),
            "THINWIRE_TOKEN": token,
        }
        processes.append(Forked((RANKS, "train"), environment))
    for process in processes:
        process.communicate(timeout=60)
    return processes


def test_processes_with_a_token_reach_the_digests_of_those_without() -> None:
    with ThreadPoolExecutor(3) as threads:
        plain, sealed, mixed = threads.map(
            lambda tokens: trained(free_port(), tokens),
            [["", ""], [SECRET] * 2, [SECRET, "another secret of many"]],
        )
    told = [process.stdout for process in (*plain, *sealed)]
    assert len(set(told)) == 1, [process.stderr for process in (*plain, *sealed)]
    assert "digest" in told[0]
    for worker, process in enumerate(mixed):
        assert process.returncode != 0
        assert f"what worker {1 - worker} sent for the workers' descriptions" in process.stderr
