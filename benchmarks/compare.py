"""What became slower between two results files.

    python benchmarks/compare.py OLD.json NEW.json [--allowed 0.10]

Ratios to the yardstick are compared, not times: machines drift, and both sides were measured interleaved. Where a row has no
yardstick its time is compared. A loss above the allowance, a case that failed and a case that vanished end in exit code 1.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

Key = tuple[str, str | None]


def keyed(results: dict[str, Any]) -> dict[Key, dict[str, Any]]:
    return {(row["case"], row.get("yardstick")): row for row in results["rows"]}


def judged(row: dict[str, Any]) -> float | None:
    """The number that should not grow: the ratio, or the time of a row without a yardstick."""
    return row.get("ratio") if row.get("yardstick") else row.get("ours_s")


def compare(old: dict[str, Any], new: dict[str, Any], allowed: float = 0.10) -> tuple[list[str], list[str]]:
    """What was lost and what was gained, as lines."""
    lost, gained = [], []
    before, after = keyed(old), keyed(new)
    for key, row in before.items():
        then, now = judged(row), judged(after.get(key, {}))
        if then is None:
            continue
        name = key[0] + (f" against {key[1]}" if key[1] else "")
        if now is None:
            failure = after.get(key) or after.get((key[0], None)) or {}
            lost.append(f"{name}: {failure.get('error') or failure.get('skipped') or 'no longer measured'}")
        elif now > then * (1 + allowed):
            lost.append(f"{name}: {then:.4g} became {now:.4g} ({now / then - 1:+.0%})")
        elif now < then / (1 + allowed):
            gained.append(f"{name}: {then:.4g} became {now:.4g} ({now / then - 1:+.0%})")
    return lost, gained


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--allowed", type=float, default=0.10, help="loss that is taken for noise")
    options = parser.parse_args()
    old, new = (json.loads(path.read_text()) for path in (options.old, options.new))
    for name in ("device", "driver", "cpu", "threads"):
        if old["facts"].get(name) != new["facts"].get(name):
            print(f"note: {name} differs: {old['facts'].get(name)} and {new['facts'].get(name)}")
    lost, gained = compare(old, new, options.allowed)
    for line in gained:
        print("faster", line)
    for line in lost:
        print("SLOWER", line)
    print(f"{len(lost)} lost, {len(gained)} gained, of {len(old['rows'])}; commits {old['facts']['commit']} and {new['facts']['commit']}")
    raise SystemExit(1 if lost else 0)


if __name__ == "__main__":
    main()
