"""``netcl bench``: a speed comparison of this machine's devices, NumPy and torch."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from netcl.cli.command import CommandError, command, option, say, table, whole
from netcl.core.errors import DeviceError, KernelBuildError, OutOfMemoryError, message

if TYPE_CHECKING:
    from netcl.bench import Setting, Way
Times = Mapping[str, float]  # seconds by device


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as fault:
        raise argparse.ArgumentTypeError(f"must be a regular expression, got {text!r}: {fault}") from fault


@command(
    "bench",
    option("--device", action="append", help="as NETCL_DEVICE; may be repeated. Default: NumPy and every device except simulators"),
    option("--cases", default=re.compile(""), type=_pattern, help="only cases whose name matches this regular expression"),
    option("--repeats", type=whole(1), default=3, help="number of rounds; the best time counts"),
    option("--threads", type=whole(1), help="threads for torch"),
)
def bench(args: argparse.Namespace) -> int:
    """Time common problems on this machine's devices, and with torch if it is installed; recommend a device for each size."""
    from netcl.bench import problems, setting
    from netcl.core.device import manager

    found = problems.groups()
    chosen = [(group, name, make) for group, makers in found.items() for name, make in makers.items() if args.cases.search(name)]
    if not chosen:
        examples = ", ".join(repr(next(iter(makers))) for makers in found.values())
        raise CommandError(message("bench", "--cases must match the name of a case", f"for instance {examples}", cases=args.cases.pattern))
    selectors = args.device or ["cpu", *(dev for _, dev in manager.discover() if not manager.profile(dev).has_quirk("slow"))]
    made = [setting(name, args.threads, args.repeats) for name in selectors]
    titles = ["NumPy" if one.handle.backend == "cpu" else one.handle.device_name for one in made]
    settings = {f"{t} ({one.handle.platform_name})" if titles.count(t) > 1 else t: one for t, one in zip(titles, made, strict=True)}
    first = next(iter(settings.values()))
    names = [*settings, *(["torch"] if first.torch else [])]
    if first.torch is None:
        say("torch is not installed: only netcl's devices are timed")
    series: dict[str, dict[str, Times]] = {}
    troubles: list[str] = []
    for group, name, make in chosen:
        series.setdefault(group, {})[name] = _times(name, make, settings, troubles)
    rows = [[name, *(_clock(times.get(n)) for n in names)] for found in series.values() for name, times in found.items()]
    print(table(("", *names), rows))
    print()
    for line in [line for group, found in series.items() for line in advice(group, found)] + troubles:
        say(line)
    return 1 if troubles else 0


def _times(case: str, make: Callable[[Setting], dict[str, Way]], settings: Mapping[str, Setting], troubles: list[str]) -> Times:
    """Return the best time in seconds of each device, eager or compiled, and of torch; add errors to the list ``troubles``."""
    from netcl.bench import interleave, wrong_results
    from netcl.core.device import device

    times: dict[str, float] = {}
    for name, where in settings.items():
        try:
            with device(where.handle):
                ways = {way: made for way, made in make(where).items() if not made.missing}
                wrong = wrong_results(ways, 2e-2 if "step" in case else 1e-4)
                best = interleave({way: made for way, made in ways.items() if way not in wrong and way != "numpy"}, where.repeats)
        except (DeviceError, KernelBuildError, OutOfMemoryError) as error:
            troubles.append(f"{case} failed on {name}: {error}")
            continue
        troubles += [f"{case} on {name}: {way}: {reason}" for way, reason in wrong.items()]
        for way, seconds in best.items():
            key = "torch" if way == "torch" else name
            times[key] = min(seconds, times.get(key, seconds))
    return times


def advice(group: str, found: Mapping[str, Times]) -> list[str]:
    """Return lines that recommend a netcl device for each problem size, and name the problems for which torch is faster.

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
    spans = [f"{name} for {' to '.join(dict.fromkeys((cases[0], cases[-1])))}" for name, cases in parts]
    line = f"{group}: {'; '.join(spans) if len(parts) > 1 else f'{parts[0][0]} for all of them'}"
    return [line, *([f"  torch is faster than all of them for {', '.join(behind)}"] if behind else [])]


def _clock(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    unit, factor = next((u, f) for u, f in (("s", 1.0), ("ms", 1e3), ("us", 1e6)) if seconds * f >= 1 or u == "us")
    return f"{seconds * factor:.3g} {unit}"
