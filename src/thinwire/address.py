"""The address of a run, and the connection to its other workers."""

from __future__ import annotations

import difflib
import os
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qsl

from thinwire.errors import ConfigurationError, check
from thinwire.files import check_run_name

if TYPE_CHECKING:
    from thinwire.security.token import Token
    from thinwire.transport import Transport

AT_VARIABLE: Final = "THINWIRE_AT"
"""Environment variable with the address."""

_FORMS: Final = {
    "tcp": "tcp://HOST:PORT?workers=K&worker=0",
    "hub": "hub://TOKEN@HOST:PORT/RUN",
    "s3": "s3://BUCKET/RUN",
    "gs": "gs://BUCKET/RUN",
    "az": "az://ACCOUNT/CONTAINER/RUN",
    "file": "file:///FOLDER/RUN",
    "memory": "memory:///RUN",
}
_ANY_FORM: Final = ", ".join(_FORMS.values())
_NUMBERS: Final = ("workers", "worker")
_OR_NEITHER = "pass ?workers=K&worker=0 (1, 2, ...), or neither if workers join and leave"


@dataclass(frozen=True)
class Address:
    """The place where the workers of a run meet.

    ``tcp://HOST:PORT?workers=K&worker=0``
        K workers over `torch.distributed`; worker 0 listens.
    ``hub://TOKEN@HOST:PORT/RUN``, ``s3://BUCKET/RUN``, ``gs://``, ``az://``, ``file:///FOLDER/RUN``
        Workers that join and leave at any time, over an object store. With
        ``?workers=K&worker=0`` their number is fixed.

    Args:
        place: HOST:PORT, or the URL of the object store.
        run: name of the run in the store; "" for tcp.
        workers: K, or None if workers join and leave.
        worker: number of this worker, from 0.
        secret: the run's token, if the address has one.

    >>> Address.read("s3://bucket/prefix/first")
    Address(place='s3://bucket/prefix', run='first', workers=None, worker=None)
    >>> Address.read("tcp://node0:29400?workers=2&worker=1").place
    'node0:29400'
    """

    place: str
    run: str
    workers: int | None = None
    worker: int | None = None
    secret: str = field(default="", repr=False)  # no log may show it

    def __str__(self) -> str:
        where = f"{self.place}/{self.run}" if self.run else f"tcp://{self.place}"
        numbers = "" if self.workers is None else f"?workers={self.workers}&worker={self.worker}"
        return where + numbers

    @classmethod
    def read(cls, text: str | None = None) -> Address:
        """Parse an address, by default the one in THINWIRE_AT.

        Raises:
            ConfigurationError: there is no address; or it has an unknown scheme, a missing or
                malformed part, or another token than THINWIRE_TOKEN.
        """
        text = text or of_environment()
        check(
            bool(text),
            "find a run",
            because=f"no address is given, and {AT_VARIABLE} is not set",
            do=f"pass {_ANY_FORM}",
        )
        rest, _, query = text.strip().partition("?")
        scheme, separator, where = rest.partition("://")
        # No error shows a token, however the scheme is written.
        shown = re.sub("^(hub://)?.*@", r"\1", text, flags=re.DOTALL)
        what = f"connect to {shown[:200]!r}"
        if not separator or scheme not in _FORMS:
            near = difflib.get_close_matches(scheme.lower(), _FORMS, n=1, cutoff=0.6)
            because = f"{scheme!r} is no scheme of an address"
            if not separator:
                near = ["tcp"] if re.fullmatch(r"[^/\s]+:[0-9]+", rest) else ["file"]
                because = "it has no scheme"
            do = f"pass {_FORMS[near[0]] if near else _ANY_FORM}"
            raise ConfigurationError(what, because=because, do=do)
        do = f"pass {_FORMS[scheme]}"
        workers, worker = _numbers(query, what, do if scheme == "tcp" else _OR_NEITHER)
        check(
            scheme != "file" or where.startswith("/"),
            what,
            because="the path of its folder does not begin at the root",
            do=f"pass {_FORMS['file']}, with three slashes",
        )
        place, _, run = rest.rpartition("/")
        # file:///run names a folder at the root of a disk, or a slip.
        run = run if scheme == "memory" or place.partition("://")[2].strip("/") else ""
        secret, hub = "", None
        try:
            if scheme == "tcp":
                from thinwire.transport.address import split_address

                split_address(where)
                check(workers is not None, what, because="it has no number of workers", do=do)
                return cls(where, "", workers, worker)
            if scheme == "hub":
                from thinwire.transport.address import HubAddress

                hub = HubAddress.read(rest)
                place, run, secret = str(hub), hub.run, hub.secret
        except ConfigurationError as error:
            raise ConfigurationError(what, because=error.because, do=do) from error
        check(bool(run), what, because="the name of a run is missing at its end", do=do)
        check_run_name(run, what)
        if hub is not None and secret:
            hub.token()  # raises if the environment has another token
        return cls(place, run, workers, worker, secret)


