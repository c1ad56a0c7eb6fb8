"""The table of kernel algorithms, read by selection, the tuner, the tests and the docs.

An :class:`Algorithm` is one way to compute an op, added to :data:`ALGORITHMS` by the module beside its ``.cl`` file. Selection depends
on sizes, dtypes, the configuration, the device and settings such as the precision; kernels that drivers may reject have a probe.
A :class:`Family` is an op whose algorithms a tuner measures: the tuner takes :meth:`Family.configurations`, rejects those whose result is
further from :meth:`Family.reference` than :meth:`Family.tolerance`, and gives the fastest to the kernel selector.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from netcl.core import dtype as dtypes
from netcl.core import kernel_selector
from netcl.core.commands import device_queue
from netcl.core.device_profile import DeviceProfile
from netcl.core.errors import DeviceError, ShapeError, message, some
from netcl.core.hooks import hooks
from netcl.core.kernel_selector import KernelConfig, KernelVariant, Problem
from netcl.core.tensor import Tensor
from netcl.engine.plan import planned

# A plain sum of k products of values around one has an error of about k roundings at worst; every kernel must stay within four times that.
_ROUNDINGS = 4.0
_UNIT = {"float64": 2.0**-52, "float16": 2.0**-10, "bfloat16": 2.0**-7}
_COARSE = {"highest": 1.0, "high": 16.0, "medium": 2.0**15}


@dataclass(frozen=True)
class Algorithm:
    """An algorithm for an op family, with its kernels. ``problem`` is the family's description of a call (a product, a convolution)."""

    family: str
    name: str
    kernels: str  # .cl files
    doc: str  # what it is for
    wins: str  # the measurement that justifies it: a results file or a page of the docs, and the case; empty: not measured
    run: Callable[
        ..., Any
    ]  # run(queue, problem, config, profile, operands) launches it; attention: run(problem, profile) returns its tiles
    device: str = "any"  # "cpu", "gpu" (every other device) or "any": where it runs unless a configuration names its tier
    tiers: tuple[str, ...] = ()  # values of a configuration's extra["tier"] that select it; empty: those of its device
    variants: tuple[KernelVariant, ...] = ()  # the variants it implements; empty: all of the family
    needs: str = ""  # what else a device must have
    when: Callable[[Any, Any, Any], bool] = lambda problem, config, profile: True
    probe: Callable[[Any, Any, Any], bool] = lambda queue, problem, config: True  # whether the driver builds the kernels and they are right
    cost: Callable[[Any, Any], float] = lambda problem, profile: math.inf  # of a problem on a device, by the family's model
    configurations: Callable[[Problem], Iterable[KernelConfig]] = lambda problem: ()  # candidates of the tuner
    samples: tuple[KernelConfig, ...] = ()  # configurations that tests run on every device

    @property
    def names(self) -> tuple[str, ...]:
        """The tiers (``extra["tier"]`` of a configuration) that select this algorithm."""
        return self.tiers or {"cpu": ("cpu",), "gpu": ("simt",)}.get(self.device, ("simt", "cpu"))


#: By family, in order of preference.
ALGORITHMS: dict[str, list[Algorithm]] = {}
last_chosen: dict[str, Algorithm] = {}  # by family


def add(family: str, *columns: Any, **more: Any) -> Algorithm:
    """Append an :class:`Algorithm` with these fields to the table of its family; returns it."""
    made = Algorithm(family, *columns, **more)
    ALGORITHMS.setdefault(family, []).append(made)
    return made


def answering(family: str, config: KernelConfig | None, profile: Any) -> list[Algorithm]:
    """List the algorithms that have the variant of ``config`` and match the tier of ``config`` or, without a tier, the device's type."""
    tier, kinds = config.extra.get("tier") if config else None, ("any", "cpu" if profile.device_type == "cpu" else "gpu")
    meant = [a for a in ALGORITHMS[family] if (tier in a.names if tier else a.device in kinds)]
    return [a for a in meant if config is None or not a.variants or config.variant in a.variants]


