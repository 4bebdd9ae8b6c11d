"""The certificate of a hub, and the authority behind it, which everyone derives from the token."""

import datetime
import ipaddress
from collections.abc import Iterable
from typing import Any

from thinwire.errors import ConfigurationError
from thinwire.security.token import Token

# Valid by any machine's clock, however wrong.
_ALWAYS = datetime.datetime(1970, 1, 2), datetime.datetime(9999, 1, 1)
# Arguments of `KeyUsage`: the key signs certificates and revocation lists, nothing else.
_SIGNS = False, False, False, False, False, True, True, False, False
_HALF_VALIDITY = datetime.timedelta(days=400)  # some clients refuse more than 825 days


def run_authority(token: Token) -> bytes:
    """Certificate, in PEM, of the authority that all holders of the token share.

    Raises:
        ConfigurationError: cryptography is not installed.

    >>> run_authority(Token("a secret of many characters"))[:27]
    b'-----BEGIN CERTIFICATE-----'
    """
    key = _authority_key(token)
    return _certificate("thinwire run", key.public_key(), key, 1, _ALWAYS, ca=True)


def hub_certificate(token: Token, hosts: Iterable[str]) -> tuple[bytes, bytes]:
    """Certificate of a server, signed by the token's authority, and a new private key, in PEM.

    Args:
        token: the run's token.
        hosts: names and IP addresses that clients may connect to.

    Raises:
        ConfigurationError: cryptography is not installed.
    """
    signer = _authority_key(token)
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.x509.oid import ExtendedKeyUsageOID

    key, now = Ed25519PrivateKey.generate(), datetime.datetime.now(datetime.UTC)
    usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    certificate = _certificate(
        "thinwire hub",
        key.public_key(),
        signer,
        x509.random_serial_number(),
        (now - _HALF_VALIDITY, now + _HALF_VALIDITY),
        x509.ExtendedKeyUsage(usages),
        x509.SubjectAlternativeName([_name(host) for host in hosts]),
    )
    pem, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    return certificate, key.private_bytes(pem, form, serialization.NoEncryption())


def _authority_key(token: Token) -> Any:
    try:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    except ImportError as error:
        raise ConfigurationError(
            "connect to others with this run's token",
            because=f"cryptography cannot be imported ({error})",
            do="pip install 'thinwire[secure]'",
        ) from error
    return Ed25519PrivateKey.from_private_bytes(token.derive("thinwire tls certificate 1"))


def _certificate(
    subject: str,
    key: Any,
    signer: Any,
    serial: int,
    validity: tuple[datetime.datetime, datetime.datetime],
    *extensions: Any,
    ca: bool = False,
) -> bytes:
    """A certificate issued by the authority, in PEM: equal arguments give equal bytes."""
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import Encoding

    name, issuer = (
        x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, each)])
        for each in (subject, "thinwire run")
    )
    builder = x509.CertificateBuilder(issuer, name, key, serial, *validity)
    builder = builder.add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
    # Without these, Python 3.13 and later refuse the chain.
    extensions += (
        x509.SubjectKeyIdentifier.from_public_key(key),
        x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()),
    )
    if ca:
        builder = builder.add_extension(x509.KeyUsage(*_SIGNS), critical=True)
    for extension in extensions:
        builder = builder.add_extension(extension, critical=False)
    return builder.sign(signer, None).public_bytes(Encoding.PEM)


def _name(host: str) -> Any:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host.encode("idna").decode())
