"""Workers that come and go: who takes part, how a newcomer catches up, and how it is signed."""
