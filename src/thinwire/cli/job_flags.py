"""The flags of `thinwire plan` that say what is planned for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeAlias, get_type_hints

import tyro

from thinwire.cli.flag_descriptions import Called
from thinwire.cli.flag_rules import RUN, read_flag
from thinwire.errors import ConfigurationError
from thinwire.plan.compute import peak_flops_per_s
from thinwire.plan.units import (
    parse_count,
    parse_duration,
    parse_latency,
    parse_price,
    parse_rate,
    parse_share,
)

if TYPE_CHECKING:
    from thinwire.plan.calibration import Calibration
    from thinwire.plan.compute import Coding, Compute
    from thinwire.plan.job import BucketPrice, Job, Prices
    from thinwire.plan.link import Link
    from thinwire.plan.shape import Shape

_MFU: Final = 0.4


@dataclass(frozen=True, kw_only=True, slots=True)
class _ReadBy:
    """What reads the text of a flag; tyro would print its errors in another form."""

    parse: Callable[[str], Any]


_Count: TypeAlias = Annotated[str | None, _ReadBy(parse=parse_count)]
_Duration: TypeAlias = Annotated[str | None, _ReadBy(parse=parse_duration)]
_Rate: TypeAlias = Annotated[str | None, _ReadBy(parse=parse_rate)]
_Share: TypeAlias = Annotated[str | None, _ReadBy(parse=parse_share)]
_Price: TypeAlias = Annotated[str | None, _ReadBy(parse=parse_price)]
_Latency: TypeAlias = Annotated[str, _ReadBy(parse=parse_latency)]
_Accelerator: TypeAlias = Annotated[str | None, _ReadBy(parse=peak_flops_per_s)]


@dataclass(frozen=True, kw_only=True)
class JobFlags:
    """A model, how fast its workers compute, and what joins them."""

    parameters: _Count = None
    """N, such as 350M or 10B; with --layers, in place of --model."""
    layers: _Count = None
    """L: layers of the stack."""
    model: str | None = None
    """A built-in size (250k to 15b), a config.json or its folder, or a hub name in the cache."""
    workers: _Count = None
    """How many."""
    step_time: _Duration = None
    """Of an inner step, such as 0.8s."""
    encode_time: _Duration = None
    """Of a parameter, such as 7ns, before it is sent: thinwire bench codecs measures it."""
    decode_time: _Duration = None
    """Of a parameter in one worker's payload."""
    accelerator: _Accelerator = None
    """H100, MI300X, ...: works out the step's time, with --tokens-per-step."""
    mfu: _Share = None
    """Share of the accelerator's peak that training reaches."""
    accelerators_per_worker: _Count = None
    """How many share a worker's step."""
    tokens_per_step: _Count = None
    """Of one worker in an inner step, such as 64k."""
    tokens: _Count = None
    """Of the whole run, such as 300B: plans its wall-clock."""
    bandwidth: _Rate = None
    """Of every worker, up and down, such as 10Gbit/s."""
    up: _Rate = None
    """What a worker sends at; with --down in place of --bandwidth."""
    down: _Rate = None
    """What a worker receives at."""
    latency: _Latency = "0"
    """One way, such as 50ms."""
    topology: Literal["ring", "star"] | None = None
    """How messages travel; ring is what thinwire does over gloo; star an object store."""
    worker_price: _Price = None
    """Of a worker with all its accelerators for an hour, such as 2.50USD."""
    traffic_price: _Price = None
    """Of a GB that a worker sends over its link, such as 0.05USD."""
    egress_price: _Price = None
    """Of a GB that is read from the object store over which workers exchange, such as 0.09USD."""
    put_price: _Price = None
    """Of a million objects written there."""
    get_price: _Price = None
    """Of a million objects read there."""
    elastic: tyro.conf.FlagCreatePairsOff[bool] = False
    """Count what workers that come and go ask the store for besides."""
    sealed: tyro.conf.FlagCreatePairsOff[bool] = False
    """Count what sealing adds to every message: 28 bytes."""
    sync_every: _Count = None
    """H: inner steps between two exchanges, of the methods that have rounds."""
    run: Annotated[Path | None, tyro.conf.arg(name=RUN), Called(RUN)] = None
    """Folder of a finished run: the same model, workers, step time and method over another link."""

    def given(self) -> set[str]:
        """Names of the flags that were given."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        names = {name for name, value in values.items() if value not in (None, False)}
        return {RUN if name == "run" else name for name in names}

    def sharing(self) -> int:
        """Accelerators that share a worker."""
        return self._values().get("accelerators_per_worker", 1)

    def calibration(self) -> Calibration | None:
        """The job of the run in --from; None without it.

        Raises:
            ConfigurationError: its folder says too little; see `calibrate`.
        """
        if self.run is None:
            return None
        from thinwire.plan.calibration import calibrate

        return calibrate(self.run, step_s=self._values().get("step_time"))

    def job(self, calibration: Calibration | None) -> Job:
        """The job that the flags describe, once `check_flags` has passed them.

        Raises:
            ConfigurationError: a text that cannot be read, or a model that cannot be resolved.
        """
        if self.egress_price is not None and self.topology not in (None, "star"):
            raise ConfigurationError(
                f"plan with --egress-price and --topology {self.topology}",
                because="it is the price of what is read from an object store, which is a star",
                do="leave one of them out",
            )
        from thinwire.plan.job import Job
        from thinwire.plan.link import TOPOLOGIES, Link
        from thinwire.plan.models import resolve
        from thinwire.plan.shape import Shape
        from thinwire.security.sealing import SEAL_NBYTES

        values = self._values()
        link = Link(
            up_bits_per_s=values.get("up") or values["bandwidth"],
            down_bits_per_s=values.get("down") or values["bandwidth"],
            latency_s=values["latency"],
        )
        if calibration is not None:
            return _job_again(calibration, values, link)
        currency = _currency(values)
        price = _price(values, currency, elastic=self.elastic)
        # A model may take seconds to resolve: last, when all else is known to be right.
        shape = (
            Shape.of_size(values["parameters"], values["layers"])
            if self.model is None
            else resolve(self.model)
        )
        return Job(
            shape=shape,
            workers=values["workers"],
            compute=_compute(values, shape),
            coding=_coding(values),
            link=link,
            topology=TOPOLOGIES[self.topology or ("ring" if price is None else "star")],
            price=price,
            prices=_prices(values, currency),
            sync_every=values.get("sync_every"),
            tokens_per_step=values.get("tokens_per_step"),
            tokens=values.get("tokens"),
            added_nbytes=SEAL_NBYTES if self.sealed else 0,
        )

    def _values(self) -> dict[str, Any]:
        """What the given flags say, those that are read from text."""
        return {
            name: read_flag(name, how.parse, text)
            for name, hint in get_type_hints(type(self), include_extras=True).items()
            for how in getattr(hint, "__metadata__", ())
            if isinstance(how, _ReadBy) and (text := getattr(self, name)) is not None
        }


def values_in_force() -> dict[str, str]:
    """What holds without a flag, by the flag's name."""
    return {
        "mfu": f"{_MFU:.0%}",
        "accelerators-per-worker": "1",
        "topology": "ring; star with --egress-price",
        "put-price": "5USD",
        "get-price": "0.4USD",
        "sync-every": "each method's own",
    }


