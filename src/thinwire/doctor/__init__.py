"""Checks before a run: of this machine, and of the store where workers meet."""
