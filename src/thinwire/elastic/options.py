"""How long an elastic worker waits, and for how many."""

from dataclasses import asdict, dataclass

from thinwire.errors import ConfigurationError
from thinwire.security.token import Token


@dataclass(frozen=True, kw_only=True, slots=True)
class ElasticOptions:
    """How long a worker waits for others, and with how many it goes on.

    Args:
        min_workers: with fewer, no round begins.
        patience: share of a round for which a slow worker is waited for.
        timeout_s: for an exchange; None derives it from those measured so far.
        give_up_s: how long a lighthouse that does not answer is waited for.

    Raises:
        ConfigurationError: a number is not above 0.

    >>> ElasticOptions(min_workers=2).patience
    0.5
    """

    min_workers: int = 1
    patience: float = 0.5
    timeout_s: float | None = None
    give_up_s: float = 300.0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value is not None and not value > 0:
                raise ConfigurationError(
                    f"join an elastic run with {name}={value}",
                    because="it must be above 0",
                    do=f"pass {name} > 0",
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class ElasticSettings:
    """What `Elastic` was given; see there."""

    lighthouse: str
    token: Token
    identity: str
    host: str
    options: ElasticOptions
