"""Who takes part in an elastic run: the door, the roster, healing, and what each of them saw."""
