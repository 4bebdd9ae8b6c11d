"""HOST:PORT as text, the address of this machine, and `hub://TOKEN@HOST:PORT/RUN` of a hub."""

from __future__ import annotations

import importlib
import os
import re
import socket
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

from thinwire.errors import ConfigurationError
from thinwire.security.tls import run_authority
from thinwire.security.token import TOKEN_VARIABLE, Token, find_token

# Labels of up to 63 characters, as in DNS; a longer name cannot be looked up.
_LABEL = r"[^\s.:/@\[\]]{1,63}"
_ADDRESS = re.compile(
    rf"(?:\[(?P<ipv6>[0-9A-Fa-f:.%\w]+)\]|(?P<host>{_LABEL}(?:\.{_LABEL})*\.?)):(?P<port>[0-9]{{1,5}})"
)
# A block reserved for documentation, which only the default route leads to.
_DEFAULT_ROUTE = "192.0.2.1"
BUCKET = "thinwire"
# `ObjectStore` has its own deadlines and retries, and stores limit connections.
CLIENT = {"timeout": "1day", "connect_timeout": "10s", "pool_max_idle_per_host": "16"}
NO_RETRIES = {"max_retries": 0}
_SCHEME = "hub://"
_FORM = re.compile(r"hub://((?P<secret>[^@/\s]+)@)?(?P<where>[^@/\s]+)(/(?P<run>[^@/\s]*))?")


def split_address(address: str) -> tuple[str, int]:
    """Host and port of HOST:PORT.

    Args:
        address: such as "node1:29400"; an IPv6 host is in brackets.

    Raises:
        ConfigurationError: the host is missing, or the port is not a number from 0 to 65535.

    >>> split_address("node1:29400"), split_address("[::1]:29400")
    (('node1', 29400), ('::1', 29400))
    """
    found = _ADDRESS.fullmatch(address)
    if found is None or int(found["port"]) > 65535:
        raise ConfigurationError(
            f"use address {address[:80]!r}",
            because="it is not HOST:PORT with the name of a host and a port up to 65535",
            do="pass something like node1:29400, or [::1]:29400 for IPv6",
        )
    return found["ipv6"] or found["host"], int(found["port"])


def address_text(host: str, port: int) -> str:
    """HOST:PORT, with brackets around an IPv6 host.

    >>> address_text("node1", 29400), address_text("::1", 29400)
    ('node1:29400', '[::1]:29400')
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def local_address(towards: str = _DEFAULT_ROUTE) -> str:
    """The source address of packets from this machine to `towards`; sends nothing.

    Args:
        towards: a host; the default gives the address on the default route.

    Raises:
        OSError: the host is unknown, or there is no route to it.

    >>> local_address("127.0.0.1")
    '127.0.0.1'
    """
    family, kind, protocol, _, target = socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


def reachable_host(host: str) -> str:
    """The host name or address at which others reach a server that listens on `host`.

    >>> reachable_host("127.0.0.1")
    '127.0.0.1'
    """
    if host not in ("0.0.0.0", "::"):
        return host
    try:
        return local_address()
    except OSError:  # there is no default route
        return socket.gethostname()


class HubAddress(NamedTuple):
    """Address of a hub, and of a run there.

    Args:
        host: name or IP address that the hub's certificate covers.
        port: port of its S3 server.
        secret: the run's token; "" leaves it to the environment variable THINWIRE_TOKEN.
        run: name of a run there; "" leaves it open.

    >>> address = HubAddress.read("hub://a-secret-of-many-characters@10.9.0.1:29600/first")
    >>> str(address), address.run
    ('hub://10.9.0.1:29600', 'first')
    >>> address.text()
    'hub://a-secret-of-many-characters@10.9.0.1:29600/first'
    """

    host: str
    port: int
    secret: str = ""
    run: str = ""

    def __str__(self) -> str:
        return f"{_SCHEME}{address_text(self.host, self.port)}"

    __repr__ = __str__  # no log may show the token

    def text(self) -> str:
        """The whole address, which is as secret as the token in it."""
        secret = f"{quote(self.secret, safe='')}@" if self.secret else ""
        run = f"/{self.run}" if self.run else ""
        return f"{_SCHEME}{secret}{address_text(self.host, self.port)}{run}"

    @classmethod
    def read(cls, text: str) -> HubAddress:
        """Parse the result of `text`.

        Raises:
            ConfigurationError: it is not hub://TOKEN@HOST:PORT/RUN.
        """
        found = _FORM.fullmatch(text.strip())
        if not found:
            raise ConfigurationError(
                "use this address of a hub",
                because="it is not hub://TOKEN@HOST:PORT/RUN",
                do="copy the whole address that thinwire hub printed, in quotes",
            )
        return cls(
            *split_address(found["where"]), unquote(found["secret"] or ""), found["run"] or ""
        )

    def token(self) -> Token:
        """The token in the address, or else in the environment.

        Raises:
            ConfigurationError: there is none, or the two differ.
        """
        if self.secret and (os.environ.get(TOKEN_VARIABLE) or self.secret) != self.secret:
            raise ConfigurationError(
                f"use the token of {self}",
                because=f"it differs from that of {TOKEN_VARIABLE}",
                do=f"unset {TOKEN_VARIABLE}, or leave the token out of the address",
            )
        return Token(self.secret) if self.secret else find_token()

    def open(self, token: Token, keys: tuple[str, str] | None = None) -> Any:
        """Open the hub's bucket as an obstore store, independent of environment variables.

        Args:
            token: the keys and the authority of the hub's certificate are derived from it.
            keys: access key and secret key; default those of the run's workers.
        """
        access_key, secret_key = keys or hub_keys(token)
        credentials = {"access_key_id": access_key, "secret_access_key": secret_key}
        store: Any = importlib.import_module("obstore.store")
        return store.S3Store(
            BUCKET,
            # The environment would override `endpoint`.
            aws_endpoint_url_s3=f"https://{address_text(self.host, self.port)}",
            region="us-east-1",
            virtual_hosted_style_request=False,
            skip_signature=False,
            unsigned_payload=False,
            conditional_put="etag",
            client_options={"root_certificate": run_authority(token), **CLIENT},
            retry_config=NO_RETRIES,
            # In place of plain keys, to which the environment would add a session token.
            credential_provider=lambda: {**credentials, "token": None, "expires_at": None},
        )


def is_hub(url: Any) -> bool:
    """True if `url` has the scheme of a hub.

    >>> is_hub("hub://10.9.0.1:29600"), is_hub("s3://bucket")
    (True, False)
    """
    return isinstance(url, str) and url.startswith(_SCHEME)


def hub_keys(token: Token) -> tuple[str, str]:
    """Access key and secret key of the workers with this token.

    >>> [len(key) for key in hub_keys(Token("a secret of many characters"))]
    [20, 64]
    """
    access_key = token.derive("thinwire hub access key 1").hex()[:20]
    return access_key, token.derive("thinwire hub secret key 1").hex()
