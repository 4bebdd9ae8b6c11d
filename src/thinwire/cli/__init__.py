"""The command line: parse, call, print."""

from thinwire.cli.main import main

__all__ = ["main"]
