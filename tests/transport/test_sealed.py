"""What travels sealed: nobody reads it, and what was changed or moved on its way is refused."""

import pytest
import torch

import thinwire as tw
from changes import Change, Changing
from exchanges import flipped
from thinwire.testing.transports import gathered, payload_of, swapped
from thinwire.transport import RoundTag, Sealed, in_process
from thinwire.transport.base import to_all
from thinwire.transport.sealed import sealed_by_default
from toy import adamw, build_model
from transport_checks import reduced

SECRET = "a secret of many characters"
TAG = RoundTag(what="x", round=1)


def sealed_team(workers: int, *, change: Change | None = None, tokens=None) -> list[Sealed]:
    """Workers of which worker 1's payloads are changed on their way."""
    inner = in_process(workers)
    if change is not None:
        inner[1] = Changing(inner[1], change)
    return [Sealed(t, (tokens or {}).get(t.rank, SECRET)) for t in inner]


def shards(rank: int, workers: int) -> list[torch.Tensor]:
    return [payload_of(rank, 99) for _ in range(workers)]


def two_gathers(rank: int, workers: int):
    yield to_all(payload_of(rank, 9), rank, workers)
    yield to_all(payload_of(rank + 10, 9), rank, workers)
    return lambda: None


POSTS = {
    "gather": lambda rank, workers: gathered(payload_of(rank, 99), rank, workers),
    "scatter": lambda rank, workers: reduced(shards(rank, workers), rank, lambda got: got[0]),
    "swap": lambda rank, workers: swapped(payload_of(rank, 99), rank, 1 - rank),
    "two gathers": two_gathers,
}
KINDS = ("gather", "scatter", "swap")


def run_all(transports, kind: str, tag: RoundTag = TAG) -> None:
    for each in [t.run(POSTS[kind](t.rank, len(transports)), tag) for t in transports]:
        each.wait()


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_that_travels_can_be_read(kind: str) -> None:
    seen: list[bytes] = []
    watched = Tampered(
        sent=lambda post: post.changed(lambda p: seen.append(bytes(p.tolist())) or p)
    )
    run_all(sealed_team(2, change=watched), kind)
    assert seen
    plain = bytes(payload_of(1, 99).tolist())
    for payload in seen:
        assert len(payload) == 99 + 28
        assert not any(plain[at : at + 4] in payload for at in range(96))


class Tampered(Change):
    """Changes what worker 1 sends, or what a worker gets."""

    def __init__(self, *, sent=lambda post: post, arrived=lambda received: received) -> None:
        self._sent, self._arrived = sent, arrived

    def sent(self, post):
        return self._sent(post)

    def arrived(self, post, received):
        return self._arrived(received)


def first_again():
    """Sends what was gathered at first in place of what is gathered later."""
    kept: list = []

    def sent(post):
        kept.append(post)
        return kept[0]

    return Tampered(sent=sent)


def crossed(received):
    """What two others sent, each in the other's place."""
    (one, a), (other, b) = received.items()
    return {one: b, other: a}


def to_another_receiver(post):
    return post if post.is_to_all(3) else post._replace(to=dict.fromkeys(post.to, post.to[0]))


@pytest.mark.parametrize("kind", KINDS)
def test_another_token_is_refused_by_name(kind: str) -> None:
    with pytest.raises(tw.ExchangeError, match=r"worker [01] sent for x in round 1"):
        run_all(sealed_team(2, tokens={1: "another secret of many"}), kind)


@pytest.mark.parametrize(
    ("kind", "at", "change"),
    [
        ("gather", 1, Tampered(sent=lambda post: post.changed(flipped))),
        ("gather", 0, Tampered(arrived=crossed)),
        ("scatter", 0, Tampered(arrived=crossed)),
        ("scatter", 1, Tampered(sent=to_another_receiver)),
        ("two gathers", 1, first_again()),
    ],
    ids=["changed", "another sender", "a shard's sender", "another receiver", "an earlier post"],
)
def test_what_was_changed_or_moved_is_an_error_that_names_its_sender(kind, at, change) -> None:
    inner = in_process(3)
    inner[at] = Changing(inner[at], change)
    with pytest.raises(tw.ExchangeError, match=r"worker 1 sent for x in round 1; .*not open"):
        # Who gets what is wrong asks first.
        run_all([Sealed(t, SECRET) for t in inner], kind)


@pytest.mark.parametrize(
    "later", [RoundTag(what="x", round=2), RoundTag(what="y", round=1)], ids=["round", "fragment"]
)
def test_a_payload_of_another_exchange_is_refused(later: RoundTag) -> None:
    transports = sealed_team(2, change=first_again())
    run_all(transports, "gather")
    with pytest.raises(tw.ExchangeError, match=f"worker 1 sent for {later}"):
        run_all(transports, "gather", later)


def test_a_token_on_some_workers_only_is_refused() -> None:
    plain, sealed = in_process(2)
    model = build_model()
    method = tw.presets.diloco(sync_every=2)
    tw.OuterLoop(model, adamw(model), method, transport=Sealed(sealed, SECRET))
    with pytest.raises(tw.MismatchError, match=r"of worker [01] cannot be read; .* sealed"):
        tw.OuterLoop(model, adamw(model), method, transport=plain)
    plain, sealed = in_process(2)
    tw.OuterLoop(model, adamw(model), method, transport=plain)
    with pytest.raises(tw.ExchangeError, match="worker 0 sent for the workers' descriptions"):
        tw.OuterLoop(model, adamw(model), method, transport=Sealed(sealed, SECRET))


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
