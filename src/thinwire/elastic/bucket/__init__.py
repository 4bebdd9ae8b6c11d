"""Workers that come and go, and have nothing in common but an object store."""
