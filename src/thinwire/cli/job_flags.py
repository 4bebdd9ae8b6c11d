"""The flags of `thinwire plan` that describe what to plan for."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeAlias

from thinwire.cli.flags import RARE, Option, Switch, arg, flag, given_in, reads
from thinwire.errors import check
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
    from thinwire.plan.shape import Shape

_MFU: Final = 0.4


Count: TypeAlias = Annotated[int | None, reads(parse_count, "COUNT"), arg()]
Duration: TypeAlias = Annotated[float | None, reads(parse_duration, "DURATION"), arg()]
_Rate: TypeAlias = Annotated[float | None, reads(parse_rate, "RATE"), arg()]
_Price: TypeAlias = Annotated[tuple[float, str | None] | None, reads(parse_price, "PRICE"), arg()]


@dataclass(frozen=True, kw_only=True)
class ModelFlags:
    """The size of a model."""

    model: Option[str] = None
    """A built-in size (250k to 15b), a config.json or its folder, or a hub name in the cache."""
    parameters: Count = None
    """N, such as 350M or 10B; with --layers, in place of --model."""
    layers: Count = None
    """L: layers of the stack."""

    def shape(self) -> Shape | None:
        """The model's shape; None without flags."""
        from thinwire.plan.models import resolve
        from thinwire.plan.shape import Shape

        if self.model is not None:
            return resolve(self.model)
        if self.parameters and self.layers:
            return Shape.of_size(self.parameters, self.layers)
        return None


