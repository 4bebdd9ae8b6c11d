"""On which terms a worker takes part in an elastic run."""

from dataclasses import asdict, dataclass
from typing import final

from thinwire.elastic.token import Token
from thinwire.errors import ConfigurationError

__all__ = ["ElasticOptions", "ElasticSettings"]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class ElasticOptions:
    """On which a worker takes part.

    Args:
        min_workers: with fewer, nobody begins a round.
        patience: share of a round for which a slow worker is waited for.
        timeout_s: for an exchange; None derives it from those measured so far.
        give_up_s: how long a lighthouse that does not answer is waited for.
        norm_limit: a pseudo-gradient longer than this many times the median is left out, where
            three or more take part.

    Raises:
        ConfigurationError: a number is not above 0.

    >>> ElasticOptions(min_workers=2).patience
    0.5
    """

    min_workers: int = 1
    patience: float = 0.5
    timeout_s: float | None = None
    give_up_s: float = 300.0
    norm_limit: float = 10.0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value is not None and not value > 0:
                raise ConfigurationError(
                    f"join an elastic run with {name}={value}",
                    because="it is a number above 0",
                    do=f"pass {name} > 0",
                )


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class ElasticSettings:
    """What `Elastic` was given; see there."""

    lighthouse: str
    token: Token
    identity: str
    host: str
    terms: ElasticOptions
