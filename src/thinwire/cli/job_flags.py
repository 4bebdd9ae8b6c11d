"""The flags of `thinwire plan` that say what is planned for."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeAlias, get_type_hints

import tyro

from thinwire.cli.flags import Option, Switch, arg, flag, given_in, read_flag
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
    from thinwire.plan.job import Job, Prices

_MFU: Final = 0.4

# The function in it reads the text of a flag; tyro would print its errors in another form.
_Count: TypeAlias = Annotated[str | None, parse_count, arg(metavar="COUNT")]
_Duration: TypeAlias = Annotated[str | None, parse_duration, arg(metavar="DURATION")]
_Rate: TypeAlias = Annotated[str | None, parse_rate, arg(metavar="RATE")]
_Price: TypeAlias = Annotated[str | None, parse_price, arg(metavar="PRICE")]


@dataclass(frozen=True, kw_only=True)
class JobFlags:
    """A model, how fast its workers compute, and what joins them."""

    parameters: _Count = None
    """N, such as 350M or 10B; with --layers, in place of --model."""
    layers: _Count = None
    """L: layers of the stack."""
    model: Option[str] = None
    """A built-in size (250k to 15b), a config.json or its folder, or a hub name in the cache."""
    workers: _Count = None
    """How many."""
    step_time: _Duration = None
    """Of an inner step, such as 0.8s."""
    encode_time: _Duration = None
    """Of a parameter, such as 7ns, before it is sent: benchmarks/bench.py codecs measures it."""
    decode_time: _Duration = None
    """Of a parameter in one worker's payload."""
    accelerator: Annotated[Option[str], peak_flops_per_s] = None
    """H100, MI300X, ...: works out the step's time, with --tokens-per-step."""
    mfu: Annotated[Option[str], parse_share] = None
    """Share of the accelerator's peak that training reaches; default 40%."""
    accelerators_per_worker: _Count = None
    """How many share a worker's step; default 1."""
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
    latency: Annotated[str, parse_latency, tyro.conf.arg(metavar="DURATION")] = "0"
    """One way, such as 50ms."""
    topology: Option[Literal["ring", "star"]] = None
    """How messages travel: ring over gloo, star by an object store; default ring."""
    worker_price: _Price = None
    """Of a worker with all its accelerators for an hour, such as 2.50USD."""
    traffic_price: _Price = None
    """Of a GB that a worker sends over its link, such as 0.05USD."""
    egress_price: _Price = None
    """Of a GB that is read from the store over which workers exchange, such as 0.09USD."""
    put_price: _Price = None
    """Of a million objects written there; default that of S3."""
    get_price: _Price = None
    """Of a million objects read there; default that of S3."""
    elastic: Switch = False
    """Count what workers that come and go ask the store for besides."""
    sealed: Switch = False
    """Count what sealing adds to every message: 28 bytes."""
    sync_every: _Count = None
    """H: inner steps between two exchanges; default each method's own."""
    run: Annotated[Path | None, arg(name="from")] = None
    """Folder of a finished run: the same model, workers, step and method over another link."""

    def given(self) -> set[str]:
        """Names of the flags that were given."""
        names = {name for name, value in given_in(self).items() if value is not False}
        return {"from" if name == "run" else name for name in names}

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
        from thinwire.plan.compute import Coding, Compute
        from thinwire.plan.job import Job
        from thinwire.plan.link import TOPOLOGIES, Link, OverTcp
        from thinwire.plan.models import resolve
        from thinwire.plan.shape import Shape
        from thinwire.security.sealing import SEAL_NBYTES

        values = self._values()
        asked = ("workers", "sync_every", "tokens_per_step", "tokens")
        about: dict[str, Any] = {name: values[name] for name in asked if name in values}
        about["link"] = Link(
            up_bits_per_s=values.get("up") or values["bandwidth"],
            down_bits_per_s=values.get("down") or values["bandwidth"],
            latency_s=values["latency"],
        )
        about["prices"] = _prices(values)
        if calibration is None or {"encode_time", "decode_time"} & set(values):
            about["coding"] = Coding(
                encode_s_per_parameter=values.get("encode_time", 0.0),
                decode_s_per_parameter=values.get("decode_time", 0.0),
            )
        if calibration is not None:
            of_run: dict[str, Any] = {
                "shape": calibration.shape,
                "workers": calibration.workers,
                "compute": calibration.compute,
                "coding": calibration.coding,
                "topology": OverTcp(),
                "tokens_per_step": calibration.tokens_per_step // calibration.workers,
                "tokens": calibration.steps * calibration.tokens_per_step,
                "added_nbytes": calibration.added_nbytes,
            }
            return Job(**(of_run | about))
        # A model may take seconds to resolve: last, when all else is known to be right.
        if self.model is None:
            shape = Shape.of_size(values["parameters"], values["layers"])
        else:
            shape = resolve(self.model)
        if "step_time" in values:
            compute = Compute(step_s=values["step_time"])
        else:
            flops_per_s = values["accelerator"] * values.get("accelerators_per_worker", 1)
            tokens, mfu = values["tokens_per_step"], values.get("mfu", _MFU)
            compute = Compute.of_flops(shape.parameters, tokens, flops_per_s, mfu)
        return Job(
            **about,
            shape=shape,
            compute=compute,
            topology=TOPOLOGIES[self.topology or ("star" if self.egress_price else "ring")],
            elastic=self.elastic,
            added_nbytes=SEAL_NBYTES if self.sealed else 0,
        )

    def _values(self) -> dict[str, Any]:
        """What the given flags say, those that are read from text."""
        return {
            name: read_flag(name, parse, text)
            for name, hint in get_type_hints(type(self), include_extras=True).items()
            for parse in filter(inspect.isfunction, getattr(hint, "__metadata__", ()))
            if (text := getattr(self, name)) is not None
        }


