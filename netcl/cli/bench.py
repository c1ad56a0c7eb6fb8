"""``netcl bench``: how fast this machine's devices are, against each other, NumPy and torch."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from typing import Any

from netcl.cli.command import CommandError, command, say, table, whole
from netcl.core.errors import DeviceError, KernelBuildError, OutOfMemoryError, message

Times = Mapping[str, float]  # seconds by device


def _bench_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device", action="append", help="as NETCL_DEVICE; may be repeated. Without: NumPy and every device that is no simulator"
    )
    parser.add_argument("--cases", default=re.compile(""), type=_pattern, help="only cases whose name matches this regular expression")
    parser.add_argument("--repeats", type=whole(1), default=3, help="rounds; the best counts")
    parser.add_argument("--threads", type=whole(1), help="threads for torch")


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as fault:
        raise argparse.ArgumentTypeError(f"{text!r} is no regular expression: {fault}") from fault


@command("bench", _bench_arguments)
def bench(args: argparse.Namespace) -> int:
    """Time common problems on this machine's devices, and torch if it is there; say which device to use for which size."""
    from netcl.bench import harness

    chosen = [(group, case) for group, cases in groups().items() for case in cases if args.cases.search(case.name)]
    if not chosen:
        examples = ", ".join(repr(cases[0].name) for cases in groups().values())
        raise CommandError(message("bench", "no case has such a name", f"there are, for instance, {examples}", cases=args.cases.pattern))
    settings = _settings_by_name([harness.setting(name, args.threads, args.repeats) for name in args.device or _selectors()])
    first = next(iter(settings.values()))
    names = [*settings, *(["torch"] if first.torch else [])]
    if first.torch is None:
        say("torch is not installed: only netcl's devices are timed")
    series: dict[str, dict[str, Times]] = {}
    troubles: list[str] = []
    for group, case in chosen:
        series.setdefault(group, {})[case.name] = _times(case, settings, troubles)
    rows = [[name, *(_clock(times.get(n)) for n in names)] for found in series.values() for name, times in found.items()]
    print(table(("", *names), rows))
    print()
    for line in [line for group, found in series.items() for line in advice(group, found)] + troubles:
        say(line)
    return 1 if troubles else 0


def groups() -> dict[str, list[Any]]:
    """Cases by what they show, sizes growing."""
    from netcl.bench import problems, steps
    from netcl.bench.harness import Comparison

    both = [Comparison(), Comparison("compiled")]
    return {
        "matrix products": [problems.matmul(n, n, n) for n in (32, 128, 512, 1024)],
        "convolutions": [problems.conv(n, 32, 16, 32) for n in (1, 16, 64)],
        "elementwise chains": [problems.chain(1 << p) for p in (10, 16, 22)],
        "sums": [problems.total(1 << p) for p in (10, 16, 22)],
        "softmax": [problems.softmax(n, 512) for n in (8, 128, 2048)],
        "training an MLP": [steps.mlp_step(n, both) for n in (16, 256)],
    }


def _selectors() -> list[Any]:
    from netcl.core.device import manager

    found = [dev for _, dev in manager.discover() if not manager.profile(dev).has_quirk("slow")]
    return ["cpu", *found]


def _settings_by_name(settings: Sequence[Any]) -> dict[str, Any]:
    """Settings by the name of their device, with its platform where two have one name."""
    names = ["NumPy" if s.handle.backend == "cpu" else s.handle.device_name for s in settings]
    return {f"{n} ({s.handle.platform_name})" if names.count(n) > 1 else n: s for n, s in zip(names, settings, strict=True)}


def _times(case: Any, settings: Mapping[str, Any], troubles: list[str]) -> Times:
    """The best of our ways on each device (eager or compiled), and torch's best over all runs; what went wrong goes to ``troubles``."""
    from netcl.bench.harness import measure

    times: dict[str, float] = {}
    for name, where in settings.items():
        try:
            rows = measure(case, where)
        except (DeviceError, KernelBuildError, OutOfMemoryError) as error:
            troubles.append(f"{case.name} failed on {name}: {error}")
            continue
        for row in rows:
            if "differs" in row.get("skipped", ""):
                troubles.append(f"{case.name} on {name}: {row['skipped']}")
            if row["ours_s"] is not None:
                times[name] = min(row["ours_s"], times.get(name, row["ours_s"]))
            if row["theirs_s"] is not None and row["yardstick"] == "torch":
                times["torch"] = min(row["theirs_s"], times.get("torch", row["theirs_s"]))
    return times


def advice(group: str, found: Mapping[str, Times]) -> list[str]:
    """Which device of ours to use from which size on, and where torch is faster than all of them.

    >>> advice("sums", {"sum 1k": {"NumPy": 1.0, "GPU": 5.0}, "sum 1M": {"NumPy": 9.0, "GPU": 6.0, "torch": 3.0}})
    ['sums: NumPy for sum 1k; GPU for sum 1M', '  torch is faster than all of them for sum 1M (2.0 times)']
    """
    parts: list[tuple[str, list[str]]] = []
    behind = []
    for case, times in found.items():
        ours = {name: seconds for name, seconds in times.items() if name != "torch"}
        if not ours:
            continue
        best = min(ours, key=lambda name: ours[name])
        if not parts or parts[-1][0] != best:
            parts.append((best, []))
        parts[-1][1].append(case)
        if times.get("torch", ours[best]) < 0.95 * ours[best]:
            behind.append(f"{case} ({ours[best] / times['torch']:.1f} times)")
    if not parts:
        return []
    spans = [f"{parts[0][0]} for all of them"] if len(parts) == 1 else [f"{name} for {_case_span(cases)}" for name, cases in parts]
    line = f"{group}: {'; '.join(spans)}"
    return [line, *([f"  torch is faster than all of them for {', '.join(behind)}"] if behind else [])]


def _case_span(cases: Sequence[str]) -> str:
    return cases[0] if len(cases) == 1 else f"{cases[0]} to {cases[-1]}"


def _clock(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    unit, factor = next((u, f) for u, f in (("s", 1.0), ("ms", 1e3), ("us", 1e6)) if seconds * f >= 1 or u == "us")
    return f"{seconds * factor:.3g} {unit}"
