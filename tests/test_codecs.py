import dataclasses

import pytest
import torch

import thinwire as tw
from thinwire.testing import CodecContract


class TestIdentity(CodecContract):
    def make(self):
        return tw.codecs.Identity()

    def bound(self, x):
        return 0.0


class TestCastBF16(CodecContract):
    def make(self):
        return tw.codecs.CastBF16()

    def bound(self, x):
        return float(x.abs().max()) * 2.0**-8


class TestCastFP16(CodecContract):
    def make(self):
        return tw.codecs.CastFP16()

    def bound(self, x):
        return float(x.abs().max()) * 2.0**-11


GOLDEN = {
    "identity/f32": "0000803f000020c00000000000007f43db0f4940",
    "cast/bf16": "803f20c000007f434940",
    "cast/fp16": "003c00c10000f85b4842",
}


@pytest.mark.parametrize(
    "codec", [tw.codecs.Identity(), tw.codecs.CastBF16(), tw.codecs.CastFP16()]
)
def test_an_id_names_these_bytes_for_ever(codec: tw.codecs.Codec) -> None:
    x = torch.tensor([1.0, -2.5, 0.0, 255.0, 3.1415927])
    assert bytes(codec.encode(x)).hex() == GOLDEN[codec.id]


def test_fp16_saturates_instead_of_overflowing() -> None:
    codec = tw.codecs.CastFP16()
    assert codec.decode(codec.encode(torch.tensor([1e6, -1e6])), 2).tolist() == [65504.0, -65504.0]


def test_a_codec_is_a_value() -> None:
    assert tw.codecs.CastBF16() == tw.codecs.CastBF16()
    with pytest.raises(dataclasses.FrozenInstanceError):
        tw.presets.ddp().codec = tw.codecs.Identity()
