"""What users of torch write gives what torch gives, or raises: the table of ``golden/idioms.py`` on every device."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import netcl
import netcl.autograd as ag
from netcl import data, nn, optim
from netcl.core.tensor import Tensor

GOLDEN = Path(__file__).parent / "golden"
_SPEC = importlib.util.spec_from_file_location("idioms", GOLDEN / "idioms.py")
assert _SPEC is not None and _SPEC.loader is not None
idioms = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(idioms)
EXPECTED = json.loads((GOLDEN / "idioms.json").read_text())


class Torch:
    """Functions that torch has at its root: netcl's root first, then its differentiable ops."""

    def __getattr__(self, name: str) -> Any:
        return getattr(netcl if hasattr(netcl, name) else ag, name)


def fix(module: nn.Module) -> nn.Module:
    for parameter in module.parameters():
        parameter.write(idioms.values(parameter.shape))
    return module


NAMES = {
    "torch": Torch(), "nn": nn, "F": nn.functional, "optim": optim, "data": data, "np": np, "fix": fix, "pairs": np.asarray,
    "a": lambda shape: Tensor.from_host(idioms.values(shape)), "clip_grad_norm_": optim.clip_grad_norm,
}  # fmt: skip


def plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return {"dtype": str(value.dtype), "shape": list(value.shape), "values": value.tolist()}
    return [plain(part) for part in value] if isinstance(value, list | tuple) else value


def alike(made: Any, wanted: Any, where: str = "result") -> None:
    """The same structure, dtypes, shapes and exact integers; floats as near as float32 sums in another order are."""
    if isinstance(wanted, list):
        assert isinstance(made, list) and len(made) == len(wanted), f"{where}: {made} instead of {wanted}"
        for i, pair in enumerate(zip(made, wanted, strict=True)):
            alike(*pair, f"{where}[{i}]")
    elif isinstance(wanted, dict):
        assert isinstance(made, dict), f"{where}: {made} instead of {wanted}"
        assert [made["dtype"], made["shape"]] == [wanted["dtype"], wanted["shape"]], where
        alike(made["values"], wanted["values"], where)
    elif isinstance(wanted, float):
        near = type(made) is float and math.isclose(made, wanted, rel_tol=2e-5, abs_tol=2e-6)
        assert near or (math.isnan(made) and math.isnan(wanted)), f"{where}: {made} instead of {wanted}"
    else:
        assert (type(made), made) == (type(wanted), wanted), where


def check(name: str, source: str) -> None:
    if "raises" in EXPECTED[name]:
        with pytest.raises((RuntimeError, ValueError, TypeError, IndexError), match=r"^\["):
            idioms.run(source, NAMES, plain)
    else:
        alike(idioms.run(source, NAMES, plain), EXPECTED[name]["result"])


def _rows():
    """Every row; on OpenCL devices every sixth, for most of the time is the compiler's, and the others with --full."""
    for i, name in enumerate(idioms.IDIOMS):
        yield pytest.param(name, marks=() if i % 6 == 0 else pytest.mark.matrix)


@pytest.mark.parametrize("name", list(_rows()))
def test_idiom(device, name):
    check(name, idioms.IDIOMS[name])


@pytest.mark.parametrize("name", idioms.IN_PLACE)
def test_change_in_place(device, name):
    check(name, idioms.IN_PLACE[name])


@pytest.mark.parametrize("name", idioms.EDGES)
def test_edge(device, name):
    check(name, idioms.EDGES[name])


@pytest.mark.parametrize("name", idioms.REFUSED)
def test_refused_on_purpose(device, name):
    source, error, words = idioms.REFUSED[name]
    with pytest.raises(error, match=words):
        idioms.run(f"result = {source}", NAMES, plain)


def test_golden_data_is_of_this_table():
    assert list(EXPECTED) == [*idioms.IN_PLACE, *idioms.IDIOMS, *idioms.EDGES]
