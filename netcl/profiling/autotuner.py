"""The tuner: finds the fastest configuration of a problem on a device among those that compute correct results.

A search tries candidates of the problem's family (:mod:`netcl.engine.algorithms`) and compares each result with a float64 reference.
The winner is stored per device, driver and problem class in :mod:`netcl.runtime.tuning`, where the kernel selector
finds it, also for neighboring shapes. Searches run only on request: by the functions here, by ``netcl tune``, or, with
``NETCL_AUTOTUNE``, at the first use of a shape. ``NETCL_AUTOTUNE`` has a budget of seconds per process.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from netcl.core import platforms, recording
from netcl.core.device import CPUQueue, get_active_device, profile_of, queue_of
from netcl.core.errors import DeviceError, DtypeError, KernelBuildError, OutOfMemoryError, ShapeError, message
from netcl.core.hooks import hooks
from netcl.core.kernel_selector import KernelConfig, Problem, get_kernel_selector
from netcl.core.tensor import Tensor
from netcl.core.waiting_runs import flush_waiting
from netcl.engine.algorithms import FAMILIES, Family
from netcl.ops import conv, matmul  # noqa: F401, fill the table of algorithms
from netcl.profiling import timing
from netcl.runtime import tuning
from netcl.runtime.tuning import TUNED_DTYPES, recall, store_key, with_all_flags

BUDGET = 10.0  # seconds for one problem when a caller names none
AUTOMATIC_BUDGET = 10.0  # seconds per process under NETCL_AUTOTUNE=on
SHARE = 3  # an unasked search takes at most this part of what is left
# Seconds an unasked search expects a build to take at least: it cannot be interrupted, and some drivers compile at the first launch.
LEAST_BUILD, LEAST_BUILD_AT_LAUNCH = 1.0, 3.0
FINALISTS = 3
FINAL = 0.1  # part of a budget that is kept for the finalists
SLOW_ROUND = 0.2  # seconds of a round of finalists above which one round must do when the budget is spent
LEAST_SAMPLE = 2e-3  # seconds of one sample; shorter calls are repeated
CHECKED_PRODUCTS = 1 << 28  # multiply-adds above which the reference is taken of a part of the problem
_FAILURES = (KernelBuildError, OutOfMemoryError, ShapeError, DtypeError, DeviceError, ValueError, LookupError)


@dataclass(frozen=True)
class Trial:
    """A candidate with its seconds per call, or the reason it was rejected."""

    config: KernelConfig
    seconds: float = math.inf
    rejected: str = ""


@dataclass(frozen=True)
class AutotuneResult:
    """The result of a search: ``config`` is the winner, ``policy_seconds`` the time of the untuned choice.

    ``complete`` says whether the budget sufficed for every candidate; ``stored`` whether the winner was kept for later.
    """

    problem: Problem
    config: KernelConfig
    seconds: float
    policy_seconds: float
    trials: tuple[Trial, ...]
    complete: bool
    stored: bool

    @property
    def speedup(self) -> float:
        """The speed relative to the untuned choice; 1 if that won."""
        return self.policy_seconds / self.seconds if self.seconds else 1.0

    @property
    def rejected(self) -> tuple[Trial, ...]:
        """The candidates that gave wrong results or could not run."""
        return tuple(trial for trial in self.trials if trial.rejected)


class Autotuner:
    """Searches for the fastest kernel configurations of problems on one device.

    - **queue**: a queue or a device handle; the active device without one.
    - **budget**: seconds for one problem. Candidates that would probably exceed it are skipped; the untuned choice is always tried.
    - **store**, **families**: where winners are kept, and the kernel families to try; by default those of the process.

    >>> from netcl.core.device import manager
    >>> tuner = Autotuner(manager.default("cl"), budget=0)
    >>> tuner.tune("matmul", 24, 16, 8).complete
    False
    """

    def __init__(self, queue: Any = None, budget: float = BUDGET, store: tuning.TuningStore | None = None,
                 families: Mapping[str, Family] | None = None):  # fmt: skip
        self.queue = queue_of(queue)
        if isinstance(self.queue, CPUQueue):
            platforms.opencl()
            raise DeviceError(message("autotune", "tuning requires an OpenCL device, got NumPy", "name one: netcl.device('cl')"))
        self.profile = profile_of(self.queue)
        self.budget = budget
        self.store = tuning.store if store is None else store
        self.families = FAMILIES if families is None else families
        self.costs = _Costs()

    def tune(self, op: str, *sizes: int, dtype: str = "float32", **flags: Any) -> AutotuneResult:
        """Tune a ``matmul`` of sizes ``(M, N, K)``, or a ``conv2d`` or its gradient of ``(N, C, H, W, F, KH, KW)``; returns the result."""
        if op not in self.families:
            raise ShapeError(message("autotune", "op must be one that can be tuned", f"known: {', '.join(self.families)}", op=repr(op)))
        if len(sizes) != (count := self.families[op].sizes) or min(sizes) < 1:
            raise ShapeError(message("autotune", f"{op} must have {count} sizes of at least 1", sizes=sizes))
        problem = self.families[op].problem(*sizes, profile=self.profile, dtype=dtype, **flags)
        if problem.dtype not in TUNED_DTYPES:
            raise DtypeError(message("autotune", f"dtype must be one of {', '.join(TUNED_DTYPES)}", dtype=dtype))
        found = self.search(problem)
        get_kernel_selector().clear_cache()
        return found

    def search(self, problem: Problem, budget: float | None = None) -> AutotuneResult:
        """Try the candidates of a problem, store the winner and return the result. Existing plans are not changed."""
        return self.search_all([problem], budget)[0]

    def search_all(self, problems: Sequence[Problem], budget: float | None = None) -> list[AutotuneResult]:
        """Search several problems within one budget; returns the results. Candidates are tried for all problems, which share kernels."""
        start, allowed = time.perf_counter(), self.budget if budget is None else budget
        searches, costs = [_Search(self, problem) for problem in problems], self.costs
        for rank in range(max((len(search.candidates) for search in searches), default=0)):
            for search in (search for search in searches if rank < len(search.candidates)):
                begin, config = time.perf_counter(), search.candidates[rank]
                if rank and begin - start + costs.expected(search.problem.op, config) > allowed * (1 - FINAL):
                    continue
                search.attempt(config)
                costs.note(search.problem.op, config, time.perf_counter() - begin)
        results = []
        for i, search in enumerate(searches):
            left = allowed - (time.perf_counter() - start)
            results.append(search.result(left / (len(searches) - i)))
        return results


class _Costs:
    """The expected seconds of a trial; the first trial of a configuration also compiles it."""

    def __init__(self) -> None:
        self.fresh = 0.0
        self.again: dict[tuple[str, str], float] = {}

    def expected(self, op: str, config: KernelConfig) -> float:
        return self.again.get((op, repr(config)), self.fresh)

    def note(self, op: str, config: KernelConfig, seconds: float) -> None:
        key = (op, repr(config))
        if key in self.again:
            self.again[key] = max(self.again[key], seconds)
        else:
            self.again[key], self.fresh = 0.0, max(self.fresh, seconds)


class _Search:
    """A problem, its candidates and the results of those that were tried."""

    def __init__(self, tuner: Autotuner, problem: Problem):
        self.tuner, self.problem = tuner, problem
        self.family = tuner.families[problem.op]
        earlier = tuner.store.entries(tuner.profile).get(store_key(self.family, problem), {}).get("config")
        usual, *others = self.family.configurations(problem)
        # The policy's choice, then the winner of an earlier search that ran out of time, then the others.
        self.candidates = [usual, *sorted(others, key=lambda config: not (earlier and tuning.to_json(config) == earlier))]
        self.check = ResultCheck(self.family, problem, tuner.queue)
        self.trials: list[Trial] = []

    def attempt(self, config: KernelConfig) -> None:
        """Run a candidate, check its result, time it, and append the :class:`Trial`."""
        queue, run = self.tuner.queue, partial(self.check.run, config)
        flush_waiting()  # programs of waiting runs must not fail here
        try:
            wrong = self.check.what_is_wrong(config)
            if wrong:
                self.trials.append(Trial(config, rejected=wrong))
                return
            once = timing.measure(run, repeat=1, warmup=0, queue=queue).best
            calls = max(1, min(100, int(LEAST_SAMPLE / max(once, 1e-9))))
            found = timing.measure(run, repeat=2, calls=calls, warmup=0, queue=queue).best
            self.trials.append(Trial(config, min(once, found)))
        except (*_FAILURES, platforms.opencl().Error) as error:
            self.trials.append(Trial(config, rejected=f"{type(error).__name__}: {error}"))

    def result(self, seconds_left: float) -> AutotuneResult:
        """Store the winner and return the result of the search."""
        best, policy = self._final(seconds_left)
        chosen = tuning.to_json(best.config) if best.config is not self.candidates[0] else None
        key, complete = store_key(self.family, self.problem), len(self.trials) == len(self.candidates)
        entry = {"config": chosen, "seconds": best.seconds, "complete": complete}
        entry["policy_seconds"] = policy if math.isfinite(policy) else None
        stored = math.isfinite(best.seconds) and self.tuner.store.put(self.tuner.profile, key, entry)
        return AutotuneResult(self.problem, best.config, best.seconds, policy, tuple(self.trials), complete, stored)

    def _final(self, seconds_left: float) -> tuple[Trial, float]:
        """Measure the fastest candidates again in turns, because speeds drift; returns the winner and the time of the policy's choice."""
        policy, *others = self.trials
        right = sorted((t for t in others if t.seconds < math.inf), key=lambda t: t.seconds)[:FINALISTS]
        finalists = [policy, *right] if policy.seconds < math.inf else right
        if not finalists:
            return policy, math.inf
        one_round = sum(max(t.seconds, LEAST_SAMPLE) for t in finalists)
        rounds = int(min(7, max(1 if one_round > SLOW_ROUND else 3, seconds_left / (2 * one_round))))
        calls = max(1, int(LEAST_SAMPLE / max(t.seconds for t in finalists)))
        ways = {str(i): partial(self.check.run, t.config) for i, t in enumerate(finalists)}
        again = timing.compare(repeat=rounds, calls=calls, warmup=0, queue=self.tuner.queue, **ways)
        finalists = [replace(t, seconds=again[str(i)].best) for i, t in enumerate(finalists)]
        best = min(finalists, key=lambda t: t.seconds)
        if policy.seconds == math.inf:
            return best, math.inf
        return (best if best.seconds < timing.MARGIN * finalists[0].seconds else finalists[0]), finalists[0].seconds


