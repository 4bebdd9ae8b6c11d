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
    # OpenMP reads it when torch is loaded. Its threads otherwise spin for milliseconds at every
    # barrier, which takes the cores from other workers of this machine.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    try:
        # Here, because the core installs without what the commands need.
        from thinwire.cli.command import run

        return run(arguments)
    except ModuleNotFoundError as error:
        sys.stderr.write(
            f"error: cannot run thinwire; because {error}; do: {install_text(error)}\n"
        )
        return 1


def install_text(error: ModuleNotFoundError) -> str:
    """What to do about a module that is missing, for the end of an error message.

    >>> install_text(ModuleNotFoundError(name="jinja2.runtime"))
    "pip install 'thinwire[report]'"
    """
    package = (error.name or "").partition(".")[0]
    # As the metadata of this package say, such as: jinja2>=3.1; extra == "report"
    wanted = re.compile(rf"{package}\b.*extra == \W(?!dev|docs)(\w+)")
    extras = [found[1] for line in requires("thinwire") or () if (found := wanted.match(line))]
    if package and not extras:
        return f"pip install {package}"
    return f"pip install 'thinwire[{extras[0] if package else 'all'}]'"
