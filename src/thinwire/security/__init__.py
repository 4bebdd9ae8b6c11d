"""What keeps strangers out of a run: its token, and what is derived from it."""
