"""``python -m netcl`` is the ``netcl`` command."""

import sys


def main() -> int:
    """The ``netcl`` command; Ctrl-C while modules are loaded has status 130 too."""
    try:
        from netcl.cli import main as run

        return run()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
