"""Planning: what a link allows, worked out before anybody rents a machine. Nothing is run."""
