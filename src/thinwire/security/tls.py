"""TLS 1.3 in which both sides show that they know the run's token.

All members derive the same key and certificate from the token; both sides of a connection present
it and trust nothing else. So a stranger is refused in the handshake, nothing that travels can be
read or changed, and no authority, name or right time is needed.
"""

import datetime
import ssl
import tempfile
from functools import cache
from pathlib import Path

from thinwire.errors import ConfigurationError
from thinwire.security.token import Token

_PURPOSE = "thinwire tls certificate 1"
# No machine's clock may be wrong enough to be outside.
_BEGIN, _END = datetime.datetime(1970, 1, 2), datetime.datetime(9999, 1, 1)


@cache
def server_context(token: Token) -> ssl.SSLContext:
    """For the side that is connected to.

    Raises:
        ConfigurationError: cryptography is not installed.

    >>> server_context(Token("a secret of many characters")).verify_mode.name
    'CERT_REQUIRED'
    """
    context = _context(token, ssl.PROTOCOL_TLS_SERVER)
    # A ticket that is never read would make the system answer the end of a connection with a reset,
    # and what is under way would be lost.
    context.num_tickets = 0
    return context


@cache
def client_context(token: Token) -> ssl.SSLContext:
    """For the side that connects.

    Raises:
        ConfigurationError: cryptography is not installed.

    >>> client_context(Token("a secret of many characters")).check_hostname
    False
    """
    return _context(token, ssl.PROTOCOL_TLS_CLIENT)


def _context(token: Token, protocol: int) -> ssl.SSLContext:
    certificate, key = _certificate(token)
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # the certificate says who may take part, not where
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=certificate.decode())
    # The ssl module reads keys from files alone; only this user can read this folder.
    with tempfile.TemporaryDirectory(prefix="thinwire-") as folder:
        file = Path(folder) / "key.pem"
        file.write_bytes(certificate + key)
        context.load_cert_chain(file)
    return context


def _certificate(token: Token) -> tuple[bytes, bytes]:
    """Certificate and private key in PEM: the same bytes wherever they are made."""
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    except ImportError as error:
        raise ConfigurationError(
            "connect to others with this run's token",
            because=f"cryptography cannot be imported ({error})",
            do="pip install 'thinwire[secure]'",
        ) from error
    key = Ed25519PrivateKey.from_private_bytes(token.derive(_PURPOSE))
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "thinwire run")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(_BEGIN)
        .not_valid_after(_END)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, None)
    )
    plain = serialization.NoEncryption()
    form = serialization.PrivateFormat.PKCS8
    return (
        certificate.public_bytes(serialization.Encoding.PEM),
        key.private_bytes(serialization.Encoding.PEM, form, plain),
    )
