"""Makes idioms.json: what torch gives for the snippets of idioms.py.

Run with an interpreter that has torch 2.13.0: ``python tests/golden/make_idioms.py``. No test needs torch.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.utils import data

sys.path.insert(0, str(Path(__file__).parent))
import idioms


def fix(module: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.tensor(idioms.values(tuple(parameter.shape))))
    return module


def is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


NAMES = {
    "torch": torch, "nn": nn, "F": F, "optim": optim, "data": data, "np": np, "fix": fix, "pairs": torch.tensor,
    "a": lambda shape: torch.tensor(idioms.values(shape)), "clip_grad_norm_": nn.utils.clip_grad_norm_,
}  # fmt: skip


def plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        host = value.detach()
        return {"dtype": str(host.dtype).removeprefix("torch."), "shape": list(host.shape), "values": host.tolist()}
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    assert isinstance(value, bool | int | float | str), type(value)
    return value


def main() -> None:
    warnings.simplefilter("ignore")
    made: dict[str, Any] = {}
    for name, source in {**idioms.IN_PLACE, **idioms.IDIOMS, **idioms.EDGES}.items():
        torch.manual_seed(0)
        try:
            made[name] = {"result": idioms.run(source, NAMES, plain)}
        except (RuntimeError, ValueError, TypeError, IndexError) as fault:
            if not name.endswith(("raise", "raises")):
                raise SystemExit(f"{name}: {fault!r}") from fault
            made[name] = {"raises": type(fault).__name__}
        if name.endswith(("raise", "raises")) and "result" in made[name]:
            raise SystemExit(f"{name}: torch gives {made[name]}")
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in made.items())
    Path(__file__).with_name("idioms.json").write_text(f"{{\n{lines}\n}}\n")


if __name__ == "__main__":
    main()
