"""Tokens that cannot be used."""

from pathlib import Path

import pytest

from thinwire.errors import ConfigurationError
from thinwire.security.token import find_token


def test_a_token_that_can_be_guessed_is_missing_or_cannot_be_read_is_refused(
    tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.delenv("THINWIRE_TOKEN", raising=False)
    with pytest.raises(ConfigurationError, match="there is no token"):
        find_token()
    file = tmp_path / "token"
    for content, why in ((b"fifteen letters", "15 characters"), (b"\xff" * 20, "decode")):
        file.write_bytes(content)
        with pytest.raises(ConfigurationError, match=why):
            find_token(file)
    file.write_text("sixteen letters!")
    for mode, is_used in ((0o644, False), (0o602, False), (0o640, True), (0o600, True)):
        file.chmod(mode)
        if is_used:
            assert repr(find_token(file)) == "Token(...)"
            continue
        with pytest.raises(ConfigurationError, match=r"every user .* can read it; do: chmod 600"):
            find_token(file)
    with pytest.raises(ConfigurationError, match="No such file"):
        find_token(tmp_path / "none")
    monkeypatch.setenv("THINWIRE_TOKEN", "sixteen letters!")
    assert repr(find_token()) == "Token(...)"
