"""The flags of `thinwire plan` that say what is planned for."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Final, Literal, final

import tyro

from thinwire.cli.flag_rules import RUN, read_flag
from thinwire.plan.accelerators import accelerator
from thinwire.plan.calibration import Calibration, calibrate
from thinwire.plan.compute import Coding, Compute
from thinwire.plan.job import Job
from thinwire.plan.link import Link
from thinwire.plan.resolve import resolve
from thinwire.plan.shape import Shape
from thinwire.plan.tcp import OverTcp
from thinwire.plan.topology import Mesh, Ring, Star, Topology, Tree
from thinwire.plan.units import (
    parse_count,
    parse_duration,
    parse_latency,
    parse_rate,
    parse_share,
)

__all__ = ["JobFlags"]

_PARSERS: Final[Mapping[str, Callable[[str], Any]]] = {
    "parameters": parse_count,
    "layers": parse_count,
    "model": str,
    "workers": parse_count,
    "step_time": parse_duration,
    "encode_time": parse_duration,
    "decode_time": parse_duration,
    "accelerator": accelerator,
    "mfu": parse_share,
    "accelerators_per_worker": parse_count,
    "tokens_per_step": parse_count,
    "tokens": parse_count,
    "bandwidth": parse_rate,
    "up": parse_rate,
    "down": parse_rate,
    "latency": parse_latency,
    "topology": str,
    "sync_every": parse_count,
}
_TOPOLOGIES: Final[Mapping[str, type[Topology]]] = {
    "ring": Ring,
    "tree": Tree,
    "star": Star,
    "mesh": Mesh,
}
_MFU: Final = 0.4


@final
@dataclass(frozen=True, kw_only=True)
class JobFlags:
    """A model, how fast its workers compute, and what joins them."""

    parameters: str | None = None
    """N, such as 350M or 10B; with --layers, in place of --model."""
    layers: str | None = None
    """L: layers of the stack."""
    model: str | None = None
    """A built-in size (250k to 15b), a config.json or its folder, or a hub name in the cache."""
    workers: str | None = None
    """K."""
    step_time: str | None = None
    """Of an inner step, such as 0.8s."""
    encode_time: str | None = None
    """Of a parameter, such as 7ns, before it is sent: thinwire bench codecs measures it."""
    decode_time: str | None = None
    """Of a parameter in one worker's payload."""
    accelerator: str | None = None
    """H100, MI300X, ...: works out the step's time, with --tokens-per-step."""
    mfu: str | None = None
    """Share of the accelerator's peak that training reaches; default 40%."""
    accelerators_per_worker: str | None = None
    """How many share a worker's step; default 1."""
    tokens_per_step: str | None = None
    """Of one worker in an inner step, such as 64k."""
    tokens: str | None = None
    """Of the whole run, such as 300B: plans its wall-clock."""
    bandwidth: str | None = None
    """Of every worker, up and down, such as 10Gbit/s."""
    up: str | None = None
    """What a worker sends at; with --down in place of --bandwidth."""
    down: str | None = None
    """What a worker receives at."""
    latency: str = "0"
    """One way, such as 50ms."""
    topology: Literal["ring", "tree", "star", "mesh"] | None = None
    """Who sends to whom; ring (default) is what thinwire does over gloo; star an object store."""
    sync_every: str | None = None
    """H of the methods that have rounds; default each one's own."""
    run: Annotated[Path | None, tyro.conf.arg(name=RUN)] = None
    """Folder of a finished run: the same model, workers, step time and method over another link."""

    def given(self) -> set[str]:
        """Names of those that say something."""
        names = {field.name for field in fields(self) if getattr(self, field.name) is not None}
        return {RUN if name == "run" else name for name in names}

    def calibration(self) -> Calibration | None:
        """What the run says, if there is one.

        Raises:
            ConfigurationError: its folder says too little; see `calibrate`.
        """
        if self.run is None:
            return None
        step_s = self._said().get("step_time")
        return calibrate(self.run, step_s=step_s)

    def job(self, calibration: Calibration | None) -> Job:
        """What they say, once it is checked that they go together.

        Raises:
            ConfigurationError: a text that cannot be read, or a model that cannot be resolved.
        """
        said = self._said()
        if calibration is not None:
            return _again(calibration, said)
        # A model may take seconds to resolve: last, when all else is known to be right.
        link, shape = _link(said), _shape(said)
        return Job(
            shape=shape,
            workers=said["workers"],
            compute=_compute(said, shape),
            coding=_coding(said),
            link=link,
            topology=_TOPOLOGIES[self.topology or "ring"](),
            sync_every=said.get("sync_every"),
            tokens_per_step=said.get("tokens_per_step"),
            tokens=said.get("tokens"),
        )

    def _said(self) -> dict[str, Any]:
        return {
            name: read_flag(name, parse, getattr(self, name))
            for name, parse in _PARSERS.items()
            if name in self.given()
        }


def _again(calibration: Calibration, said: Mapping[str, Any]) -> Job:
    return Job(
        shape=calibration.shape,
        workers=said.get("workers", calibration.workers),
        compute=calibration.compute,
        coding=_coding(said) if {"encode_time", "decode_time"} & set(said) else calibration.coding,
        link=_link(said),
        topology=OverTcp(late_s=calibration.late_s),
        sync_every=said.get("sync_every"),
        tokens_per_step=calibration.tokens_per_step // calibration.workers,
        tokens=said.get("tokens", calibration.steps * calibration.tokens_per_step),
    )


def _link(said: Mapping[str, Any]) -> Link:
    return Link(
        up_bits_per_s=said.get("up") or said["bandwidth"],
        down_bits_per_s=said.get("down") or said["bandwidth"],
        latency_s=said["latency"],
    )


def _shape(said: Mapping[str, Any]) -> Shape:
    if "model" in said:
        return resolve(said["model"])
    return Shape.of_size(said["parameters"], said["layers"])


def _coding(said: Mapping[str, Any]) -> Coding:
    return Coding(
        encode_s_per_parameter=said.get("encode_time", 0.0),
        decode_s_per_parameter=said.get("decode_time", 0.0),
    )


def _compute(said: Mapping[str, Any], shape: Shape) -> Compute:
    if "step_time" in said:
        return Compute(step_s=said["step_time"])
    flops_per_s = said["accelerator"].flops_per_s * said.get("accelerators_per_worker", 1)
    return Compute.of_flops(
        shape.parameters, said["tokens_per_step"], flops_per_s, said.get("mfu", _MFU)
    )
