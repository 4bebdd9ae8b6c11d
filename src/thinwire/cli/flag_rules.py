"""Which flags of `thinwire plan` need each other, and which exclude each other."""

from collections.abc import Callable, Collection
from typing import Final, TypeVar

from thinwire.errors import ConfigurationError

T = TypeVar("T")

RUN: Final = "from"
"""The flag that names the folder of a run."""

_EITHER_OR: Final = (
    ("model", "parameters", "the model itself says how many"),
    ("model", "layers", "the model itself says how many"),
    ("step_time", "accelerator", "both say how long a step takes"),
    ("step_time", "mfu", "a measured step needs no estimate"),
    ("step_time", "accelerators_per_worker", "a measured step is that of all of them"),
    ("bandwidth", "up", "both say what a worker sends at"),
    ("bandwidth", "down", "both say what a worker receives at"),
    *((RUN, name, "the run says it") for name in ("model", "parameters", "layers")),
    *((RUN, name, "the run says it") for name in ("accelerator", "tokens_per_step")),
    (RUN, "topology", "a run over gloo exchanges in a ring"),
    (RUN, "sealed", "the run says whether it was"),
    (RUN, "egress_price", "a run over gloo has no store to read from"),
)
_ONE_OF: Final = (
    (("parameters", "model", RUN), "the plan needs a model", "--parameters 10B --layers 48"),
    (("workers", RUN), "bytes and seconds depend on how many workers exchange", "--workers 2"),
    (
        ("step_time", "accelerator", RUN),
        "the plan needs the time of an inner step",
        "--step-time 0.8s",
    ),
    (
        ("bandwidth", "up", "down"),
        "the plan needs the rate of the workers' link",
        "--bandwidth 10Gbit/s",
    ),
)
_NEEDS: Final = (
    ("parameters", "layers", "fragments are made of layers", "--layers 48"),
    ("up", "down", "workers receive what others send", "--down 100Mbit/s, or only --bandwidth"),
    ("down", "up", "workers send what others receive", "--up 100Mbit/s, or only --bandwidth"),
    ("mfu", "accelerator", "it is a share of a peak", "--accelerator H100"),
    (
        "accelerators_per_worker",
        "accelerator",
        "it says how many of which accelerator",
        "--accelerator H100",
    ),
    (
        "accelerator",
        "tokens_per_step",
        "how long a step takes depends on its tokens",
        "--tokens-per-step 64k",
    ),
    ("put_price", "egress_price", "a store charges for bytes, too", "--egress-price 0.09USD"),
    ("get_price", "egress_price", "a store charges for bytes, too", "--egress-price 0.09USD"),
    ("elastic", "egress_price", "only an object store is asked for it", "--egress-price 0.09USD"),
)


def flag(name: str) -> str:
    """A flag as it is written on the command line.

    >>> flag("step_time")
    '--step-time'
    """
    return "--" + name.replace("_", "-")


def check_flags(given: Collection[str]) -> None:
    """Raise for flags that exclude each other, and for one that is missing.

    Args:
        given: names of the flags that were given.

    Raises:
        ConfigurationError: for the first such pair or gap.
    """
    for one, other, because in _EITHER_OR:
        if one in given and other in given:
            raise ConfigurationError(
                f"plan with both {flag(one)} and {flag(other)}",
                because=because,
                do="leave one of them out",
            )
    if "tokens" in given and not {"tokens_per_step", RUN} & set(given):
        raise ConfigurationError(
            "plan with --tokens and without --tokens-per-step",
            because="the number of steps depends on the tokens in each",
            do="pass --tokens-per-step 64k",
        )
    for wanted, because, example in _ONE_OF:
        if not set(wanted) & set(given):
            names = " or ".join(flag(name) for name in wanted)
            raise ConfigurationError(
                f"plan without {names}", because=because, do=f"pass {example}, or the like"
            )
    for name, needed, because, example in _NEEDS:
        if name in given and needed not in given:
            raise ConfigurationError(
                f"plan with {flag(name)} and without {flag(needed)}",
                because=because,
                do=f"pass {example}",
            )


def read_flag(name: str, parse: Callable[[str], T], text: str) -> T:
    """`text`, parsed.

    Args:
        name: of the flag that it was given to.
        parse: reads such a text.
        text: as it was written.

    Raises:
        ConfigurationError: it cannot be read, with the flag in the message.
    """
    try:
        return parse(text)
    except ConfigurationError as error:
        raise ConfigurationError(
            f"read {flag(name)} {text!r}", because=error.because, do=error.do
        ) from error
