"""`python -m thinwire`."""

import sys

from thinwire.cli import main

if __name__ == "__main__":
    sys.exit(main())
