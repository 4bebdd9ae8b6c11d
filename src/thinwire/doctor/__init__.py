"""Checks before a run: this machine, and the store in which workers meet."""
