"""Trainers of other libraries as workers: each module here needs the library of its name."""
