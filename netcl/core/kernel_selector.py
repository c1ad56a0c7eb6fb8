"""Selects the kernel variant for a problem on a device.

The order is: kernels that the program registered, measured configurations (:attr:`KernelSelector.measured`, then the tuning store of the
device), the policy tables below. The plan of a call stores the selected kernel.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from typing import Any

from netcl.core import dtype as dtypes
from netcl.core import env
from netcl.core.capabilities import DeviceProfile, kernel_strategy
from netcl.core.device import get_active_device
from netcl.core.errors import ShapeError, message
from netcl.core.hooks import hooks
from netcl.core.kernels import program


class KernelVariant(Enum):
    """The kernel variants that :class:`KernelSelector` can choose."""

    MATMUL_NAIVE = "matmul_naive"
    MATMUL_TILED = "matmul_tiled"
    MATMUL_REGISTER_TILED = "matmul_register_tiled"
    MATMUL_VECTORIZED = "matmul_vectorized"
    CONV2D_NAIVE = "conv2d_naive"
    CONV2D_IM2COL = "conv2d_im2col"
    CONV2D_IMPLICIT_GEMM = "conv2d_implicit_gemm"
    CONV2D_TILED_LOCAL = "conv2d_tiled_local"
    CONV2D_WINOGRAD = "conv2d_winograd"
    ELEMENTWISE_SCALAR = "elementwise_scalar"
    ELEMENTWISE_VECTORIZED = "elementwise_vectorized"
    REDUCTION_SEQUENTIAL = "reduction_sequential"
    REDUCTION_PARALLEL = "reduction_parallel"
    REDUCTION_WORKGROUP = "reduction_workgroup"
    BATCHNORM_NAIVE = "batchnorm_naive"
    BATCHNORM_FUSED = "batchnorm_fused"


@dataclass
class KernelConfig:
    """A variant with its tile and launch parameters. Instances are shared: copy with ``dataclasses.replace`` before changing one.

    ``use_local_memory=False`` selects kernels without local memory, ``use_vectorization=False`` kernels with scalar loads.
    ``local_size_1d`` is the local size of kernels with one work-item per element, and the number of work-items that share a reduction.
    """

    variant: KernelVariant
    tile_m: int = 32
    tile_n: int = 32
    tile_k: int = 8
    work_per_thread: int = 4
    local_size_1d: int = 256
    local_size_2d: tuple[int, int] = (16, 16)
    use_local_memory: bool = True
    use_vectorization: bool = True
    vector_width: int = 4
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Problem:
    """The input of a selection: an op with its sizes, dtype and flags, on a device."""

    op: str
    shape: tuple[int, ...]
    dtype: str
    flags: Mapping[str, Any]
    profile: DeviceProfile

    @property
    def is_cpu(self) -> bool:
        return self.profile.device_type == "cpu"

    @property
    def key(self) -> tuple[Hashable, ...]:
        """The key under which measurements are stored: op, shape, dtype and flags."""
        return (self.op, self.shape, self.dtype, tuple(sorted(self.flags.items())))


@dataclass(frozen=True)
class PolicyRule:
    """An entry of the policy tables: if ``when`` holds, use ``variant`` with the fields in ``change``. The first matching rule applies."""

    variant: KernelVariant
    when: Callable[[Problem], bool]
    change: Mapping[str, Any] = field(default_factory=dict)
    why: str = ""


V = KernelVariant
TINY_MATMUL = 16**3  # multiply-adds
LARGE_MATMUL = 512**3
ELEMENTWISE_SCALAR_LIMIT = 1024  # elements
REDUCTION_SEQUENTIAL_LIMIT = 256
REDUCTION_PARALLEL_LIMIT = 64 * 1024
SMALL_CONV_OUTPUT = 16 * 16  # pixels
PRECISIONS = ("highest", "high", "medium")
_precision = "highest"
SCALAR = {"use_local_memory": False, "use_vectorization": False, "vector_width": 1}
WAVE = {"local_size_1d": 64}  # where the variant has one work-item per result: small problems still spread over a device


def _work(p: Problem) -> int:
    return math.prod(p.shape)


def _suits_winograd(p: Problem) -> bool:
    plain = p.flags["stride"] == (1, 1) and p.flags["dilation"] == (1, 1) and p.flags["groups"] == 1
    return plain and p.shape[5:7] == (3, 3) and env.value("NETCL_CONV_WINOGRAD")


def _suits_tiled_local(p: Problem) -> bool:
    axes = zip(p.shape[2:4], p.shape[5:7], p.flags["pad"], p.flags["stride"], p.flags["dilation"], strict=True)
    outputs = [(n + 2 * pad - dilation * (k - 1) - 1) // stride + 1 for n, k, pad, stride, dilation in axes]
    return env.value("NETCL_CONV_TILED_LOCAL") and math.prod(outputs) <= SMALL_CONV_OUTPUT


def _takes_eight_lanes(p: Problem) -> bool:
    """Whether to load eight lanes: elements have at most two bytes, or the device's native vectors have eight floats."""
    return dtypes.DTYPES[p.dtype].itemsize <= 2 or p.profile.vector_width >= 8


