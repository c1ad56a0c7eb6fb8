"""Puts measured configurations into the package, for everyone with the same device.

    python tools/ship_tuning.py FILE.json ...

The files are those of the tuning store (``netcl tune`` says where they are), measured on an otherwise idle machine. Entries replace those
of the same device and problem; searches that ran out of time and local sizes of users' kernels are left out.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from netcl.runtime.tuning import FORMAT, SHIPPED  # noqa: E402


def merge(shipped: dict[str, Any], measured: dict[str, Any]) -> dict[str, Any]:
    """What is shipped, with what one file of a store holds."""
    if measured.get("format") != FORMAT:
        raise SystemExit(f"a store of format {measured.get('format')}, not {FORMAT}")
    devices = {(row["platform"], row["device"]): row for row in shipped["devices"]}
    row = devices.setdefault((measured["platform"], measured["device"]), {"platform": measured["platform"], "device": measured["device"]})
    kept = {key: {"config": e["config"], "complete": True} for key, e in measured["entries"].items() if e.get("complete")}
    row["driver"], row["entries"] = measured["driver"], {**row.get("entries", {}), **kept}
    return {"devices": [devices[key] for key in sorted(devices)]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("files", nargs="+", type=Path)
    shipped = json.loads(SHIPPED.read_text())
    for path in parser.parse_args().files:
        shipped = merge(shipped, json.loads(path.read_text()))
    SHIPPED.write_text(json.dumps(shipped, indent=1, sort_keys=True) + "\n")
    print("\n".join(f"{row['platform']} / {row['device']}: {len(row['entries'])} problems" for row in shipped["devices"]))


if __name__ == "__main__":
    main()
