"""The exception tree: every error of this package is a `ThinwireError`.

An error says three things: what cannot be done, why, and what to do about it.
"""

import math
from collections.abc import Iterable
from difflib import get_close_matches
from functools import partial


class ThinwireError(Exception):
    """Cannot do X; because Y; do Z.

    >>> str(ThinwireError("build it", because="H is 0", do="pass H >= 1"))
    'cannot build it; because H is 0; do: pass H >= 1'
    """

    def __init__(self, cannot: str, *, because: str, do: str) -> None:
        super().__init__(f"cannot {cannot}; because {because}; do: {do}")
        self.cannot = cannot
        self.because = because
        self.do = do

    def __reduce__(self) -> tuple[object, ...]:
        return partial(type(self), because=self.because, do=self.do), (self.cannot,)


class ConfigurationError(ThinwireError, ValueError):
    """A description cannot work; found when it is built, before anything runs."""


class UnknownNameError(ConfigurationError):
    """A name does not exist; perhaps it was mistyped."""


class MismatchError(ThinwireError):
    """Workers, or a checkpoint and the run that loads it, do not describe the same thing."""


class ExchangeError(ThinwireError):
    """An exchange between workers failed: a peer died, or was never there."""


class ExchangeTimeout(ExchangeError, TimeoutError):  # noqa: N818 - as in TimeoutError
    """A peer stayed silent for longer than the transport waits."""


class RoundDiscarded(ExchangeError):  # noqa: N818 - no worker did anything wrong
    """A round does not count: for example a worker joined, left or was lost. No work is lost."""


class NonFiniteError(ThinwireError, ArithmeticError):
    """A loss or a pseudo-gradient holds NaN or an infinity."""


class CheckpointError(ThinwireError):
    """A checkpoint is missing, truncated or cannot be written."""


class CorpusError(ThinwireError):
    """A corpus is empty, unreadable or unknown."""


class RunStopped(ThinwireError):  # noqa: N818 - nothing went wrong
    """A run was asked to stop before its last step, and left a checkpoint."""


class IncompleteError(ThinwireError):
    """Runs of a comparison have no result: they failed, or their folder holds another run."""


class LossyReduceScatterWarning(UserWarning):
    """A method's reduce-scatter loses much of what its codec sends."""


class SameWorkWarning(UserWarning):
    """All workers sent the same in the first round: they share the same data, or gradients."""


def unknown_name(
    cannot: str,
    name: str,
    known: Iterable[str],
    *,
    because: str | None = None,
    do: str = "pass one of these",
    kind: type[ThinwireError] = UnknownNameError,
) -> ThinwireError:
    """The error for an unknown name, which suggests the closest known one.

    Args:
        cannot: what cannot be done with it.
        name: the name as given.
        known: the names that exist.
        because: the reason; by default that only these names exist.
        do: what to do if the closest name is not meant.
        kind: class of the error.

    >>> unknown_name("use method 'dilocco'", "dilocco", ["ddp", "diloco"]).do
    "did you mean 'diloco'? otherwise pass one of these"
    """
    spelled = {each.lower(): each for each in known if each}
    close = get_close_matches(name.lower(), spelled, n=1, cutoff=0.5)
    guess = f"did you mean {spelled[close[0]]!r}? otherwise " if close else ""
    if because is None:
        because = f"there are only {', '.join(spelled.values())}"
    return kind(cannot, because=because, do=guess + do)


def check(
    ok: bool,  # noqa: FBT001 - the condition reads first
    cannot: str,
    *,
    because: str,
    do: str,
    kind: type[ThinwireError] = ConfigurationError,
) -> None:
    """Raise `kind` unless `ok`.

    >>> check(2 > 1, "compare", because="2 is small", do="pass 3")
    """
    if not ok:
        raise kind(cannot, because=because, do=do)


def check_range(
    name: str, value: float, *, least: float = 0, below: float = math.inf, most: float | None = None
) -> None:
    """Raise `ConfigurationError` unless `value` is in [least, below), or in [least, most].

    >>> check_range("momentum", 0.9, below=1)
    """
    upper, end = (below, ")") if most is None else (most, "]")
    check(
        least <= value < below if most is None else least <= value <= most,
        f"set {name} to {value}",
        because=f"it must lie in [{least:g}, {upper:g}{end}",
        do="choose a value in that interval",
    )


def check_whole(name: str, value: object, *, least: int = 1, most: float = math.inf) -> None:
    """Raise `ConfigurationError` unless `value` is an int from `least` to `most`.

    >>> check_whole("layers", 3)
    """
    check(
        # bool is an int to Python, but layers=True is a slip.
        type(value) is int and least <= value <= most,
        f"set {name} to {value!r}",
        because=f"it must be a whole number from {least}"
        + (f" to {most}" if most < math.inf else ""),
        do="choose such a number",
    )