def connect(
    at: str | None = None, *, token: Token | None = None, timeout_s: float | None = None
) -> Transport:
    """The connection to the other workers of a run.

    Payloads are sealed if THINWIRE_TOKEN or the address has a token. If the default process group
    of `torch.distributed` has several ranks, an address makes them one worker.

    Args:
        at: address of the run; default the environment variable THINWIRE_AT. Without either, the
            workers are the ranks of the default process group, or this process alone.
        token: seals payloads; default the token of the address or of THINWIRE_TOKEN.
        timeout_s: how long to wait for the other workers, and for each of their messages; default
            300 over tcp://, 600 through a store of a fixed number of workers, and what measured
            rounds say where they come and go. A process group has its own.

    Returns:
        `Distributed`, `Rendezvous` or `Elastic`.

    Raises:
        ConfigurationError: the address cannot be used.

    >>> connect().world_size
    1
    >>> connect("memory:///first").is_fixed
    False
    """
    from thinwire.transport import Distributed, Rendezvous, Sealed
    from thinwire.transport.sealed import sealed_by_default

    text = (of_environment() or None) if at is None else at
    if text is None:
        group = Distributed()
        if token is None or group.world_size == 1:
            return sealed_by_default(group)
        return Sealed(group, token)
    address = Address.read(text)
    if not address.run:
        assert address.worker is not None  # `read` checks both
        assert address.workers is not None
        own: dict[str, Any] = {} if timeout_s is None else {"timeout_s": timeout_s}
        meeting = Rendezvous(address.place, worker=address.worker, workers=address.workers, **own)
        return sealed_by_default(meeting) if token is None else Sealed(meeting, token)
    from torch import distributed

    from thinwire.elastic.timeouts import ElasticOptions
    from thinwire.transport import Elastic

    is_group = distributed.is_available() and distributed.is_initialized()
    return Elastic(
        address.place,
        run=address.run,
        workers=address.workers,
        worker=address.worker,
        token=token or address.secret or None,
        group=distributed.group.WORLD if is_group and distributed.get_world_size() > 1 else None,
        options=ElasticOptions(timeout_s=timeout_s),
    )


def _numbers(query: str, what: str, do: str) -> tuple[int | None, int | None]:
    given = dict(parse_qsl(query, keep_blank_values=True))
    for name, value in given.items():
        if name not in _NUMBERS:
            near = difflib.get_close_matches(name, _NUMBERS, n=1) or ["workers"]
            because = f"{name!r} is no setting of an address"
            raise ConfigurationError(what, because=because, do=f"pass {near[0]}=NUMBER")
        is_number = value.isascii() and value.isdigit() and len(value) < 9
        because = f"{name} is {value!r}, which is no number"
        check(is_number, what, because=because, do=f"pass {name}=NUMBER")
    if not given:
        return None, None
    for name in _NUMBERS:
        check(name in given, what, because=f"it has no {name}", do=do)
    workers, worker = int(given["workers"]), int(given["worker"])
    check(
        worker < workers,
        what,
        because=f"worker {worker} is none of {workers}, which are numbered from 0",
        do=f"pass worker=0 to worker={max(0, workers - 1)}",
    )
    return workers, worker


def of_environment() -> str:
    """The address in THINWIRE_AT; "" without one."""
    return os.environ.get(AT_VARIABLE, "")
