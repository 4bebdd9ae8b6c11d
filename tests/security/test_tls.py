"""Certificates of a run: everybody derives the same authority, which signs the hub's."""

import pytest

from thinwire.security import tls
from thinwire.security.token import Token

TOKEN = Token("a secret of many characters")


def test_the_authority_is_the_same_bytes_wherever_it_is_made() -> None:
    assert tls.run_authority(TOKEN) == tls.run_authority(Token("a secret of many characters"))
    assert tls.run_authority(TOKEN) != tls.run_authority(Token("another secret of many characters"))


@pytest.mark.parametrize("now", ["1970-01-03", "2999-01-01"])
def test_no_clock_is_wrong_enough(now: str) -> None:
    from cryptography import x509

    certificate = x509.load_pem_x509_certificate(tls.run_authority(TOKEN))
    begin, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    assert str(begin.date()) < now < str(end.date())


def test_a_hubs_certificate_names_its_hosts_and_has_a_key_of_its_own() -> None:
    from cryptography import x509

    authority = x509.load_pem_x509_certificate(tls.run_authority(TOKEN))
    (first, key), (_, other) = (tls.hub_certificate(TOKEN, ["10.9.0.1", "nöde"]) for _ in range(2))
    certificate = x509.load_pem_x509_certificate(first)
    certificate.verify_directly_issued_by(authority)
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert [str(each) for each in names.get_values_for_type(x509.IPAddress)] == ["10.9.0.1"]
    assert names.get_values_for_type(x509.DNSName) == ["xn--nde-sna"]
    assert key != other
    constraints = certificate.extensions.get_extension_for_class(x509.BasicConstraints).value
    assert not constraints.ca
