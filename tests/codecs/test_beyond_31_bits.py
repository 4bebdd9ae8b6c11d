import pytest
import torch

from thinwire.codecs import E3M0, CastBF16, Codec, Quantise, TopK
from thinwire.fragments.layout import Layout

ROWS, WIDTH = 2**19 + 5, 4096


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "codec",
    [Quantise(bits=2), Quantise(bits=8), TopK(k=64), E3M0(), CastBF16()],
    ids=lambda codec: codec.id.partition("/")[0],
)
def test_places_of_a_vector_may_need_more_than_31_bits(codec: Codec) -> None:
    """In 9 GB, and up to 15 with the payload."""
    tail = torch.randn(4 * WIDTH, generator=torch.Generator().manual_seed(0))
    small = codec.bind(Layout.of({"w": (4, WIDTH)}))
    wanted = torch.zeros_like(tail)
    small.add_to(wanted, [small.encode(tail)], weight=0.5)
    large = codec.bind(Layout.of({"w": (ROWS, WIDTH)}))
    vector = torch.zeros(ROWS * WIDTH)
    for part in (slice(len(tail)), slice(-len(tail), None)):
        vector[part] = tail
    payload = large.encode_residual(vector)
    vector.zero_()
    large.add_to(vector, [payload], weight=0.5)
    assert torch.equal(vector[-len(tail) :], wanted)
    assert torch.equal(vector[: len(tail)], wanted)
    assert not vector[len(tail) : -len(tail)].any()