def _job_again(calibration: Calibration, values: Mapping[str, Any], link: Link) -> Job:
    from thinwire.plan.job import Job
    from thinwire.plan.link import OverTcp

    given = {"encode_time", "decode_time"} & set(values)
    return Job(
        shape=calibration.shape,
        workers=values.get("workers", calibration.workers),
        compute=calibration.compute,
        coding=_coding(values) if given else calibration.coding,
        link=link,
        topology=OverTcp(late_s=calibration.late_s),
        prices=_prices(values, _currency(values)),
        sync_every=values.get("sync_every"),
        tokens_per_step=calibration.tokens_per_step // calibration.workers,
        tokens=values.get("tokens", calibration.steps * calibration.tokens_per_step),
        added_nbytes=calibration.added_nbytes,
    )


def _currency(values: Mapping[str, Any]) -> str | None:
    """The one currency of all prices; None without a price that says one."""
    named = {flag: values[flag][1] for flag in values if flag.endswith("_price")}
    codes = {flag: code for flag, code in named.items() if code is not None}
    if len(set(codes.values())) > 1:
        said = ", ".join(f"--{flag.replace('_', '-')} in {code}" for flag, code in codes.items())
        raise ConfigurationError(
            f"add up {said}",
            because="they are in different currencies",
            do="give all prices in one of them",
        )
    return next(iter(codes.values()), None)


def _price(values: Mapping[str, Any], currency: str | None, *, elastic: bool) -> BucketPrice | None:
    from thinwire.plan.job import BucketPrice

    if "egress_price" not in values:
        return None
    given = {"put_price": "put_per_million", "get_price": "get_per_million"}
    lacking = [flag for flag in given if flag not in values]
    if lacking and currency not in (None, "USD"):
        flags = " and ".join(f"--{flag.replace('_', '-')}" for flag in lacking)
        raise ConfigurationError(
            f"plan with prices in {currency} and without {flags}",
            because="what holds without it is in USD",
            do=f"pass {flags} in {currency}, too",
        )
    more = {field: values[flag][0] for flag, field in given.items() if flag in values}
    return BucketPrice(egress_per_gb=values["egress_price"][0], elastic=elastic, **more)


def _prices(values: Mapping[str, Any], currency: str | None) -> Prices | None:
    from thinwire.plan.job import Prices

    given = {"worker_price": "worker_per_hour", "traffic_price": "traffic_per_gb"}
    found = {field: values[flag][0] for flag, field in given.items() if flag in values}
    return Prices(currency=currency or "USD", **found) if found else None


def _coding(values: Mapping[str, Any]) -> Coding:
    from thinwire.plan.compute import Coding

    return Coding(
        encode_s_per_parameter=values.get("encode_time", 0.0),
        decode_s_per_parameter=values.get("decode_time", 0.0),
    )


def _compute(values: Mapping[str, Any], shape: Shape) -> Compute:
    from thinwire.plan.compute import Compute

    if "step_time" in values:
        return Compute(step_s=values["step_time"])
    flops_per_s = values["accelerator"] * values.get("accelerators_per_worker", 1)
    return Compute.of_flops(
        shape.parameters, values["tokens_per_step"], flops_per_s, values.get("mfu", _MFU)
    )
