"""Makes torch_names.json: the public functions of torch's root, the methods and properties of its Tensor, and those that write in place.

Run with an interpreter that has torch 2.13.0: ``python tests/golden/make_torch_names.py``. No test needs torch.
"""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import torch


def functions(owner: object) -> list[str]:
    """Public callables of ``owner`` that are neither classes nor modules."""
    found = {name: getattr(owner, name) for name in dir(owner) if not name.startswith("_")}
    return sorted(name for name, value in found.items() if callable(value) and not inspect.isclass(value) and not inspect.ismodule(value))


def main() -> None:
    methods = [name for name in dir(torch.Tensor) if not name.startswith("_")]
    names = {
        "functions": functions(torch),
        "methods": [name for name in methods if not name.endswith("_")],
        "in-place methods": [name for name in methods if name.endswith("_")],
    }
    lines = ",\n".join(f"{json.dumps(kind)}: {json.dumps(found)}" for kind, found in names.items())
    Path(__file__).with_name("torch_names.json").write_text(f"{{\n{lines}\n}}\n")


if __name__ == "__main__":
    main()
