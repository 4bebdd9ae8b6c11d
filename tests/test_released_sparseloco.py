"""SparseLoCo against its released code, written out: fixed displacements, six rounds."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import thinwire as tw
from reference_loops import reference_released_sparseloco
from toy import Team, feedback_of

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
    deltas: list[list[list[Tensor]]], rule: tw.aggregate.Aggregate, values: tw.codecs.Values = EXACT
) -> Iterator[tuple[list[list[Tensor]], list[Tensor]]]:
    """What the outer loop does with the same displacements: residuals and theta of each round."""
    codec = tw.codecs.TopK(k=K, values=values, groups=tw.codecs.Blocks())
    method = tw.presets.sparseloco(sync_every=1, codec=codec, aggregate=rule)

    def build() -> nn.Module:
        return nn.ParameterDict(dict(zip(SHAPES, map(nn.Parameter, start()), strict=True)))

    team = Team(method, lambda _: [], len(deltas[0]), model=build)
    for moved in deltas:
        for model, own in zip(team.models, moved, strict=True):
            with torch.no_grad():
                for name, delta in zip(SHAPES, own, strict=True):
                    model[name] -= delta
        team.exchange()
        feedback = [feedback_of(loop)[0]["residual"] for loop in team.loops]
        yield [split(flat.clone()) for flat in feedback], [p.clone() for p in team.anchor()]


def distance(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """Relative, of the matrix that differs most."""
    pairs = zip(ours, theirs, strict=True)
    return max(float((x - y).norm() / y.norm()) for x, y in pairs)


@pytest.mark.parametrize(("workers", "values"), [(2, EXACT), (3, TWO_BITS), (4, EXACT)])
def test_six_rounds_are_those_of_the_released_code(workers: int, values) -> None:
    deltas, quantised = displacements(workers), values == TWO_BITS
    released = reference_released_sparseloco(start(), deltas, k=K, quantised=quantised)
    ours = train(deltas, tw.MeanOverSenders(), values)
    for (residuals, theta), theirs in zip(ours, released, strict=True):
        for mine, its in zip(residuals, theirs.residuals, strict=True):
            assert distance(mine, its) < 2e-7
        assert distance(theta, theirs.theta) < 2e-7


@pytest.mark.parametrize(
    ("rule", "other", "least"),
    [
        (tw.MeanOverWorkers(), {"k": K}, 0.4),
        (tw.MeanOverSenders(), {"k": K + 1}, 1e-2),
        (tw.MeanOverSenders(), {"k": K, "decay": 0.9}, 1e-2),
        (tw.MeanOverSenders(), {"k": K, "quantised": True}, 1e-2),
    ],
)
def test_control_another_rule_or_setting_is_another_update(rule, other, least) -> None:
    deltas = displacements(4, rounds=2)
    released = list(reference_released_sparseloco(start(), deltas, **other))
    thetas = [theta for _, theta in train(deltas, rule)], [each.theta for each in released]
    ours, theirs = ([a - b for a, b in zip(*two, strict=True)] for two in thetas)
    assert distance(ours, theirs) > least
