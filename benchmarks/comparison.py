"""Cases and the judgement of their times against targets."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from netcl.bench import Setting, Way, interleave, wrong_results
from netcl.core.device import DeviceHandle, device


@dataclass(frozen=True)
class Comparison:
    """Which way is held against which, and the ratio (or, without a yardstick, the seconds) it should stay below.

    Targets are given by part of a platform's name or by device type; without one the way is measured and not judged. ``gpu portable``
    is what kernels without matrix units should reach on a GPU.
    """

    ours: str = "ours"
    yardstick: str | None = "torch"
    targets: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """A named problem: ``make(setting)`` prepares its data and gives its ways by name."""

    name: str
    make: Callable[[Setting], dict[str, Way]]
    comparisons: Sequence[Comparison] = (Comparison(),)
    tolerance: float = 1e-4
    work: Mapping[str, float] = field(default_factory=dict)  # "flop" and "bytes" of one call, for rooflines
    unit: str = "s"


def measure(case: Case, where: Setting) -> list[dict[str, Any]]:
    """Check the ways of a case against each other, time them interleaved, and judge its comparisons."""
    with device(where.handle):
        ways = case.make(where)
        missing = {name: way.missing for name, way in ways.items() if way.missing}
        ready = {name: way for name, way in ways.items() if not way.missing}
        errors = wrong_results(ready, case.tolerance)
        best = interleave({name: way for name, way in ready.items() if name not in errors}, where.repeats)
    rows = []
    for pair in case.comparisons:
        wrong = [f"{n}: {missing.get(n) or errors.get(n)}" for n in (pair.ours, pair.yardstick) if n in missing or n in errors]
        rows.append(_result_row(case, pair, best, where, "; ".join(wrong)))
    gc.collect()
    return rows


def _result_row(case: Case, pair: Comparison, best: Mapping[str, float], where: Setting, skipped: str) -> dict[str, Any]:
    ours, theirs = best.get(pair.ours), best.get(pair.yardstick or "")
    ratio = None if ours is None or theirs is None else ours / theirs
    judged = ours if pair.yardstick is None else ratio
    target = _target_for(pair, where.handle)
    label = case.name if pair.ours == "ours" else f"{case.name}, {pair.ours}"
    row: dict[str, Any] = {"case": label, "yardstick": pair.yardstick, "ours_s": ours, "theirs_s": theirs, "ratio": ratio}
    row |= {"target": target, "met": None if target is None or judged is None else judged <= target}
    if where.is_gpu and "gpu portable" in pair.targets and judged is not None:
        row |= {"portable_target": pair.targets["gpu portable"], "portable_met": judged <= pair.targets["gpu portable"]}
    row |= {"all_s": dict(best)} if case.unit == "s" else {"unit": case.unit}
    if ours is not None and case.work:
        row |= {f"{name}_per_s": amount / ours for name, amount in case.work.items()}
    return {**row, "skipped": skipped} if skipped else row


def _target_for(pair: Comparison, handle: DeviceHandle) -> float | None:
    named = (limit for name, limit in pair.targets.items() if name in handle.platform_name.lower())
    return next(named, pair.targets.get(handle.device_type))