@dataclass(frozen=True, kw_only=True)
class JobFlags(ModelFlags):
    """A model, how fast its workers compute, and what joins them."""

    workers: Count = None
    """K, the number of workers."""
    sync_every: Count = None
    """H: inner steps between two exchanges; default each method's own."""
    step_time: Duration = None
    """Of an inner step, such as 0.8s."""
    accelerator: Annotated[float | None, reads(peak_flops_per_s, "NAME"), arg()] = None
    """H100, MI300X, ...: works out the step's time from --tokens-per-step."""
    mfu: Annotated[float | None, reads(parse_share, "SHARE"), arg()] = None
    """Share of the accelerator's peak that training reaches; default 40%."""
    accelerators_per_worker: Annotated[Count, RARE] = None
    """Accelerators that share a worker's step; default 1."""
    tokens_per_step: Count = None
    """Of one worker in an inner step, such as 64k."""
    tokens: Count = None
    """Of the whole run, such as 300B: plans its wall-clock."""
    bandwidth: _Rate = None
    """Of every worker, up and down, such as 10Gbit/s."""
    up: _Rate = None
    """Of what a worker sends, where it differs from --bandwidth."""
    down: _Rate = None
    """Of what a worker receives, where it differs from --bandwidth."""
    latency: Annotated[float, reads(parse_latency, "DURATION"), arg()] = 0.0
    """One way, such as 50ms; default 0."""
    topology: Option[Literal["ring", "star"]] = None
    """ring over gloo, star by an object store; default star with --egress-price, else ring."""
    elastic: Switch = False
    """Count requests with which elastic workers meet in the store."""
    sealed: Switch = False
    """Count 28 bytes a message for sealing."""
    encode_time: Annotated[Duration, RARE] = None
    """Of a parameter, such as 7ns, before it is sent: benchmarks/bench.py codecs measures it."""
    decode_time: Annotated[Duration, RARE] = None
    """Of a parameter in one worker's payload."""
    worker_price: _Price = None
    """Of a worker with all its accelerators for an hour, such as 2.50USD."""
    traffic_price: _Price = None
    """Of a GB that a worker sends over its link, such as 0.05USD."""
    egress_price: _Price = None
    """Of a GB read from the store, such as 0.09USD."""
    put_price: Annotated[_Price, RARE] = None
    """Of a million objects written there; default that of S3."""
    get_price: Annotated[_Price, RARE] = None
    """Of a million objects read there; default that of S3."""
    run: Annotated[Path | None, arg(name="from")] = None
    """Folder of a finished run: the same model, workers, step and method over another link."""

    def given(self) -> set[str]:
        """Names of the flags that were given."""
        return {"from" if name == "run" else name for name in given_in(self)}

    def calibration(self) -> Calibration | None:
        """The job of the run in --from; None without it.

        Raises:
            ConfigurationError: its folder does not say enough; see `calibrate`.
        """
        if self.run is None:
            return None
        from thinwire.plan.calibration import calibrate

        return calibrate(self.run, step_s=self.step_time)

    def job(self, calibration: Calibration | None) -> Job:
        """The job that the flags describe, once `check_flags` has passed them.

        Raises:
            ConfigurationError: values that do not fit, or a model that cannot be resolved.
        """
        check(
            self.egress_price is None or self.topology != "ring",
            "plan with --egress-price and --topology ring",
            because="it is the price of reading from an object store, which is a star",
            do="leave one of them out",
        )
        from thinwire.plan.compute import Coding, Compute
        from thinwire.plan.job import Job
        from thinwire.plan.link import TOPOLOGIES, Link, OverTcp
        from thinwire.security.sealing import SEAL_NBYTES

        given = given_in(self)
        rates: list[Any] = [self.up or self.bandwidth, self.down or self.bandwidth]
        asked = ("workers", "sync_every", "tokens_per_step", "tokens")
        job: dict[str, Any] = {name: given[name] for name in asked if name in given} | {
            "link": Link(up_bits_per_s=rates[0], down_bits_per_s=rates[1], latency_s=self.latency),
            "prices": _prices(given),
        }
        if calibration is None or self.encode_time or self.decode_time:
            job["coding"] = Coding(
                encode_s_per_parameter=self.encode_time or 0.0,
                decode_s_per_parameter=self.decode_time or 0.0,
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
            return Job(**(of_run | job))
        # A model may take seconds to resolve: last, when all else is known to be right.
        shape: Any = self.shape()
        if self.step_time is not None:
            compute = Compute(step_s=self.step_time)
        else:
            flops_per_s = (self.accelerator or 0.0) * (self.accelerators_per_worker or 1)
            tokens, mfu = self.tokens_per_step or 0, self.mfu or _MFU
            compute = Compute.of_flops(shape.parameters, tokens, flops_per_s, mfu)
        return Job(
            **job,
            shape=shape,
            compute=compute,
            topology=TOPOLOGIES[self.topology or ("star" if self.egress_price else "ring")],
            elastic=self.elastic,
            added_nbytes=SEAL_NBYTES if self.sealed else 0,
        )


_PRICES: Final = {
    "worker_price": "worker_per_hour",
    "traffic_price": "traffic_per_gb",
    "egress_price": "egress_per_gb",
    "put_price": "put_per_million",
    "get_price": "get_per_million",
}


def _prices(flags: Mapping[str, Any]) -> Prices | None:
    """All prices, which are in one currency."""
    from thinwire.plan.job import Prices

    s3 = Prices()
    of_s3 = {"put_price": (s3.put_per_million, "USD"), "get_price": (s3.get_per_million, "USD")}
    given = of_s3 if "egress_price" in flags else {}
    given = given | {name: flags[name] for name in _PRICES if name in flags}
    codes = {name: code for name, (_, code) in given.items() if code}
    check(
        len({*codes.values()}) <= 1,
        f"add up {', '.join(f'{flag(name)} in {code}' for name, code in codes.items())}",
        because="they are in different currencies",
        do="give all of these prices in one of them",
    )
    amounts: dict[str, Any] = {_PRICES[name]: amount for name, (amount, _) in given.items()}
    return Prices(currency=next(iter(codes.values()), "USD"), **amounts) if given else None


# -- which flags need each other, and which exclude each other -------------------------------------

_EXCLUDED: Final = {
    "model": ("parameters layers", "the model itself has a size"),
    "step_time": ("accelerator mfu", "a measured step needs no estimate"),
    "from": (
        "model parameters layers accelerator tokens_per_step topology sealed egress_price",
        "the run has its own",
    ),
}
_NEEDED: Final = (
    ("", "parameters model from", "the plan needs a model", "--parameters 10B --layers 48"),
    ("", "workers from", "bytes and seconds depend on the number of workers", "--workers 2"),
    ("", "step_time accelerator from", "the plan needs the time of a step", "--step-time 0.8s"),
    ("", "bandwidth up", "the plan needs the rate of the link", "--bandwidth 10Gbit/s"),
    ("up", "down bandwidth", "workers receive what others send", "--down 100Mbit/s"),
    ("down", "up bandwidth", "workers send what others receive", "--up 100Mbit/s"),
    ("parameters", "layers", "fragments are made of layers", "--layers 48"),
    ("layers", "parameters model", "layers alone have no size", "--parameters 10B"),
    ("mfu", "accelerator", "it is a share of a peak", "--accelerator H100"),
    ("accelerator", "tokens_per_step", "a step's time depends on them", "--tokens-per-step 64k"),
    ("tokens", "tokens_per_step from", "they make the number of steps", "--tokens-per-step 64k"),
    ("put_price", "egress_price", "a store charges for bytes, too", "--egress-price 0.09USD"),
    ("get_price", "egress_price", "a store charges for bytes, too", "--egress-price 0.09USD"),
    ("elastic", "egress_price", "it has an effect on prices alone", "--egress-price 0.09USD"),
)
"""With a flag (always where it is ""), one of others is needed: why, and an example."""


def check_flags(given: Collection[str]) -> None:
    """Raise for flags that exclude each other, and for one that is missing.

    Args:
        given: names of the flags that were given.

    Raises:
        ConfigurationError: for the first such pair or gap.
    """
    for one, (others, because) in _EXCLUDED.items():
        both = [other for other in others.split() if one in given and other in given]
        check(
            not both,
            f"plan with both {flag(one)} and {', '.join(map(flag, both))}",
            because=because,
            do="leave one of them out",
        )
    for name, others, because, example in _NEEDED:
        needed = others.split()
        check(
            bool(name and name not in given) or any(other in given for other in needed),
            f"plan {f'with {flag(name)} and ' if name else ''}without "
            f"{' or '.join(map(flag, needed))}",
            because=because,
            do=f"pass {example}, or the like",
        )
