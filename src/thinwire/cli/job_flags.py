"""The flags that describe a model, and which flags of `thinwire plan` need each other."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Final, TypeAlias

from thinwire.cli.flags import Option, arg, flag, reads
from thinwire.errors import check
from thinwire.plan.units import parse_count, parse_duration

if TYPE_CHECKING:
    from thinwire.plan.shape import Shape

Count: TypeAlias = Annotated[int | None, reads(parse_count, "COUNT"), arg()]
Duration: TypeAlias = Annotated[float | None, reads(parse_duration, "DURATION"), arg()]


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
"""A flag ("" for any command), others of which it needs one, why, and an example."""


def check_flags(given: Collection[str]) -> None:
    """Raise for flags that exclude each other, or for a missing flag.

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
