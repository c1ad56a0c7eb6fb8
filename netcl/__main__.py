"""``python -m netcl`` is the ``netcl`` command."""

import sys

from netcl.cli import main

if __name__ == "__main__":
    sys.exit(main())
