"""Which flags of `thinwire plan` need each other, and which contradict."""

from collections.abc import Callable, Collection
from typing import Final, TypeVar

from thinwire.errors import ConfigurationError

__all__ = ["RUN", "check_flags", "flag", "read_flag"]

T = TypeVar("T")

RUN: Final = "from"
"""The flag that names the folder of a run."""

_EITHER_OR: Final = (
    ("model", "parameters", "a model has as many as it has"),
    ("model", "layers", "a model has as many as it has"),
    ("step_time", "accelerator", "either says how long a step takes"),
    ("step_time", "mfu", "a measured step needs no estimate"),
    ("step_time", "accelerators_per_worker", "a measured step is that of all of them"),
    ("bandwidth", "up", "either says what a worker sends at"),
    ("bandwidth", "down", "either says what a worker receives at"),
    *((RUN, name, "the run says it") for name in ("model", "parameters", "layers")),
    *((RUN, name, "the run says it") for name in ("accelerator", "tokens_per_step")),
    (RUN, "topology", "a run over gloo goes by a ring"),
)
_ONE_OF: Final = (
    (("parameters", "model", RUN), "nobody knows what is trained", "--parameters 10B --layers 48"),
    (("workers", RUN), "nobody knows how many exchange", "--workers 2"),
    (("step_time", "accelerator", RUN), "nobody knows how fast a worker is", "--step-time 0.8s"),
    (("bandwidth", "up", "down"), "nobody knows what joins the workers", "--bandwidth 10Gbit/s"),
)
_NEEDS: Final = (
    ("parameters", "layers", "fragments are made of layers", "--layers 48"),
    ("up", "down", "what one sends another receives", "--down 100Mbit/s, or only --bandwidth"),
    ("down", "up", "what one receives another sends", "--up 100Mbit/s, or only --bandwidth"),
    ("mfu", "accelerator", "it is a share of a peak", "--accelerator H100"),
    ("accelerators_per_worker", "accelerator", "nobody knows which", "--accelerator H100"),
    (
        "accelerator",
        "tokens_per_step",
        "how long a step takes depends on its tokens",
        "--tokens-per-step 64k",
    ),
    ("out", "sweep", "only a sweep writes a page", "--sweep bandwidth"),
)


def flag(name: str) -> str:
    """As it is written on the command line.

    >>> flag("step_time")
    '--step-time'
    """
    return "--" + name.replace("_", "-")


def check_flags(given: Collection[str]) -> None:
    """Raise for flags that contradict each other, or of which one is missing.

    Args:
        given: names of the flags that were given.

    Raises:
        ConfigurationError: the first such thing.
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
            because="nobody knows how many steps they are",
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
    """What `text` says.

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
