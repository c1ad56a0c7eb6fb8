"""Kernel algorithms with wrong results on a device: found by ``netcl selftest --full``, stored on disk, never selected.

Entries belong to a device and a driver version, as measured configurations do; a new driver starts without entries.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from netcl.core import kernel_selector
from netcl.core.device import DeviceHandle
from netcl.core.errors import DeviceError, KernelBuildError, OutOfMemoryError
from netcl.core.waiting_runs import flush_waiting
from netcl.engine.algorithms import FAMILIES, answering, last_chosen
from netcl.profiling.autotuner import ResultCheck
from netcl.runtime.tuning import store, warned_of

_CONV_SIZES = (2, 8, 9, 8, 12, 3, 3)
#: An op, its sizes and flags: odd sizes, sizes that fill a tile, and sizes above the limits of the policy.
_PROBLEMS: tuple[tuple[str, tuple[int, ...], dict[str, Any]], ...] = (
    ("matmul", (9, 70, 33), {"trans_b": True}), ("matmul", (3, 256, 512), {"trans_b": True}), ("matmul", (64, 64, 96), {}),
    ("matmul", (130, 65, 256), {"trans_a": True}),
    *((op, _CONV_SIZES, {"pad": 1}) for op in ("conv2d", "conv2d_input_grad", "conv2d_weight_grad")),
    ("conv2d", (1, 16, 7, 9, 8, 1, 1), {}), ("conv2d", (1, 8, 9, 9, 8, 3, 3), {"stride": 2, "groups": 2}),
)  # fmt: skip


class VariantCheck(NamedTuple):
    """The check of an algorithm: its ``family/name``, the problem, and the error, which is empty if the result is right."""

    algorithm: str
    problem: str
    wrong: str


def _set_banned(profile: Any, banned: Mapping[str, str]) -> None:
    if store.entries(profile).get("quarantine", {}) != banned:
        store.put(profile, "quarantine", banned)
        warned_of.discard((profile.platform, profile.name))
        kernel_selector.reload_environment()  # plans and recorded steps hold the kernels of before


def check_variants(handle: DeviceHandle) -> Iterator[VariantCheck]:
    """Compare every algorithm that a device may select with its reference and yield the results; quarantine wrong algorithms at once."""
    profile = handle.profile
    flush_waiting()  # programs of waiting runs must not fail inside the checks
    _set_banned(profile, {})
    for op, sizes, flags in _PROBLEMS:
        family = FAMILIES[op]
        problem = family.problem(*sizes, profile=profile, **flags)
        check = ResultCheck(family, problem, handle.queue)
        configs = [kernel_selector.decide(problem)]  # the choice of the policy, then at least one of every algorithm
        for algorithm in answering(family.family, None, profile):
            configs += [c for c in algorithm.samples or list(algorithm.configurations(problem))[:1] if c not in configs]
        for config in configs:
            last_chosen.clear()
            try:
                wrong = check.what_is_wrong(config)
            except (KernelBuildError, DeviceError, OutOfMemoryError) as error:
                wrong = str(error).splitlines()[0]
            name = f"{family.family}/{last_chosen[family.family].name}"
            if wrong:
                _set_banned(profile, {**store.entries(profile).get("quarantine", {}), name: f"{op} {sizes}: {wrong}"})
            yield VariantCheck(name, f"{op} {sizes} {flags}", wrong)
