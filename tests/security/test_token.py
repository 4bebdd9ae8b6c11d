"""Tokens that cannot be used, and certificates: everybody derives the same authority."""

from pathlib import Path

import pytest
from cryptography import x509

from thinwire.errors import ConfigurationError
from thinwire.security import tls
from thinwire.security.token import Token, find_token


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


TOKEN = Token("a secret of many characters")


def test_the_authority_is_the_same_bytes_wherever_it_is_made() -> None:
    assert tls.run_authority(TOKEN) == tls.run_authority(Token("a secret of many characters"))
    assert tls.run_authority(TOKEN) != tls.run_authority(Token("another secret of many characters"))


def test_a_hubs_certificate_names_its_hosts_and_has_a_key_of_its_own() -> None:
    authority = x509.load_pem_x509_certificate(tls.run_authority(TOKEN))
    # No clock is wrong enough.
    assert str(authority.not_valid_before_utc.date()) < "1970-01-03"
    assert str(authority.not_valid_after_utc.date()) > "2999-01-01"
    (first, key), (_, other) = (tls.hub_certificate(TOKEN, ["10.9.0.1", "nöde"]) for _ in range(2))
    certificate = x509.load_pem_x509_certificate(first)
    certificate.verify_directly_issued_by(authority)
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert [str(each) for each in names.get_values_for_type(x509.IPAddress)] == ["10.9.0.1"]
    assert names.get_values_for_type(x509.DNSName) == ["xn--nde-sna"]
    assert key != other
    constraints = certificate.extensions.get_extension_for_class(x509.BasicConstraints).value
    assert not constraints.ca
