"""The token of a run, and keys, seals and certificates derived from it."""
