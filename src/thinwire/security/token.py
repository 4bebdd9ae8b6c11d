"""The shared secret of a run, and keys derived from it."""

import hashlib
import hmac
import os
import shlex
from pathlib import Path

from thinwire.errors import ConfigurationError, check

TOKEN_VARIABLE = "THINWIRE_TOKEN"
_SHORTEST = 16


class Token:
    """Secret that the workers of a run share; it is never sent.

    Args:
        secret: 16 characters or more.

    Raises:
        ConfigurationError: it is shorter.

    >>> Token("a secret of many characters")
    Token(...)
    """

    def __init__(self, secret: str) -> None:
        check(
            len(secret) >= _SHORTEST,
            "use this token",
            because=f"it has {len(secret)} characters and can be guessed",
            do=f"pass {_SHORTEST} or more, such as: openssl rand -hex 16",
        )
        self._key = hashlib.sha256(
            # Bytes of the environment that are not text arrive as surrogates.
            b"thinwire token" + secret.encode(errors="surrogateescape")
        ).digest()

    def __repr__(self) -> str:
        return "Token(...)"

    def derive(self, purpose: str) -> bytes:
        """A key of 32 bytes for one purpose, which reveals neither other keys nor the token.

        HKDF-SHA-256 (RFC 5869) of the token, without a salt, with `purpose` as its info.

        Args:
            purpose: a text of its own for every use of a key.

        >>> token = Token("a secret of many characters")
        >>> token.derive("one").hex()[:16], token.derive("two").hex()[:16]
        ('ca46c22c085cdd3d', '9aad2c0fff4e1c31')
        """
        extracted = hmac.digest(bytes(32), self._key, "sha256")
        return hmac.digest(extracted, purpose.encode() + b"\x01", "sha256")


def find_token(file: Path | None = None) -> Token:
    """The token in `file`, or else in the environment variable THINWIRE_TOKEN.

    Raises:
        ConfigurationError: there is no token, or the file cannot be read, or everyone can read it.
    """
    if file is not None:
        try:
            token = Token(file.read_text().strip())
            is_open = os.name == "posix" and file.stat().st_mode & 0o007
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(
                f"read a token from {file}", because=str(error), do="pass the file that holds it"
            ) from error
        check(
            not is_open,
            f"use the token in {file}",
            because="every user of this machine can read it",
            do=f"chmod 600 {shlex.quote(str(file))}",
        )
        return token
    secret = os.environ.get(TOKEN_VARIABLE, "")
    check(
        bool(secret),
        "take part in an elastic run",
        because="there is no token to show that this worker belongs to the run",
        do=f"set {TOKEN_VARIABLE} to the secret of the run, or pass --token-file",
    )
    return Token(secret)


def optional_token(file: Path | None = None) -> Token | None:
    """`find_token`, or None if neither `file` nor the environment has one."""
    return find_token(file) if file is not None or os.environ.get(TOKEN_VARIABLE) else None
