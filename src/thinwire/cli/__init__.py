"""The command line: parse, call, print."""

import sys

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> int:
    """Run a command; returns the exit status.

    Args:
        arguments: without the program's name; default those of this process.
    """
    try:
        # Here, because the core installs without what the commands need.
        from thinwire.cli.command import run
    except ModuleNotFoundError as error:
        from thinwire.cli.extras import install_text

        do = install_text(error)
        sys.stderr.write(f"error: cannot run thinwire; because {error}; do: {do}\n")
        return 1
    return run(arguments)