def _always(p: Problem) -> bool:
    return True


RULES: dict[str, tuple[PolicyRule, ...]] = {
    "matmul": (
        PolicyRule(V.MATMUL_NAIVE, lambda p: _work(p) <= TINY_MATMUL, {**SCALAR, **WAVE, "work_per_thread": 1}, "smaller than a tile"),
        PolicyRule(V.MATMUL_TILED, lambda p: _work(p) < LARGE_MATMUL, {"tile_k": 16, "work_per_thread": 2}, "small and medium"),
        PolicyRule(V.MATMUL_REGISTER_TILED, _always, {"tile_m": 64, "tile_n": 64, "tile_k": 16}, "large"),
    ),
    "conv2d": (
        PolicyRule(V.CONV2D_IM2COL, lambda p: p.is_cpu, WAVE, "CPUs: one matmul over unfolded patches"),
        PolicyRule(V.CONV2D_IMPLICIT_GEMM, lambda p: p.shape[5:7] == (1, 1), {**WAVE, "tile_k": 16}, "1x1 is a matmul already"),
        PolicyRule(V.CONV2D_TILED_LOCAL, _suits_tiled_local, WAVE, "small outputs, if NETCL_CONV_TILED_LOCAL allows it"),
        PolicyRule(V.CONV2D_WINOGRAD, _suits_winograd, WAVE, "3x3 stride 1, unless NETCL_CONV_WINOGRAD forbids it"),
        PolicyRule(V.CONV2D_IMPLICIT_GEMM, _always, {**WAVE, "tile_k": 16}, "everything else"),
    ),
    "elementwise": (
        PolicyRule(V.ELEMENTWISE_SCALAR, lambda p: _work(p) <= ELEMENTWISE_SCALAR_LIMIT, SCALAR, "few elements"),
        PolicyRule(V.ELEMENTWISE_VECTORIZED, _takes_eight_lanes, {"use_local_memory": False, "vector_width": 8}, "wide loads"),
        PolicyRule(V.ELEMENTWISE_VECTORIZED, _always, {"use_local_memory": False, "vector_width": 4}, "128-bit loads"),
    ),
    "reduction": (
        PolicyRule(
            V.REDUCTION_SEQUENTIAL, lambda p: _work(p) < REDUCTION_SEQUENTIAL_LIMIT, {**WAVE, "use_local_memory": False}, "one work-item"
        ),
        PolicyRule(V.REDUCTION_PARALLEL, lambda p: _work(p) < REDUCTION_PARALLEL_LIMIT, {}, "one work-group"),
        PolicyRule(V.REDUCTION_WORKGROUP, _always, {}, "many work-groups, then their partial results"),
    ),
    "batchnorm": (
        PolicyRule(V.BATCHNORM_FUSED, lambda p: p.flags["fuse_relu"] and not p.flags["training"], {}, "inference with ReLU: one pass"),
        PolicyRule(V.BATCHNORM_NAIVE, _always, {}, "statistics first"),
    ),
}

# Fields that differ on CPUs for every rule: a work-item takes a chunk of its own.
ON_CPU: dict[str, Mapping[str, Any]] = {"elementwise": WAVE, "reduction": {**WAVE, "use_local_memory": False}}
_WIDE_TILES = {"tile_m": 128, "tile_n": 128, "tile_k": 16, "work_per_thread": 8}
_WIDE_PIXELS = {"tile_m": 64, "tile_n": 128, "tile_k": 8, "work_per_thread": 8}
_RECENT = ("ampere", "ada", "hopper", "blackwell")
#: Brand, families, variant, and the fields that differ on those devices; the last match wins.
VENDORS: tuple[tuple[str, tuple[str, ...], KernelVariant, Mapping[str, Any]], ...] = (
    *(("nvidia", _RECENT, variant, _WIDE_PIXELS) for variant in (V.CONV2D_IMPLICIT_GEMM, V.CONV2D_WINOGRAD)),
    ("nvidia", _RECENT, V.MATMUL_REGISTER_TILED, _WIDE_TILES),
    ("nvidia", _RECENT, V.MATMUL_TILED, {"tile_k": 32, "work_per_thread": 4}),
    ("nvidia", ("turing",), V.MATMUL_REGISTER_TILED, {"tile_m": 128, "tile_n": 64, "tile_k": 8, "work_per_thread": 8}),
    ("amd", ("rdna2", "rdna3"), V.MATMUL_REGISTER_TILED, {"tile_n": 128, "work_per_thread": 8, "extra": {"wave": 32}}),
    ("amd", ("rdna2", "rdna3"), V.MATMUL_TILED, {"tile_k": 32, "extra": {"wave": 32}}),
)

