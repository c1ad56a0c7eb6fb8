"""``python -m netcl`` is the ``netcl`` command."""

import sys


def main() -> int:
    """Run the ``netcl`` command and return its exit status; Ctrl-C while modules are imported returns 130."""
    try:
        from netcl.cli import main as run

        return run()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
