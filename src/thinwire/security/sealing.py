"""Sealed bytes: only holders of the run's token can read or make them."""

from __future__ import annotations

import json
import os
from typing import Any

import torch
from torch import Tensor

from thinwire.errors import ConfigurationError
from thinwire.security.token import Token
from thinwire.storage import BufferPool

_NONCE_NBYTES, _TAG_NBYTES = 12, 16
_STEP_NBYTES = 1 << 30  # OpenSSL takes less than 2 GiB at once
SEAL_NBYTES = _NONCE_NBYTES + _TAG_NBYTES
"""Bytes that sealing adds to a payload: a nonce before it and an authentication tag after it."""


def place_of(*parts: str | int) -> bytes:
    """Where a payload belongs, as associated data of its seal: different parts, different bytes.

    >>> place_of("fragment 0", 3)
    b'["fragment 0",3]'
    """
    return json.dumps(parts, separators=(",", ":")).encode()


class Sealer:
    """Seals payloads with a key derived from the token, and opens them.

    sealed = nonce || AES-256-GCM(key, nonce, payload, place); key = HKDF-SHA-256(token, run)

    Safe from any thread. A key may seal 2^32 payloads: nonces of 12 bytes are drawn at random.

    Args:
        token: the run's token.
        run: the run's name; payloads of another run do not open.

    Attributes:
        buffers: memory for sealed and opened payloads.

    Raises:
        ConfigurationError: the package cryptography is missing.

    Source: NIST SP 800-38D, RFC 5869.

    >>> sealer = Sealer(Token("a secret of many characters"))
    >>> sealed = sealer.seal(torch.arange(5, dtype=torch.uint8), b"round 1")
    >>> len(sealed), sealer.open(sealed, b"round 1").tolist(), sealer.open(sealed, b"round 2")
    (33, [0, 1, 2, 3, 4], None)
    """

    def __init__(self, token: Token, run: str = "") -> None:
        try:
            from cryptography.exceptions import InvalidTag
            from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
        except ImportError as error:
            raise ConfigurationError(
                "seal what workers send each other",
                because="the package cryptography is missing",
                do="pip install 'thinwire[secure]', or unset THINWIRE_TOKEN on all workers: what "
                "they send can then be read and changed on its way",
            ) from error
        key = algorithms.AES(token.derive(f"thinwire payloads 1 {run}"))
        self._cipher: Any = lambda *nonce: Cipher(key, modes.GCM(*nonce))
        self._not_mine = InvalidTag
        self.buffers = BufferPool()

    def seal(self, payload: Tensor, place: bytes) -> Tensor:
        """Seal `payload` (uint8 [n], on any device) for `place`: uint8 [n + 28], on the CPU."""
        sealed = self.buffers.take(payload.numel() + SEAL_NBYTES, torch.device("cpu"))
        into, nonce = sealed.numpy().data, os.urandom(_NONCE_NBYTES)
        into[:_NONCE_NBYTES] = nonce
        encryptor = self._cipher(nonce).encryptor()
        _carry(encryptor, place, _view(payload), into[_NONCE_NBYTES:-_TAG_NBYTES])
        into[-_TAG_NBYTES:] = encryptor.tag
        return sealed

    def open(self, sealed: Tensor | memoryview, place: bytes) -> Tensor | None:
        """The payload of `sealed` (uint8 [n + 28]); None unless it was sealed for `place`."""
        raw = sealed if isinstance(sealed, memoryview) else _view(sealed)
        if len(raw) < SEAL_NBYTES:
            return None
        payload = self.buffers.take(len(raw) - SEAL_NBYTES, torch.device("cpu"))
        nonce, tag = bytes(raw[:_NONCE_NBYTES]), bytes(raw[-_TAG_NBYTES:])
        decryptor, body = self._cipher(nonce, tag).decryptor(), raw[_NONCE_NBYTES:-_TAG_NBYTES]
        try:
            _carry(decryptor, place, body, payload.numpy().data)
        except self._not_mine:
            return None
        return payload


def _carry(cipher: Any, place: bytes, raw: memoryview, into: memoryview) -> None:
    """Encrypt or decrypt `raw`, and check or make its tag."""
    cipher.authenticate_additional_data(place)
    for at in range(0, len(raw), _STEP_NBYTES):
        cipher.update_into(raw[at : at + _STEP_NBYTES], into[at : at + _STEP_NBYTES])
    cipher.finalize()


def _view(payload: Tensor) -> memoryview:
    return payload.detach().cpu().contiguous().numpy().data
