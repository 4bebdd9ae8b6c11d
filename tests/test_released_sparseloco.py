"""SparseLoCo against its released code, written out: fixed displacements, six rounds."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thinwire as tw
from reference_loops import ReleasedRound, reference_released_sparseloco
from thinwire.aggregate import Aggregate, Payloads, aggregate_valid
from toy import Team

SHAPES = {"a": (128, 192), "b": (64, 64), "c": (512, 128), "d": (256, 64)}
ROUNDS = 6
K = 64  # of every block


def displacements(workers: int, rounds: int = ROUNDS) -> list[list[list[Tensor]]]:
    """By round, worker and matrix: heavy rows and columns, and one half that all share."""
    draws = torch.Generator().manual_seed(0)

    def heavy(shape: tuple[int, int]) -> Tensor:
        rows, columns = (torch.randn(n, generator=draws).exp() for n in shape)
        return 1e-3 * torch.randn(shape, generator=draws) * rows[:, None] * columns

    def of_round() -> list[list[Tensor]]:
        shared = [heavy(shape) for shape in SHAPES.values()]
        return [[s + heavy(tuple(s.shape)) for s in shared] for _ in range(workers)]

    return [of_round() for _ in range(rounds)]


def start() -> list[Tensor]:
    draws = torch.Generator().manual_seed(1)
    return [0.02 * torch.randn(shape, generator=draws) for shape in SHAPES.values()]


def split(flat: Tensor) -> list[Tensor]:
    sizes = [rows * columns for rows, columns in SHAPES.values()]
    return [x.view(shape) for x, shape in zip(flat.split(sizes), SHAPES.values(), strict=True)]


EXACT, TWO_BITS = tw.codecs.F32(), tw.codecs.TensorLevels()


def train(
    monkeypatch: pytest.MonkeyPatch,
    deltas: list[list[list[Tensor]]],
    rule: Aggregate,
    values: tw.codecs.Values = EXACT,
) -> list[ReleasedRound]:
    """What the outer loop does with the same displacements; what was sent is read off payloads."""
    seen, workers = [], len(deltas[0])

    def watched(aggregate: Aggregate, received: Payloads, *rest: Any, **more: Any) -> Any:
        sent = (received.to_vector(received.coefficients(w)) for w in range(workers))
        decoded = [split(vector != 0) for vector in sent]
        mean, unusable = aggregate_valid(aggregate, received, *rest, **more)
        seen.append((decoded, split(mean.whole())))
        return mean, unusable

    monkeypatch.setattr("thinwire.exchange.state.aggregate_valid", watched)
    codec = tw.codecs.TopK(k=K, values=values, groups=tw.codecs.Blocks())
    method = tw.presets.sparseloco(sync_every=1, codec=codec, aggregate=rule)

    def build() -> nn.Module:
        return nn.ParameterDict(dict(zip(SHAPES, map(nn.Parameter, start()), strict=True)))

    team = Team(method, lambda _: [], workers, model=build)
    rounds = []
    for moved in deltas:
        for model, own in zip(team.models, moved, strict=True):
            with torch.no_grad():
                for name, delta in zip(SHAPES, own, strict=True):
                    model[name] -= delta
        team.exchange()
        sent, update = seen[-1]  # all workers combine the same
        states = [loop.state_dict()["fragments"][0] for loop in team.loops]
        theta = [team.loops[0].consensus()[name].clone() for name in SHAPES]
        feedback = [state["exchange"]["residual"] for state in states]
        residuals = [[r.clone() for r in split(flat)] for flat in feedback]
        rounds.append(ReleasedRound(sent=sent, update=update, residuals=residuals, theta=theta))
    return rounds


def distance(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """Relative, of the matrix that differs most."""
    pairs = zip(ours, theirs, strict=True)
    return max(float((x - y).norm() / y.norm()) for x, y in pairs)


@pytest.mark.parametrize(("workers", "values"), [(2, EXACT), (3, TWO_BITS), (4, EXACT)])
def test_six_rounds_are_those_of_the_released_code(monkeypatch, workers: int, values) -> None:
    deltas, quantised = displacements(workers), values == TWO_BITS
    ours = train(monkeypatch, deltas, tw.MeanOverSenders(), values)
    theirs = list(reference_released_sparseloco(start(), deltas, k=K, quantised=quantised))
    assert len(ours) == len(theirs) == ROUNDS
    for mine, released in zip(ours, theirs, strict=True):
        for worker in range(workers):
            pairs = zip(mine.sent[worker], released.sent[worker], strict=True)
            assert all(torch.equal(x, y) for x, y in pairs)
            assert distance(mine.residuals[worker], released.residuals[worker]) < 2e-7
        assert distance(mine.update, released.update) < 2e-7
        assert distance(mine.theta, released.theta) < 2e-7
    blocks = sum(rows * columns // 4096 for rows, columns in SHAPES.values())
    assert sum(int(sent.sum()) for sent in theirs[-1].sent[0]) == K * blocks


@pytest.mark.parametrize(
    ("rule", "other", "least"),
    [
        (tw.MeanOverWorkers(), {"k": K}, 0.4),
        (tw.MeanOverSenders(), {"k": K + 1}, 1e-2),
        (tw.MeanOverSenders(), {"k": K, "decay": 0.9}, 1e-2),
        (tw.MeanOverSenders(), {"k": K, "quantised": True}, 1e-2),
    ],
)
def test_control_another_rule_or_setting_is_another_update(monkeypatch, rule, other, least) -> None:
    deltas = displacements(4, rounds=2)
    ours = train(monkeypatch, deltas, rule)
    theirs = list(reference_released_sparseloco(start(), deltas, **other))
    assert distance(ours[-1].update, theirs[-1].update) > least