_PRICES: Final = {
    "worker_price": "worker_per_hour",
    "traffic_price": "traffic_per_gb",
    "egress_price": "egress_per_gb",
    "put_price": "put_per_million",
    "get_price": "get_per_million",
}


def _prices(values: Mapping[str, Any]) -> Prices | None:
    """All prices, which are in one currency."""
    from thinwire.plan.job import Prices

    given = {field: values[name][0] for name, field in _PRICES.items() if name in values}
    codes = {name: values[name][1] for name in _PRICES if name in values and values[name][1]}
    if len(set(codes.values())) > 1:
        said = ", ".join(f"{flag(name)} in {code}" for name, code in codes.items())
        raise ConfigurationError(
            f"add up {said}",
            because="they are in different currencies",
            do="give all prices in one of them",
        )
    currency = next(iter(codes.values()), "USD")
    flags = " and ".join(flag(name) for name in ("put_price", "get_price") if name not in values)
    if flags and "egress_price" in values and currency != "USD":
        raise ConfigurationError(
            f"plan with prices in {currency} and without {flags}",
            because="what holds without it is in USD",
            do=f"pass {flags} in {currency}, too",
        )
    return Prices(currency=currency, **given) if given else None


# -- which flags need each other, and which exclude each other -------------------------------------

_EITHER_OR: Final = {
    "model": ("parameters layers", "the model itself says how many"),
    "step_time": ("accelerator mfu accelerators_per_worker", "a measured step needs no estimate"),
    "bandwidth": ("up down", "it is the rate of both ways"),
    "from": (
        "model parameters layers accelerator tokens_per_step topology sealed egress_price",
        "the run says it",
    ),
}
_ONE_OF: Final = {
    "parameters model from": ("the plan needs a model", "--parameters 10B --layers 48"),
    "workers from": ("bytes and seconds depend on how many workers exchange", "--workers 2"),
    "step_time accelerator from": ("the plan needs the time of a step", "--step-time 0.8s"),
    "bandwidth up down": ("the plan needs the rate of the link", "--bandwidth 10Gbit/s"),
}
_NEEDS: Final = {
    "parameters": ("layers", "fragments are made of layers", "48"),
    "up": ("down", "workers receive what others send", "100Mbit/s"),
    "down": ("up", "workers send what others receive", "100Mbit/s"),
    "mfu": ("accelerator", "it is a share of a peak", "H100"),
    "accelerators_per_worker": ("accelerator", "it says how many of which accelerator", "H100"),
    "accelerator": ("tokens_per_step", "how long a step takes depends on its tokens", "64k"),
    "tokens": ("tokens_per_step", "the number of steps depends on the tokens in each", "64k"),
    "put_price": ("egress_price", "a store charges for bytes, too", "0.09USD"),
    "get_price": ("egress_price", "a store charges for bytes, too", "0.09USD"),
    "elastic": ("egress_price", "only an object store is asked for it", "0.09USD"),
}


def check_flags(given: Collection[str]) -> None:
    """Raise for flags that exclude each other, and for one that is missing.

    Args:
        given: names of the flags that were given.

    Raises:
        ConfigurationError: for the first such pair or gap.
    """
    for one, (others, because) in _EITHER_OR.items():
        for other in others.split():
            if one in given and other in given:
                raise ConfigurationError(
                    f"plan with both {flag(one)} and {flag(other)}",
                    because=because,
                    do="leave one of them out",
                )
    for wanted, (because, example) in _ONE_OF.items():
        if not set(wanted.split()) & set(given):
            names = " or ".join(map(flag, wanted.split()))
            raise ConfigurationError(
                f"plan without {names}", because=because, do=f"pass {example}, or the like"
            )
    for name, (needed, because, example) in _NEEDS.items():
        from_run = name == "tokens" and "from" in given
        if name in given and needed not in given and not from_run:
            raise ConfigurationError(
                f"plan with {flag(name)} and without {flag(needed)}",
                because=because,
                do=f"pass {flag(needed)} {example}",
            )
