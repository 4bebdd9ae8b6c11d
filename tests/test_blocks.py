"""Parts of vectors, and vectors that come in parts."""

import pytest
import torch

from thinwire.blocks import DenseVector, VectorPart, spans

WHOLE = torch.arange(100.0)
PARTS = [VectorPart(r) for r in ([(0, 100)], [(7, 7)], [(50, 60), (3, 4)], [(0, 3), (3, 9)])]


@pytest.mark.parametrize("part", PARTS, ids=range(len(PARTS)))
@pytest.mark.parametrize("by", [0, 5])
def test_what_is_read_and_changed_is_written_back(part, by: int) -> None:
    vector = torch.cat([torch.zeros(by), WHOLE])
    moved = part.shifted(by)
    assert moved.numel == part.numel
    assert torch.equal(moved.read(vector), part.read(WHOLE))
    assert torch.equal(moved.read(vector[by:], by), part.read(WHOLE))
    moved.write(vector, part.read(WHOLE) + 1.0)
    expected = WHOLE.clone()
    part.write(expected, part.read(WHOLE) + 1.0)
    assert torch.equal(vector[by:], expected)
    assert float((expected - WHOLE).sum()) == part.numel


@pytest.mark.parametrize("numel", [0, 1, 2**18, 2**18 + 1])
def test_a_dense_vector_is_read_without_being_changed(numel: int) -> None:
    values = torch.randn(numel)
    kept, vector = values.clone(), DenseVector(values)
    for _, block in vector.blocks():
        block.zero_()
    for part in spans(0, numel, 1000):
        vector.read(part).zero_()
    assert torch.equal(values, kept)
    assert vector.is_finite()


def test_a_piece_has_places_of_its_own() -> None:
    piece = DenseVector(WHOLE).piece(10, 20)
    assert piece.whole().tolist() == WHOLE[10:20].tolist()
    out = torch.empty(3)
    assert piece.read(VectorPart([(2, 5)]), out).data_ptr() == out.data_ptr()
    assert out.tolist() == [12.0, 13.0, 14.0]
