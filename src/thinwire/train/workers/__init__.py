"""The workers of a run: one, several on threads, stacked, under torchrun, or elastic."""
