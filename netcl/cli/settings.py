"""``netcl env`` and ``netcl cache``: the environment variables of netcl, and its cache of compiled kernels."""

from __future__ import annotations

import argparse
import sys

from netcl.cli.command import command, facts, option, table
from netcl.core import env
from netcl.core.errors import EnvironmentVariableError


@command("env")
def show_environment(args: argparse.Namespace) -> int:
    """Show netcl's environment variables with their values; status 1 if one is invalid."""
    rows, errors = [], list[str]()
    for variable in env.VARIABLES.values():
        text = env.raw(variable.name)
        try:
            env.value(variable.name)
        except EnvironmentVariableError as error:
            errors.append(str(error))
        shown = variable.default or "(empty)" if text is None else f"{text or '(empty)'} (set)"
        rows.append([variable.name, shown, variable.doc])
    print(table(("variable", "value", "meaning"), rows))
    for text in errors:
        print(text, file=sys.stderr)
    return 1 if errors else 0


@command("cache", option("action", choices=("info", "clear"), help="show what is kept, or remove it"))
def cache(args: argparse.Namespace) -> int:
    """Show the size of the cache of compiled kernels, or clear the cache."""
    from netcl.runtime import cache as store

    if args.action == "clear":
        print(f"removed {store.clear()} files")
    else:
        print(facts(store.info()))
    return 0
