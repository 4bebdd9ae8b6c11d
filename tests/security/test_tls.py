"""TLS of a run: who gets in, and that everybody derives the same."""

import socket
import ssl
import threading

import pytest

from thinwire.security import tls
from thinwire.security.token import Token

TOKEN = Token("a secret of many characters")
OTHER = Token("another secret of many characters")


def handshake(server: ssl.SSLContext, client: ssl.SSLContext) -> tuple[str, str]:
    """What each side came to: the version of TLS, or the name of its error."""
    here, there = socket.socketpair()
    found: list[str] = []

    def serve() -> None:
        with here:
            try:
                with server.wrap_socket(here, server_side=True) as stream:
                    found.append(stream.version() or "")
                    stream.sendall(stream.recv(1))
            except OSError as error:
                found.append(type(error).__name__)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with there, client.wrap_socket(there) as stream:
            stream.sendall(b"x")
            said = stream.version() if stream.recv(1) == b"x" else "closed"
    except OSError as error:
        said = type(error).__name__
    thread.join(5)
    return found[0], said or ""


def test_only_those_that_know_the_token_speak_tls_1_3() -> None:
    def client(token: Token) -> tuple[str, str]:
        return handshake(tls.server_context(TOKEN), tls.client_context(token))

    assert client(Token("a secret of many characters")) == ("TLSv1.3", "TLSv1.3")
    found, said = client(OTHER)
    assert found.startswith("SSL")
    assert said == "SSLCertVerificationError"  # both sides refuse
    stranger = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # without a certificate
    stranger.check_hostname, stranger.verify_mode = False, ssl.CERT_NONE
    found, said = handshake(tls.server_context(TOKEN), stranger)
    assert found == "SSLError"
    assert said != "TLSv1.3"
    old = tls._context(TOKEN, ssl.PROTOCOL_TLS_CLIENT)
    old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_2
    found, said = handshake(tls.server_context(TOKEN), old)
    assert found.startswith("SSL")
    assert said.startswith("SSL")


def test_certificate_and_key_are_the_same_bytes_wherever_they_are_made() -> None:
    assert tls._certificate(TOKEN) == tls._certificate(Token("a secret of many characters"))
    assert tls._certificate(TOKEN) != tls._certificate(OTHER)
    # And none is readable from what is signed.
    use = "thinwire tls certificate 1"
    assert TOKEN.derive(use).hex() not in TOKEN.sign(use)


@pytest.mark.parametrize("now", ["1970-01-03", "2999-01-01"])
def test_no_clock_is_wrong_enough(now: str) -> None:
    from cryptography import x509

    certificate = x509.load_pem_x509_certificate(tls._certificate(TOKEN)[0])
    begin, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    assert str(begin.date()) < now < str(end.date())
