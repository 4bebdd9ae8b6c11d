"""Where a run is: the URL of an object store, and the run's name there."""

import re
from typing import Any

from thinwire.errors import check


def check_store(where: Any) -> None:
    """Raise `ConfigurationError` for HOST:PORT, where a lighthouse of an earlier version listened.

    >>> check_store("s3://my-bucket/runs")
    """
    check(
        not isinstance(where, str) or "://" in where,
        f"meet the other workers at {str(where)[:80]!r}",
        because="there is no lighthouse from 0.3 on: workers meet in an object store",
        do="start thinwire hub on one machine, or take a bucket or a shared folder; then pass its "
        "URL, such as s3://BUCKET/PREFIX, and a name as run",
    )


def check_run_name(run: str) -> None:
    """Raise `ConfigurationError` if `run` cannot be part of the names of objects.

    >>> check_run_name("an-evening.2")
    """
    check(
        bool(re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", run)),
        f"call a run {run!r}",
        because="its name is part of the names of objects",
        do="pass up to 100 letters, digits, dots, underscores and hyphens",
    )
