"""Elastic runs: which workers take part, how newcomers catch up, and how all of them connect."""
