"""Which workers take part in a round, and what the round is."""

import dataclasses
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from thinwire.elastic.quorum import Member, elect
from thinwire.membership import Progress
from thinwire.security.token import Token


def worker(name: str, **fields) -> Member:
    where = {
        key: fields.pop(key) for key in ("version", "step", "digest", "dealt") if key in fields
    }
    position = Progress(**{"version": 4, "step": 12, "digest": "aa", "dealt": 9, **where})
    known = {"description": "c", "phase": "round", "generation": 0, "oldest": 2}
    return Member(
        identity=name, nonce="1", address=f"{name}:1", position=position, **known | fields
    )


FIELDS = {
    "version": st.integers(0, 4),
    "step": st.integers(0, 4),
    "digest": st.sampled_from(["aa", "bb"]),
    "dealt": st.integers(0, 30),
    "description": st.sampled_from(["c", "d"]),
    "phase": st.sampled_from(["join", "round", "last"]),
    "generation": st.integers(0, 2),
    "oldest": st.integers(0, 4),
}
WORKERS = st.dictionaries(st.integers(0, 99), st.fixed_dictionaries(FIELDS), min_size=1, max_size=7)


@settings(max_examples=200)
@given(WORKERS, st.randoms())
def test_all_conclude_the_same_in_any_order(made, random) -> None:
    everyone = [worker(f"w{number:02}", **fields) for number, fields in made.items()]
    shuffled = random.sample(everyone, len(everyone))
    quorum = elect(everyone)
    assert elect(shuffled) == quorum
    assert elect(shuffled).key == quorum.key
    assert sorted([*quorum.members, *quorum.behind, *quorum.refused], key=str) == sorted(
        everyone, key=str
    )
    assert quorum.leader in quorum.members
    assert quorum.position.version == max(s.position.version for s in everyone)
    fit = (*quorum.members, *quorum.behind)
    assert all(s.description == quorum.leader.description for s in fit)
    assert all(s.description != quorum.leader.description for s in quorum.refused)
    assert quorum.position.dealt >= max(s.position.dealt for s in fit)
    for member in quorum.members:
        at = member.position
        same = (at.version, at.digest) == (quorum.position.version, quorum.position.digest)
        assert same or quorum.leader.oldest <= at.version < quorum.position.version


def test_the_furthest_state_that_most_workers_have_is_the_runs() -> None:
    everyone = [
        worker("a", digest="bb"),
        worker("b"),
        worker("c"),
        worker("d", version=3, digest="x"),
        worker("e", version=1, digest="x"),
        worker("f", version=3, description="other"),
    ]
    quorum = elect(everyone)
    assert [s.identity for s in quorum.members] == ["b", "c", "d"]  # d is a round behind
    # A broken group is never used again, and another step is another key.
    a, b = worker("a"), worker("b")
    keys = [elect(those).key for those in ([a, b], [a, structs.replace(b, generation=1)], [a])]
    assert len({*keys}) == 3
    moved = structs.replace(b, position=dataclasses.replace(b.position, version=3))
    assert elect([a, moved]).key == elect([b, a]).key == keys[0]
    assert [s.identity for s in quorum.behind] == ["a", "e"]  # drifted; older than the records
    assert [s.identity for s in quorum.refused] == ["f"]
    assert (quorum.position.version, quorum.position.digest) == (4, "aa")
    drifted = worker("a", digest="bb", dealt=50)  # its shares are not dealt again
    assert elect([drifted, worker("b"), worker("c")]).position.dealt == 50
    two = elect([worker("a", digest="bb"), worker("b")])
    assert two.position.digest == "bb"  # of equally many, the first by name
    two = elect([worker("a", digest="bb", known="aa"), worker("b")])
    assert two.position.digest == "aa"  # or the one that the registry knows


def test_of_two_that_do_not_reach_each_other_the_later_one_is_cut_off() -> None:
    everyone = [worker("a", rounds=3, unreachable=("b:1",)), worker("b", rounds=4), worker("c")]
    quorum = elect(everyone)
    assert [s.identity for s in quorum.cut_off] == ["a"]
    assert [s.identity for s in quorum.members] == ["b", "c"]
    two = [worker("a", unreachable=("b:1",)), worker("b", unreachable=("a:1",))]
    assert [s.identity for s in elect(two).cut_off] == ["b"]  # of equals, the last by name
    ahead = dataclasses.replace(two[1].position, version=5)
    two[1] = structs.replace(two[1], position=ahead)
    assert [s.identity for s in elect(two).cut_off] == ["a"]  # it would lose an outer step
    gone = elect([worker("a", unreachable=("d:1",)), worker("b")])
    assert (gone.cut_off, len(gone.members)) == ((), 2)
    # The one that most do not reach is cut off first.
    most = worker("a", rounds=9, unreachable=("b:1", "c:1"))
    quorum = elect([most, worker("b"), worker("c"), worker("d", unreachable=("e:1",)), worker("e")])
    assert [s.identity for s in quorum.cut_off] == ["a", "e"]
    assert [s.identity for s in quorum.members] == ["b", "c", "d"]


def test_the_phase_is_that_of_members_with_something_to_contribute() -> None:
    newcomer = worker("a", phase="join", step=99)
    at_round, last = worker("b", step=30), worker("c", phase="last", step=40)
    assert elect([newcomer]).phase == "join"
    quorum = elect([newcomer, at_round])
    assert (quorum.phase, quorum.position.step) == ("round", 30)
    quorum = elect([newcomer, at_round, last])
    assert (quorum.phase, quorum.position.step) == ("last", 40)


def test_who_caught_up_with_the_position_and_who_came_to_it() -> None:
    alone, late = worker("a", caught_up=True), worker("b", version=3)
    assert elect([alone]).has_only_caught_up
    assert elect([alone, worker("c", caught_up=True)]).has_only_caught_up
    assert elect([alone, late]).has_only_caught_up  # it came to another position
    assert not elect([alone, worker("c")]).has_only_caught_up


@pytest.mark.parametrize("change", ["nested", "infinite"])
def test_a_member_whose_numbers_cannot_be_is_not_taken_and_stops_no_other(change: str) -> None:
    token = Token("a secret of many characters")
    described = worker("a").describe()
    described["position"]["version"] = float("inf")
    text = json.dumps(described) if change == "infinite" else "[" * 200_000
    data = {"member": text, "signature": token.sign("member", text)}
    assert Member.verified(data, token) is None
