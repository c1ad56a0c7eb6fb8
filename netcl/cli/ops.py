"""``netcl ops`` and ``netcl selftest``: the op table, and its check on this machine."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from itertools import groupby

from netcl.cli.command import DEVICE, CommandError, command, option, pick_device, say, table
from netcl.core.errors import did_you_mean, message

_ESTIMATE_EVERY = 100  # checks between two estimates of the time that is left; the first estimate follows the first check


def _requested_ops(given: Sequence[str]) -> list[str]:
    """Return op names with aliases resolved to names of the op table; raises for an unknown name."""
    from netcl.ops import ALIASES, REGISTRY

    for name in given:
        if name not in REGISTRY and name not in ALIASES:
            remedy = did_you_mean(name, [*REGISTRY, *ALIASES], "`netcl ops` lists them", 1)
            raise CommandError(message("selftest", "the op must exist", remedy, op=repr(name)))
    return [ALIASES.get(name, name) for name in given]


@command(
    "selftest",
    option("ops", nargs="*", help="names of ops; all of them if none is given"),
    option("--full", action="store_true", help="first check every kernel that may be chosen on the device; wrong ones are quarantined"),
    DEVICE,
)
def selftest(args: argparse.Namespace) -> int:
    """Check the given ops, by default all, on a device of this machine; print a table."""
    from netcl import selftest as tests
    from netcl.ops import REGISTRY

    names, handle = _requested_ops(args.ops), pick_device(args.device)
    print(handle.profile.title)
    counts: Counter[str] = Counter()
    failed: list[tests.Result] = []
    total, done, spent = sum(len(list(tests.row_checks(REGISTRY[name], handle))) for name in names or REGISTRY), 0, 0.0
    for op, results in groupby(tests.results(handle, names, args.full), key=lambda result: result.op):
        states = []
        for result in results:
            states.append(result)
            if result.check != "variant":
                done, spent = done + 1, spent + result.seconds
            if done % _ESTIMATE_EVERY == 1 and done < total:
                left = spent / done * (total - done)
                say(f"-- {done} of {total} checks; about {left // 60:.0f} min {left % 60:.0f} s left", flush=True)
        counts.update(result.state for result in states)
        failed += [result for result in states if result.state in ("FAILED", "quarantined")]
        cells = "  ".join(f"{result.check} {result.state}" for result in states)
        say(f"{op:28s} {sum(result.seconds for result in states):7.2f} s  {cells}", flush=True)
    for result in failed:
        print(f"\n{result.op}, {result.check}: {result.detail}")
    quarantined = f", {counts['quarantined']} kernels quarantined" if counts["quarantined"] else ""
    print(f"\n{counts['ok']} passed, {counts['FAILED']} failed, {counts['refused']} skipped{quarantined}")
    return 1 if counts["FAILED"] else 0


@command("ops", option("filter", nargs="?", default="", help="text to find in names and documentation; default: all ops"))
def ops(args: argparse.Namespace) -> int:
    """List the op table: name, kind, gradient, autocast policy, one line of documentation."""
    from netcl.ops import ALIASES, REGISTRY

    rows = []
    for name in sorted([*REGISTRY, *ALIASES]):
        row = REGISTRY[ALIASES.get(name, name)]
        gradient = "gradient" if row.differentiable else "-"
        doc = f"same as {ALIASES[name]}" if name in ALIASES else (row.doc.splitlines() or [""])[0]
        if args.filter.lower() in f"{name} {doc}".lower():
            rows.append([name, type(row).__name__.lower(), gradient, row.amp, doc])
    if not rows:
        remedy = did_you_mean(args.filter, [*REGISTRY, *ALIASES], "`netcl ops` lists all")
        raise CommandError(message("ops", "filter must occur in an op's name or documentation", remedy, filter=repr(args.filter)))
    print(table(("name", "kind", "gradient", "amp", ""), rows))
    return 0
