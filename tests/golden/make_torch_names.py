"""Makes torch_names.json: the public functions of torch's root, the methods and properties of its Tensor, those that write in place, the
classes of torch.nn, the functions of torch.nn.functional, the optimizers, schedules and names of ``utils.data``.

Run with an interpreter that has torch 2.13.0: ``python tests/golden/make_torch_names.py``. No test needs torch.
"""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import torch
from torch.optim import lr_scheduler
from torch.utils import data


def functions(owner: object) -> list[str]:
    """Public callables of ``owner`` that are neither classes nor modules."""
    found = {name: getattr(owner, name) for name in dir(owner) if not name.startswith("_")}
    return sorted(name for name, value in found.items() if callable(value) and not inspect.isclass(value) and not inspect.ismodule(value))


def classes(owner: object, base: type) -> list[str]:
    """Public classes of ``owner`` under ``base``."""
    found = {name: getattr(owner, name) for name in dir(owner) if not name.startswith("_")}
    return sorted(name for name, value in found.items() if inspect.isclass(value) and issubclass(value, base) and value is not base)


def main() -> None:
    methods = [name for name in dir(torch.Tensor) if not name.startswith("_")]
    names = {
        "functions": functions(torch),
        "methods": [name for name in methods if not name.endswith("_")],
        "in-place methods": [name for name in methods if name.endswith("_")],
        "optimizers": classes(torch.optim, torch.optim.Optimizer),
        "schedules": classes(lr_scheduler, lr_scheduler.LRScheduler),
        "utils.data": sorted(data.__all__),
        "layers": sorted(name for name in dir(torch.nn) if name[0].isupper() and inspect.isclass(getattr(torch.nn, name))),
        "functionals": functions(torch.nn.functional),
    }
    lines = ",\n".join(f"{json.dumps(kind)}: {json.dumps(found)}" for kind, found in names.items())
    Path(__file__).with_name("torch_names.json").write_text(f"{{\n{lines}\n}}\n")


if __name__ == "__main__":
    main()
