"""The command line: parse, call, print."""

import os
import re
import sys
from importlib.metadata import requires

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> int:
    """Run a command; returns the exit status.

    Args:
        arguments: without the program's name; default those of this process.
    """
    # OpenMP reads this when torch is loaded. Without it, threads spin for milliseconds at every
    # barrier and take the cores from other workers on this machine.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    try:
        # Imported late, because the core installs without what the commands need.
        from thinwire.cli.command import run

        return run(arguments)
    except ModuleNotFoundError as error:
        sys.stderr.write(
            f"error: cannot run thinwire; because {error}; do: {install_text(error)}\n"
        )
        return 1


def install_text(error: ModuleNotFoundError) -> str:
    """The remedy for a missing module, for the end of an error message.

    >>> install_text(ModuleNotFoundError(name="jinja2.runtime"))
    "pip install 'thinwire[report]'"
    """
    package = (error.name or "").partition(".")[0]
    # Matches this package's metadata, such as: jinja2>=3.1; extra == "report"
    wanted = re.compile(rf"{package}\b.*extra == \W(?!dev|docs)(\w+)")
    extras = [found[1] for line in requires("thinwire") or () if (found := wanted.match(line))]
    if package and not extras:
        return f"pip install {package}"
    return f"pip install 'thinwire[{extras[0] if package else 'all'}]'"
