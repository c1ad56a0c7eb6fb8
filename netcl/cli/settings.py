"""``netcl env`` and ``netcl cache``: the environment variables of netcl, and its cache of compiled kernels."""

from __future__ import annotations

import argparse
import sys

from netcl.cli.command import command, facts, option, table
from netcl.cli.doctor import illegal_variables
from netcl.core import env


@command("env")
def show_environment(args: argparse.Namespace) -> int:
    """Show netcl's environment variables with their values; status 1 if one is invalid."""
    rows = []
    for variable in env.VARIABLES.values():
        text = env.raw(variable.name)
        shown = variable.default or "(empty)" if text is None else f"{text or '(empty)'} (set)"
        rows.append([variable.name, shown, variable.doc])
    print(table(("variable", "value", "meaning"), rows))
    illegal = list(illegal_variables())
    for _, what in illegal:
        print(what, file=sys.stderr)
    return 1 if illegal else 0


@command("cache", option("action", choices=("info", "clear"), help="show what is kept, or remove it"))
def cache(args: argparse.Namespace) -> int:
    """Show the size of the cache of compiled kernels, or clear the cache."""
    from netcl.runtime import cache as store

    if args.action == "clear":
        print(f"removed {store.clear()} files")
    else:
        print(facts(store.info()))
    return 0