def choose_algorithm(family: str, queue: Any, problem: Any, config: KernelConfig, profile: Any) -> Algorithm | None:
    """Return the algorithm for a problem: the one that the configuration names, else the cheapest; ``None`` if none applies.

    An algorithm that computed wrong results on this device (:mod:`netcl.profiling.quarantine`) is replaced by another of the family;
    raises if there is none.
    """
    meant, tier = answering(family, config, profile), config.extra.get("tier")
    if not meant:
        known = sorted({name for a in ALGORITHMS[family] for name in (*a.names, *(variant.name for variant in a.variants))})
        what = "the tier and the variant of a configuration must belong to the same kernel"
        raise ShapeError(message(family, what, f"known are {', '.join(known)}", variant=config.variant.name, tier=tier))
    fitting = [a for a in meant if a.when(problem, config, profile)]
    banned = hooks.upper(".runtime.tuning").quarantined(profile)
    wrong = [a.name for a in fitting if f"{family}/{a.name}" in banned] if banned else []
    if wrong:
        others = [a for a in answering(family, None, profile) if a not in fitting and a.when(problem, config, profile)]
        wrong += [a.name for a in others if f"{family}/{a.name}" in banned]
        fitting = [a for a in (*fitting, *others) if a.name not in wrong]
    if len(fitting) > 1:
        fitting.sort(key=lambda a: 0.0 if a.name == tier else a.cost(problem, profile))  # stable: the first of equals
    own = device_queue(queue)  # a probe runs its kernels, also where the op itself is only planned
    found = next((a for a in fitting if a.probe(own, problem, config)), None)
    if found is None and wrong:
        failed = f", and {some([a.name for a in fitting])} did not build or failed the probe" if fitting else ""
        what = f"no kernel of {family} can be used: {some(wrong)} computed wrong results on this device{failed}"
        raise DeviceError(message(family, what, "use another device, or a newer driver", device=profile.name))
    if found is not None:
        last_chosen[family] = found
    return found


def first(problem: Any, profile: Any) -> float:
    """Return 0, the cost of an algorithm that is preferred wherever it applies."""
    return 0.0


class Case(NamedTuple):
    """A problem to measure: operand shapes, number of products in a sum, ``run(config, *tensors)``, and reference ``exact(*arrays)``."""

    inputs: tuple[tuple[int, ...], ...]
    depth: int
    run: Callable[..., Tensor]
    exact: Callable[..., np.ndarray]


@dataclass(frozen=True)
class Family:
    """A tuned op. Problems have ``sizes`` sizes; the first ``rounded`` are rounded to powers of two, so that problems share results."""

    op: str
    family: str
    flags: dict[str, Any]
    sizes: int
    rounded: int
    case: Callable[[Problem], Case]

    def problem(self, *sizes: int, profile: DeviceProfile, dtype: str = "float32", **flags: Any) -> Problem:
        """Return a problem of this family. ``sizes`` is ``(M, N, K)`` for a product, ``(N, C, H, W, F, KH, KW)`` for a convolution."""
        chosen = {**self.flags, **{name: value for name, value in flags.items() if name in self.flags}}
        for name, value in chosen.items():
            if isinstance(value, int) and isinstance(self.flags[name], tuple):
                chosen[name] = (value, value)
        return Problem(self.op, sizes, dtypes.lookup(dtype, self.op).name, chosen, profile)

    def problem_class(self, problem: Problem) -> tuple[Any, ...]:
        """Return the key of problems that share a measurement: sizes (the first ones rounded to powers of two), dtype, flags."""
        rounded = {**problem.flags, **({"batches": _nearest_power(problem.flags["batches"])} if "batches" in problem.flags else {})}
        flags = [f"{name}={value}".replace(" ", "") for name, value in sorted(rounded.items())]
        sizes = (*map(_nearest_power, problem.shape[: self.rounded]), *problem.shape[self.rounded :])
        return (self.op, *sizes, problem.dtype, *flags)

    def configurations(self, problem: Problem) -> list[KernelConfig]:
        """Return the tuner's candidates without duplicates. The first candidate is the one that the policy tables choose."""
        found = [kernel_selector.decide(problem)]
        for algorithm in answering(self.family, None, problem.profile):
            found += [config for config in algorithm.configurations(problem) if config not in found]
        return found

    def operands(self, problem: Problem, queue: Any, seed: int = 0) -> tuple[Tensor, ...]:
        """Return operands of a problem, drawn from a normal distribution."""
        rng = np.random.default_rng(seed)
        return tuple(Tensor.from_host(queue, rng.standard_normal(s, np.float32), problem.dtype) for s in self.case(problem).inputs)

    def run_with(self, config: KernelConfig, problem: Problem, *operands: Tensor) -> Tensor:
        """Return the result computed with one configuration, without the selector; the first call compiles."""
        return planned(f"{problem.key} by {config!r}", partial(self.case(problem).run, config))(*operands)

    def reference(self, problem: Problem, *operands: Tensor) -> np.ndarray:
        """Return the result computed by NumPy in float64."""
        return self.case(problem).exact(*(np.asarray(t.to_host(), np.float64) for t in operands))

    def tolerance(self, problem: Problem, *operands: Tensor) -> float:
        """Return the allowed error of an element: four times that of a plain sum; more if precision is lower or results are rounded."""
        depth, dtype = self.case(problem).depth, problem.dtype
        sums = _ROUNDINGS * _COARSE[kernel_selector.get_matmul_precision()] * 2.0**-23 * (depth + 8)
        largest = 8.0 * math.sqrt(depth)
        return _ROUNDINGS * _UNIT[dtype] * (depth + 8) if dtype == "float64" else sums + _UNIT.get(dtype, 0.0) * largest


#: The tuned ops, by name.
FAMILIES: dict[str, Family] = {}


def _nearest_power(n: int) -> int:
    return 1 << max(0, round(math.log2(max(1, n))))