# Gradients are measured separately from their op; kernels registered for the op also apply to them, unless they are registered themselves.
GRADIENTS = {"conv2d_input_grad": "conv2d", "conv2d_weight_grad": "conv2d"}
RULES |= {gradient: RULES[op] for gradient, op in GRADIENTS.items()}
TUNABLE = frozenset(("matmul", "conv2d", *GRADIENTS))  # ops whose kernels offer a tuner more than one configuration


def fit(config: KernelConfig, profile: DeviceProfile, itemsize: int) -> KernelConfig:
    """Reduce a configuration until its work-group and tiles fit the device; returns it unchanged if they already fit."""
    limit = profile.max_work_group_size
    size_2d = config.local_size_2d
    while math.prod(size_2d) > limit and max(size_2d) > 1:
        size_2d = (size_2d[0] // 2, size_2d[1]) if size_2d[0] >= size_2d[1] else (size_2d[0], size_2d[1] // 2)
    m, n, k = config.tile_m, config.tile_n, config.tile_k
    while config.use_local_memory and (m + n) * k * itemsize > profile.local_mem_size and max(m, n, k) > 1:
        if k > 8 or max(m, n) == 1:
            k //= 2
        else:
            m, n = max(1, m // 2), max(1, n // 2)
    fitted: dict[str, Any] = {"local_size_1d": min(config.local_size_1d, limit), "local_size_2d": size_2d}
    fitted |= {"tile_m": m, "tile_n": n, "tile_k": k}
    return config if {**vars(config), **fitted} == vars(config) else replace(config, **fitted)


def decide(problem: Problem) -> KernelConfig:
    """Return the configuration of the first matching rule, reduced to fit the device. Optimized kernels also get vendor changes."""
    for rule in RULES[problem.op]:
        if rule.when(problem):
            break
    change = {**rule.change, **(ON_CPU.get(problem.op, {}) if problem.is_cpu else {})}
    for brand, families, variant, fields in VENDORS:
        if variant is rule.variant and brand == problem.profile.brand and problem.profile.family in families:
            change.update(fields if kernel_strategy(problem.profile) == "optimized" else {})
    change["extra"] = {"why": rule.why, **change.get("extra", {})}
    return fit(KernelConfig(rule.variant, **change), problem.profile, dtypes.DTYPES[problem.dtype].itemsize)


def is_named(config: KernelConfig) -> bool:
    """Whether a configuration was registered or measured rather than decided by the policy tables."""
    return "why" not in config.extra


def _two(value: int | Sequence[int]) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (int(value[0]), int(value[1]))


class KernelSelector:
    """Chooses kernels for the device that ``profile`` describes; without a profile, for the active device.

    >>> from netcl.core.kernel_selector import KernelSelector
    >>> KernelSelector().select_elementwise_kernel(4096).variant.name
    'ELEMENTWISE_VECTORIZED'
    """

    def __init__(self, profile: DeviceProfile | None = None):
        self.profile = profile
        self.revision = 0  # incremented when a selection may have changed: older plans are then invalid
        self.named = 0  # incremented with every kernel that is measured or registered: recordings depend on it
        self._measured: Callable[[str, tuple[Hashable, ...]], KernelConfig | None] | None = None
        self.tuned: Callable[[Problem], KernelConfig | None] = lambda problem: None  # the lookup of the tuning store, after ``measured``
        self._registered: dict[str, list[tuple[Callable[[Any, DeviceProfile], bool], Any]]] = {}

    @property
    def measured(self) -> Callable[[str, tuple[Hashable, ...]], KernelConfig | None] | None:
        """A function set by the program: ``measured(op, (op, shape, dtype, flags))`` returns the configuration to use, or ``None``."""
        return self._measured

    @measured.setter
    def measured(self, lookup: Callable[[str, tuple[Hashable, ...]], KernelConfig | None] | None) -> None:
        self._measured = lookup
        self.named += 1
        self.clear_cache()

    def select_matmul_kernel(self, M: int, N: int, K: int, dtype: str = "float32", **flags: Hashable) -> KernelConfig:
        """Select, by default, naive for tiny problems, tiled for small and medium, register-tiled for large; tiles depend on the vendor."""
        return self._answer("matmul", (M, N, K), dtype, flags, shapes=((M, K), (K, N)))

    def select_conv2d_kernel(
        self, N: int, C: int, H: int, W: int, F: int, KH: int, KW: int, stride: int | Sequence[int] = 1, pad: int | Sequence[int] = 0,
        dtype: str = "float32", dilation: int | Sequence[int] = 1, groups: int = 1,
    ) -> KernelConfig:  # fmt: skip
        """Select, by default, im2col on CPUs; elsewhere Winograd for 3x3 (stride, dilation and groups 1) and implicit GEMM for the rest."""
        flags = {"stride": _two(stride), "pad": _two(pad), "dilation": _two(dilation), "groups": groups}
        return self._answer("conv2d", (N, C, H, W, F, KH, KW), dtype, flags, shapes=((N, C, H, W), (F, C // groups, KH, KW)))

    def select_elementwise_kernel(self, n: int, dtype: str = "float32") -> KernelConfig:
        """Select, by default, scalar loads for up to 1024 elements, vector loads of width 4 or 8 for more."""
        return self._answer("elementwise", (n,), dtype, {}, shapes=((n,),))

    def select_reduction_kernel(self, n: int, kind: str = "sum", dtype: str = "float32") -> KernelConfig:
        """Select, by default, a sequential reduction below 256 elements, a parallel one below 64 K, two stages of work-groups above."""
        return self._answer("reduction", (n,), dtype, {"kind": kind}, shapes=((n,),))

    def select_batchnorm_kernel(
        self, N: int, C: int, H: int = 1, W: int = 1, dtype: str = "float32", training: bool = True, fuse_relu: bool = False
    ) -> KernelConfig:
        """Select the fused kernel of ``ops.batch_norm(fuse_relu=True)`` for inference with ``fuse_relu``, else the naive kernels."""
        return self._answer("batchnorm", (N, C, H, W), dtype, {"training": training, "fuse_relu": fuse_relu}, shapes=((N, C, H, W),))

    def register(self, op: str, condition: Callable[[Any, DeviceProfile], bool], kernel: Any) -> None:
        """Use ``kernel`` for ``op`` if ``condition(shapes, profile)`` holds; later registrations take precedence.

        For ops with a policy, ``kernel`` must be a :class:`KernelConfig` or a :class:`KernelVariant`. For an op of your own, it may
        be any object.
        """
        if op in RULES and not isinstance(kernel, (KernelConfig, KernelVariant)):
            raise TypeError(message("register", f"a kernel for {op} must be a KernelConfig or a KernelVariant", kernel=repr(kernel)))
        chosen = KernelConfig(kernel) if isinstance(kernel, KernelVariant) else kernel
        self._registered.setdefault(op, []).insert(0, (condition, chosen))
        self.named += 1
        self.clear_cache()

    def select(self, op: str, shapes: Sequence[Sequence[int]], profile: DeviceProfile | None = None, dtype: str = "float32") -> Any:
        """Return the kernel for ``op`` on operands of ``shapes``; ``None`` if it has neither a policy nor a matching registered kernel."""
        shapes = tuple(tuple(shape) for shape in shapes)
        if op not in RULES:
            return self._find_registered(op, shapes, self._profile(profile))
        if op not in _FROM_SHAPES:
            raise ShapeError(message("select", f"{op} requires more than operand shapes", f"use select_{op}_kernel", shapes=shapes))
        try:
            shape, flags = _FROM_SHAPES[op](shapes)
        except (ValueError, IndexError):
            forms = {"matmul": "(..., M, K), (..., K, N)", "elementwise": "at least one", "reduction": "at least one"}
            form = forms.get(op, "(N, C, H, W), (F, C / groups, KH, KW), then optionally stride, padding and dilation")
            raise ShapeError(message("select", f"shapes must be the shapes of the operands of {op}: {form}", shapes=shapes)) from None
        return self._answer(op, shape, dtype, flags, shapes, profile)

    def clear_cache(self) -> None:
        """Drop all plans, so that kernels are selected again; measured and registered kernels stay."""
        self.revision += 1  # in the keys of plans
        program.forget("plans")

    def _profile(self, profile: DeviceProfile | None) -> DeviceProfile:
        return profile or self.profile or get_active_device().profile

    def _find_registered(self, op: str, shapes: Any, profile: DeviceProfile) -> Any:
        return next((kernel for condition, kernel in self._registered.get(op, ()) if condition(shapes, profile)), None)

    def _answer(
        self, op: str, shape: tuple[int, ...], dtype: str, flags: Mapping[str, Any], shapes: Any, profile: DeviceProfile | None = None
    ) -> KernelConfig:
        if min(shape, default=0) < 0:
            raise ShapeError(message(f"select_{op}_kernel", "sizes must not be negative", shape=shape))
        return self.choose(Problem(op, shape, dtypes.lookup(dtype).name, flags, self._profile(profile)), shapes)

    def choose(self, problem: Problem, shapes: Any) -> KernelConfig:
        """Return the configuration for a problem; ``shapes`` (of the operands) are passed to the conditions of registered kernels."""
        op, device = problem.op, problem.profile
        explicit = self._find_registered(op, shapes, device) if self._registered else None
        if explicit is None and self._measured is not None:
            explicit = self._measured(op, problem.key)
        if explicit is None and op in TUNABLE:
            explicit = self.tuned(problem)
        if explicit is None and op in GRADIENTS and self._registered:
            explicit = self._find_registered(GRADIENTS[op], shapes, device)
        return decide(problem) if explicit is None else explicit


def _matmul_shapes(shapes: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], dict[str, Any]]:
    a, b = shapes
    if a[-1] != b[-2]:
        raise ValueError
    return (math.prod(a[:-1]), b[-1], a[-1]), {}


def _conv_shapes(shapes: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], dict[str, Any]]:
    (n, c, h, w), (f, per_group, kh, kw), *rest = shapes
    defaults = {"stride": (1, 1), "pad": (0, 0), "dilation": (1, 1)}
    flags: dict[str, Any] = {name: _two(tuple(rest[i])) if len(rest) > i else value for i, (name, value) in enumerate(defaults.items())}
    return (n, c, h, w, f, kh, kw), flags | {"groups": c // per_group}


# How the operands' shapes describe a problem; convolutions may append (height, width) of stride, padding and dilation.
_FROM_SHAPES: dict[str, Callable[[Sequence[Sequence[int]]], tuple[tuple[int, ...], dict[str, Any]]]] = {
    "matmul": _matmul_shapes,
    **dict.fromkeys(("conv2d", *GRADIENTS), _conv_shapes),
    "elementwise": lambda shapes: ((max(math.prod(shape) for shape in shapes),), {}),
    "reduction": lambda shapes: ((math.prod(shapes[0]),), {"kind": "sum"}),
}

_selector = KernelSelector()
_selector.tuned = lambda problem: hooks.upper(".runtime.tuning").tuned(problem)


def set_matmul_precision(precision: str) -> None:
    """Set the precision of float32 products and convolutions, with torch's names.

    ``highest`` (the default): within four times the error of a plain float32 sum. ``high``: kernels may split operands into parts of
    fewer bits if that is faster; errors stay below about 2e-5 of the largest result. ``medium``: operands may be rounded to bfloat16.
    A device without such kernels is not affected.

    >>> from netcl.core.kernel_selector import get_matmul_precision
    >>> set_matmul_precision("highest"); get_matmul_precision()
    'highest'
    """
    global _precision
    if precision not in PRECISIONS:
        raise ValueError(message("set_matmul_precision", f"precision must be one of {', '.join(PRECISIONS)}", precision=repr(precision)))
    if precision != _precision:
        _precision = precision
        _selector.clear_cache()


def reload_environment() -> None:
    """Discard all plans and recorded steps, so that changed ``NETCL_*`` variables that choose kernels take effect.

    The variables are read when a call of new shapes or dtypes is planned, not at every call.
    """
    _selector.named += 1
    _selector.clear_cache()


def get_matmul_precision() -> str:
    """Return the precision set by :func:`set_matmul_precision`."""
    return _precision


hooks.modes.append(partial(getattr, sys.modules[__name__], "_precision"))  # a Python function would take longer at every replay
hooks.modes.append(partial(getattr, _selector, "named"))


def get_kernel_selector() -> KernelSelector:
    """Return the selector of this process, which selects for the active device."""
    return _selector


select_matmul_config, select_conv2d_config = _selector.select_matmul_kernel, _selector.select_conv2d_kernel
register, select, clear_cache = _selector.register, _selector.select, _selector.clear_cache