class ResultCheck:
    """A problem with its operands and its reference result.

    The float64 reference of a large problem would take longer than the search. Then only a part of the problem (fewer rows or images)
    is compared with a reference. The whole result is compared with the result of the first candidate that passed.
    """

    def __init__(self, family: Family, problem: Problem, queue: Any):
        self.family, self.problem = family, problem
        self.operands = family.operands(problem, queue)
        work = math.prod(problem.shape) * problem.flags.get("batches", 1)
        first = max(1, problem.shape[0] * CHECKED_PRODUCTS // max(1, work))
        part = problem if first >= problem.shape[0] else replace(problem, shape=(first, *problem.shape[1:]))
        self.part, self.part_operands = part, self.operands if part is problem else family.operands(part, queue)
        self.exact = family.reference(part, *self.part_operands)
        self.bound = family.tolerance(part, *self.part_operands)
        self.whole: np.ndarray | None = None

    def run(self, config: KernelConfig) -> Tensor:
        return self.family.run_with(config, self.problem, *self.operands)

    def what_is_wrong(self, config: KernelConfig) -> str:
        """Return why the results of a configuration are wrong; empty if they are correct."""
        result = self.family.run_with(config, self.part, *self.part_operands).to_host()
        wrong = _beyond(result, self.exact, self.bound)
        if wrong or self.part is self.problem:
            return wrong
        whole = self.run(config).to_host()
        if self.whole is None:
            self.whole = whole
        return _beyond(whole, self.whole, 2 * self.family.tolerance(self.problem, *self.operands))


def _beyond(result: np.ndarray, exact: np.ndarray, bound: float) -> str:
    error = float(np.max(np.abs(np.asarray(result, np.float64) - exact), initial=0.0)) if result.shape == exact.shape else math.inf
    return "" if error <= bound else f"wrong: off by {error:.3g}, allowed is {bound:.3g}"


def autotune_matmul(
    M: int, N: int, K: int, dtype: str = "float32", queue: Any = None, *, budget: float = BUDGET, **flags: Any
) -> KernelConfig:
    """Return the fastest correct configuration for an (M, K) x (K, N) product and store it. ``flags`` are ``trans_a``, ``batches``, ..."""
    return Autotuner(queue, budget).tune("matmul", M, N, K, dtype=dtype, **flags).config


def autotune_conv2d(N: int, C: int, H: int, W: int, F: int, KH: int, KW: int, stride: int = 1, pad: int = 0, dtype: str = "float32",
                    queue: Any = None, *, budget: float = BUDGET, part: str = "conv2d", **flags: Any) -> KernelConfig:  # fmt: skip
    """Return the fastest correct configuration for a convolution, or for the gradient that ``part`` names, and store it."""
    return Autotuner(queue, budget).tune(part, N, C, H, W, F, KH, KW, dtype=dtype, stride=stride, pad=pad, **flags).config


def autotune(function: Callable[[], Any], budget: float = 60.0, queue: Any = None,
             on_result: Callable[[AutotuneResult], None] | None = None, again: bool = False) -> list[AutotuneResult]:  # fmt: skip
    """Tune every product and convolution that ``function`` runs, for about ``budget`` seconds after its first run; returns the results.

    Problems with a complete search are left out unless ``again``; ``on_result`` is called with each result. A search that is compiling
    when the budget ends finishes that one kernel.
    """
    tuner, todo = Autotuner(queue), dict[str, list[Problem]]()
    found, start = problems_of(function, tuner.profile), time.perf_counter()  # what it compiles is not the search's time
    for problem in found:
        if again or not (recall(problem, near=False) or {}).get("complete"):
            todo.setdefault(problem.op, []).append(problem)
    results: list[AutotuneResult] = []
    for i, problems in enumerate(todo.values()):
        left = budget - (time.perf_counter() - start)
        for result in tuner.search_all(problems, left / (len(todo) - i)) if left > 0 else ():
            results.append(result)
            if on_result is not None:
                on_result(result)
    get_kernel_selector().clear_cache()
    return results


def problems_of(function: Callable[[], Any], profile: Any) -> list[Problem]:
    """Return the problems that a function runs on a device, one per class, the largest first."""
    selector, found = get_kernel_selector(), dict[str, tuple[float, Problem]]()
    usual = selector.tuned

    def note(problem: Problem) -> KernelConfig | None:
        asked = with_all_flags(problem)
        if asked is not None and _same_device(asked.profile, profile):
            work, _ = found.get(key := store_key(FAMILIES[asked.op], asked), (0.0, asked))
            found[key] = (work + math.prod(asked.shape) * asked.flags.get("batches", 1), asked)
        return usual(problem)

    selector.tuned = note
    selector.clear_cache()
    try:
        function()
    finally:
        selector.tuned = usual
        selector.clear_cache()
    return [problem for _, problem in sorted(found.values(), key=lambda pair: -pair[0])]


class _Automatic:
    """The time this process has spent on automatic searches, and the classes it has searched."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.spent = 0.0
        self.searched: set[str] = set()
        self.busy = False
        self.costs = _Costs()


_automatic = _Automatic()


def search_automatically(problem: Problem, mode: str, budget: float | None) -> None:
    """Tune a problem once, if it is for the active device and the process has budget (seconds) left; mode ``on`` skips stored problems."""
    key, handle = store_key(FAMILIES[problem.op], problem), get_active_device()
    here = handle.backend == "cl" and _same_device(handle.profile, problem.profile) and not problem.profile.has_quirk("slow")
    watched = recording.active.recorder is not None or bool(hooks.launch_observers)  # who records or profiles wants the user's launches
    least = LEAST_BUILD_AT_LAUNCH if problem.profile.has_quirk("compiles_at_launch") else LEAST_BUILD
    with _automatic.lock:
        _automatic.costs.fresh = max(_automatic.costs.fresh, least)
        left = (AUTOMATIC_BUDGET if budget is None else budget) - _automatic.spent
        if not here or watched or _automatic.busy or key in _automatic.searched or left / SHARE <= _automatic.costs.fresh:
            return
        if mode == "on" and recall(problem) is not None:
            return
        _automatic.searched.add(key)
        _automatic.busy, start = True, time.perf_counter()
        try:
            tuner = Autotuner(handle)
            tuner.costs = _automatic.costs
            tuner.search(problem, left / SHARE)
        finally:
            _automatic.busy = False
            _automatic.spent += time.perf_counter() - start


def _same_device(one: Any, other: Any) -> bool:
    return (one.platform, one.name, one.driver_version) == (other.platform, other.name, other.driver_version)
