"""Payloads that only open with the token, in the place that they were sealed for, and unchanged."""

import hashlib
import sys

import pytest
import torch
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

import thinwire as tw
from thinwire.security import sealing
from thinwire.security.sealing import SEAL_NBYTES, Sealer, place_of
from thinwire.security.token import Token

SECRET = "a secret of many characters"
TOKEN = Token(SECRET)
PLACE = place_of("fragment 0", 3, "gather", 0)


def payload_of(numel: int) -> torch.Tensor:
    return torch.randint(0, 256, (numel,), dtype=torch.uint8)


def test_what_is_sealed_opens_to_what_it_was_and_each_seal_is_another() -> None:
    sealer, once = Sealer(TOKEN), payload_of(99)
    assert len({bytes(sealer.seal(once, PLACE).tolist()) for _ in range(20)}) == 20
    for numel in (0, 1, 2, 16, 4099):
        for payload in (payload_of(numel), payload_of(2 * numel)[::2]):
            sealed = Sealer(TOKEN).seal(payload, PLACE)
            assert len(sealed) == numel + SEAL_NBYTES
            assert torch.equal(Sealer(Token(SECRET)).open(sealed, PLACE), payload)


def test_the_format_is_that_of_the_standards(monkeypatch) -> None:
    """What another program makes of HKDF and AES-GCM as they are specified opens here."""
    secret = hashlib.sha256(b"thinwire token" + SECRET.encode()).digest()
    key = HKDF(SHA256(), 32, salt=None, info=b"thinwire payloads 1 the run").derive(secret)
    nonce, payload = bytes(range(12)), bytes(range(77))
    sealed = nonce + AESGCM(key).encrypt(nonce, payload, PLACE)
    tensor = torch.tensor(list(sealed), dtype=torch.uint8)
    for step in (1 << 30, 32, 7):  # OpenSSL takes a long payload in pieces only
        monkeypatch.setattr(sealing, "_STEP_NBYTES", step)
        assert bytes(Sealer(TOKEN, "the run").open(tensor, PLACE).tolist()) == payload
        mine = bytes(Sealer(TOKEN, "the run").seal(tensor, PLACE).tolist())
        assert AESGCM(key).decrypt(mine[:12], mine[12:], PLACE) == sealed


@pytest.mark.slow
def test_a_payload_of_more_than_two_gibibytes_is_sealed_like_a_short_one() -> None:
    payload = torch.zeros(2**31 + 3, dtype=torch.uint8)
    payload[-1] = 7
    sealed = Sealer(TOKEN).seal(payload, PLACE)
    assert torch.equal(Sealer(TOKEN).open(sealed, PLACE), payload)
    sealed[2**31 + 20] ^= 1
    assert Sealer(TOKEN).open(sealed, PLACE) is None


def test_what_is_changed_cut_longer_or_elsewhere_opens_nowhere() -> None:
    sealed = Sealer(TOKEN).seal(payload_of(99), PLACE)
    assert Sealer(TOKEN).open(sealed, PLACE) is not None
    for at in (0, 11, 12, 50, 110, 111, 126):
        for bit in (0, 7):
            changed = sealed.clone()
            changed[at] ^= 1 << bit
            assert Sealer(TOKEN).open(changed, PLACE) is None
        assert Sealer(TOKEN).open(sealed[:at], PLACE) is None
    assert Sealer(TOKEN).open(torch.cat([sealed, sealed[:1]]), PLACE) is None
    assert Sealer(Token("another secret of many")).open(sealed, PLACE) is None
    assert Sealer(TOKEN, "another run").open(sealed, PLACE) is None
    assert Sealer(TOKEN).open(sealed, PLACE[:-1]) is None


def test_places_of_other_parts_are_other_bytes() -> None:
    places = [("a", "b"), ("ab",), ("a,b",), ('a","b',), ("a", 1), ("a", "1"), ("a", 11), ()]
    assert len({place_of(*parts) for parts in places}) == len(places)


def test_keys_of_other_tokens_or_uses_are_other_keys() -> None:
    keys = {Token(secret).derive(use) for secret in (SECRET, "x" * 16) for use in ("a", "b", "")}
    assert len(keys) == 6
    assert {len(key) for key in keys} == {32}


def test_a_missing_package_is_named(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers", None)
    with pytest.raises(tw.ConfigurationError, match=r"pip install 'thinwire\[secure\]'"):
        Sealer(TOKEN)
