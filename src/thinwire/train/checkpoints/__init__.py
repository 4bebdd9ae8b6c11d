"""Checkpoints: the files of one rank, and when a run writes and reads them."""
