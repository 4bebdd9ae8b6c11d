"""A finding, and how a check is run that may hang."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from thinwire.plan.advice import Advice
from thinwire.plan.job import Job

Status: TypeAlias = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunAdvice:
    """What to run on a link that was measured.

    Args:
        advice: methods with which workers that come and go can train.
        job: that it is for.
        model: value of --model; None: it is known by its size alone.
    """

    advice: Advice
    job: Job
    model: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """The result of a check.

    Args:
        name: of the check.
        status: `fail` if a run cannot work so.
        found: what the check saw.
        do: what to do about it; empty if nothing.
        run: what to run, if that was looked for.
    """

    name: str
    status: Status
    found: str
    do: str = ""
    run: RunAdvice | None = None


Check: TypeAlias = Callable[[], Finding]
"""Checks one thing."""


def examine(name: str, check: Check, *, limit_s: float = 5.0) -> Finding:
    """What `check` finds within `limit_s`, or a warning that it did not finish or broke.

    Args:
        name: of the check.
        check: is run in a thread.
        limit_s: a check that takes longer is abandoned.

    >>> examine("it", lambda: Finding(name="it", status="ok", found="there")).found
    'there'
    """
    answers: list[Finding] = []
    failures: list[Exception] = []

    def look() -> None:
        try:
            answers.append(check())
        except Exception as error:
            failures.append(error)

    # A look-up of a name cannot be interrupted: a daemon thread lets the process end all the same.
    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    thread.join(limit_s)
    if answers:
        return answers[0]
    if failures:
        why, do = repr(failures[0]), "report it with this line: a check should say what it sees"
    else:
        why = f"no answer within {limit_s:g} s"
        do = "run it again while the machine is idle; no answer then either: that hangs"
    return Finding(name=name, status="warn", found=f"not established: {why}", do=do)
