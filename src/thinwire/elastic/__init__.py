"""Elastic runs: which workers take part, how newcomers catch up, and how requests are signed."""
