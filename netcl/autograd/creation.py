"""torch's functions that are not ops: factories, predicates about tensors, global settings.

They are available at the root of the package, ``netcl.eye(3)``. Functions with ``**options`` ignore torch's ``layout=``,
``pin_memory=``, ``memory_format=`` and ``non_blocking=``.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from netcl.autograd.ops import twin
from netcl.autograd.tape import is_grad_enabled, no_grad, set_grad_enabled
from netcl.core import dtype as dtypes
from netcl.core import recording
from netcl.core.arguments import find_queue
from netcl.core.device import get_active_device, set_active_device
from netcl.core.errors import DtypeError, ShapeError, at_least, message
from netcl.core.tensor import PRINT_OPTIONS, Tensor
from netcl.engine.operands import common_dtype, common_shape
from netcl.ops import random
from netcl.ops.composed import largest
from netcl.ops.random import with_generator as with_generator

_UNUSED = ("layout", "pin_memory", "memory_format", "non_blocking")


def _placement(options: dict[str, Any]) -> tuple[Any, bool]:
    """Return the queue that keyword arguments select, and whether the result requires grad; raises on unknown keywords."""
    queue = find_queue(options.pop("queue", None), None, options.pop("device", None))
    grad = options.pop("requires_grad", False)
    unknown = [name for name in options if name not in _UNUSED]
    if unknown:
        raise TypeError(f"unexpected keyword argument {unknown[0]!r}")
    return queue, bool(grad)


def made_here(values: Any, dtype: Any, options: dict[str, Any]) -> Tensor:
    queue, grad = _placement(options)
    return Tensor.from_host(queue, values, dtype, requires_grad=grad)


def _given_sizes(size: tuple[Any, ...], options: dict[str, Any]) -> tuple[int, ...]:
    given = (options.pop("size"),) if "size" in options else size
    return tuple(given[0]) if len(given) == 1 and not isinstance(given[0], int | np.integer) else tuple(given)


# ---- from sizes


def full(size: Any, fill_value: Any, *, dtype: Any = None, **options: Any) -> Tensor:
    """Return a tensor filled with ``fill_value``; ``options`` are ``device=``, ``queue=`` and ``requires_grad=``."""
    queue, grad = _placement(options)
    value = fill_value.item() if isinstance(fill_value, Tensor) else fill_value
    return Tensor.full(size, value, dtype, queue=queue, requires_grad=grad)


def zeros(*size: Any, dtype: Any = None, **options: Any) -> Tensor:
    """Return zeros: ``zeros(2, 3)``, ``zeros((2, 3))`` or ``zeros(size=(2, 3))``; a dtype may follow a tuple. Options: see :func:`full`."""
    return _filled(Tensor.zeros, size, dtype, options)


def ones(*size: Any, dtype: Any = None, **options: Any) -> Tensor:
    """Return ones; arguments as those of :func:`zeros`."""
    return _filled(Tensor.ones, size, dtype, options)


def _filled(make: Callable[..., Tensor], size: tuple[Any, ...], dtype: Any, options: dict[str, Any]) -> Tensor:
    given = (options.pop("size"),) if "size" in options else size
    return make(*given, dtype=dtype, **{name: value for name, value in options.items() if name not in _UNUSED})


def empty(*size: Any, dtype: Any = None, **options: Any) -> Tensor:
    """Return an uninitialized tensor. The arguments are those of :func:`zeros`."""
    *sizes, dtype = size if len(size) == 2 and not isinstance(size[1], int | np.integer) else (*size, dtype)
    shape = _given_sizes(tuple(sizes), options)
    queue, grad = _placement(options)
    return Tensor.empty(shape, dtype or dtypes.FLOAT32, queue=queue, requires_grad=grad)


@with_generator
def rand(*size: Any, dtype: Any = None, **options: Any) -> Tensor:
    """Return uniformly distributed values in [0, 1); ``options`` are those of :func:`full`."""
    return _random_tensor("rand", size, dtype, options)


@with_generator
def randn(*size: Any, dtype: Any = None, **options: Any) -> Tensor:
    """Return values of the standard normal distribution; ``options`` are those of :func:`full`."""
    return _random_tensor("randn", size, dtype, options)


def _random_tensor(kind: str, size: tuple[Any, ...], dtype: Any, options: dict[str, Any]) -> Tensor:
    shape = _given_sizes(size, options)
    queue, grad = _placement(options)
    return twin(kind)(shape, dtype=dtype or dtypes.FLOAT32, queue=queue).requires_grad_(grad)


@with_generator
def randint(low: int, high: Any = None, size: Any = None, *, dtype: Any = "int64", **options: Any) -> Tensor:
    """Return random integers from ``low`` up to but not including ``high``: ``randint(10, (2, 3))`` or ``randint(3, 10, (2, 3))``."""
    size = options.pop("shape", size)
    if size is None and high is not None and not isinstance(high, int | np.integer):
        high, size = None, high
    queue, grad = _placement(options)
    row = dtypes.lookup(dtype or "int64", "randint")
    random.check_integers("randint", 0 if high is None else low, low if high is None else high, row.name)
    made = twin("randint")(low, high, () if size is None else tuple(np.atleast_1d(size).tolist()), dtype="int64", queue=queue)
    return made.to(row.name).requires_grad_(grad)


@with_generator
def randperm(n: int, *, dtype: Any = "int64", **options: Any) -> Tensor:
    """Return the numbers from 0 to n - 1 in random order; ``device=`` or ``queue=`` selects the device."""
    queue, grad = _placement(options)
    random.check_integers("randperm", 0, max(n, 1), dtypes.lookup(dtype, "randperm").name)
    return twin("argsort")(twin("rand")((n,), queue=queue)).to(dtype).requires_grad_(grad)


@with_generator
def normal(mean: Any = 0.0, std: Any = 1.0, size: Any = None, *, dtype: Any = None, **options: Any) -> Tensor:
    """Return normal values with a mean and a standard deviation, each a number or a tensor; two numbers need ``size``."""
    like = next((x for x in (mean, std) if isinstance(x, Tensor)), None)
    if (like is None) == (size is None):
        raise ShapeError(message("normal", "size must be given if mean and std are numbers, and only then", mean=mean, std=std, size=size))
    shape = np.broadcast_shapes(*(x.shape for x in (mean, std) if isinstance(x, Tensor))) if like is not None else size
    grad = options.pop("requires_grad", False)
    if like is not None:
        if options:
            raise TypeError(message("normal", "options must not be given with tensors", "move the result", given=", ".join(options)))
        options["queue"] = like.queue
    made: Tensor = randn(shape, dtype=dtype or (dtypes.FLOAT32 if like is None else like.dtype), **options)
    made = made * (std if isinstance(std, Tensor) else at_least("normal", "std", std)) + mean
    return made.requires_grad_() if grad else made


def arange(start: Any, end: Any = None, step: Any = 1, dtype: Any = None, **options: Any) -> Tensor:
    """Return ``start, start + step, ...`` up to but not including ``end``; integers give int64, floats float32."""
    end = options.pop("stop", end)
    queue, grad = _placement(options)
    return Tensor.arange(start, end, step, dtype, queue=queue).requires_grad_(grad)


def linspace(start: Any, end: Any, steps: int, *, dtype: Any = None, **options: Any) -> Tensor:
    """Return ``steps`` evenly spaced values from ``start`` to ``end``; an integer dtype rounds both towards 0 first, as in torch."""
    row = dtypes.lookup(dtype or dtypes.FLOAT32, "linspace")
    kind = float if row.is_float else int
    return made_here(np.linspace(kind(start), kind(end), steps), row.name, options)


def _host_factory(name: str, values: Callable[..., Any], default: Any = dtypes.FLOAT32) -> Callable[..., Tensor]:
    """Return a factory whose values NumPy computes, with torch's keywords."""
    parameters = tuple(inspect.signature(values).parameters)

    def make(*args: Any, dtype: Any = None, **options: Any) -> Tensor:
        named = {key: options.pop(key) for key in parameters if key in options}
        return made_here(values(*args, **named), dtype or default, options)

    make.__name__ = make.__qualname__ = name
    make.__doc__ = f"``{name}({', '.join(parameters)})`` as in torch."
    return make


def _window_values(length: int, periodic: bool, f: Callable[[int], np.ndarray]) -> np.ndarray:
    """Return ``length`` values of a symmetric window, or of one period if ``periodic``; a single value is 1."""
    return np.ones(1) if length == 1 else f(length + 1)[:length] if periodic else f(length)


_ON_HOST: dict[str, tuple[Any, ...]] = {
    "eye": (lambda n, m=None: np.eye(n, m),),
    "logspace": (lambda start, end, steps, base=10.0: np.logspace(float(start), float(end), steps, base=base),),
    "range": (lambda start=0, end=0, step=1: start + step * np.arange(int((end - start) / step) + 1),),
    "scalar_tensor": (lambda value: np.asarray(value),),
    "tril_indices": (lambda row, col=None, offset=0: np.stack(np.tril_indices(row, offset, row if col is None else col)), "int64"),
    "triu_indices": (lambda row, col=None, offset=0: np.stack(np.triu_indices(row, offset, row if col is None else col)), "int64"),
    "hamming_window": (lambda window_length, periodic=True, alpha=0.54, beta=0.46: _window_values(
        window_length, periodic, lambda n: alpha - beta * np.cos(2 * np.pi * np.arange(n) / max(n - 1, 1))),),
    **{f"{name}_window": (lambda window_length, periodic=True, f=f: np.maximum(_window_values(window_length, periodic, f), 0),)
       for name, f in (("hann", np.hanning), ("blackman", np.blackman), ("bartlett", np.bartlett))},
}  # fmt: skip


# ---- from values and tensors


def as_tensor(data: Any, dtype: Any = None, device: Any = None) -> Tensor:
    """Convert values to a tensor; a tensor that already has this dtype and device is returned itself."""
    if isinstance(data, Tensor):
        return data.to(device, dtype)
    return Tensor.from_host(find_queue(None, None, device), data, dtype)


def from_numpy(array: np.ndarray) -> Tensor:
    """Copy an array to the active device; float64 becomes float32. Unlike torch's, the tensor does not share memory."""
    if not isinstance(array, np.ndarray):
        raise TypeError(message("from_numpy", "the argument must be a NumPy array", "use netcl.tensor", given=type(array).__name__))
    return Tensor.from_host(array)


def _like_function(name: str, make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def like(input: Tensor, *args: Any, dtype: Any = None, **options: Any) -> Tensor:
        return make(input.shape, *args, dtype=dtype or input.dtype, **_beside(input, options))

    like.__name__ = like.__qualname__ = f"{name}_like"
    like.__doc__ = f"Return ``{name}`` with the shape, dtype and device of a tensor."
    return like


def _beside(x: Tensor, options: dict[str, Any]) -> dict[str, Any]:
    return options if options.get("device") is not None else {**options, "queue": x.queue}


@with_generator
def multinomial(input: Any, num_samples: int, replacement: bool = False) -> Tensor:
    """Draw ``num_samples`` indices along the last axis of ``input``, with probabilities proportional to the values there."""
    if input.ndim not in (1, 2) or not num_samples > 0 or (not replacement and num_samples > input.shape[-1]):
        what = "input must have 1 or 2 dimensions, num_samples must be at least 1 and, without replacement, at most input.shape[-1]"
        raise ShapeError(message("multinomial", what, num_samples=num_samples, replacement=replacement, **{"input.shape": input.shape}))
    recording.check_each_run(input, partial(_check_chances, least=1 if replacement else num_samples))
    with no_grad():
        repeats = num_samples if replacement else 1
        # The least of exponential times with rates p falls on i with probability p[i] / sum(p).
        noise = gumbel_noise((*input.shape[:-1], repeats, input.shape[-1]), input)
        weights = input.detach()
        score = twin("log")(weights if weights.dtype == "float64" else weights.to("float32")).unsqueeze(-2) + noise
        return score.argmax(-1) if replacement else score.squeeze(-2).topk(num_samples).indices


def _check_chances(weights: Tensor, least: int) -> None:
    """Raise unless all weights are finite and not negative, and at least ``least`` of each row are positive."""
    values = weights.to_host()
    with np.errstate(invalid="ignore"):
        fits = bool(((values >= 0) & (values < np.inf)).all())
    positive = int((values > 0).sum(-1).min(initial=least)) if fits else 0
    if not fits or positive < least:
        what = f"the values of input must be finite and not negative, and at least {least} of each row positive"
        raise ValueError(message("multinomial", what, finite_and_not_negative=fits, positive=positive, **{"input.shape": weights.shape}))


def gumbel_noise(shape: Sequence[int], like: Tensor) -> Tensor:
    """Return standard Gumbel numbers, ``-log`` of exponential ones. Large ones, which choose rare entries, have 48 random bits."""
    uniform = twin("clamp")(rand(shape, queue=like.queue) + rand(shape, queue=like.queue) * 2.0**-24, 2.0**-49, 1 - 2.0**-24)
    return -twin("log")(-twin("log1p")(-uniform))


def meshgrid(*tensors: Any, indexing: str = "ij") -> tuple[Tensor, ...]:
    """Return the vectors expanded to a grid: vector k varies along axis k; ``indexing="xy"`` exchanges the first two axes."""
    given = tuple(tensors[0]) if len(tensors) == 1 and isinstance(tensors[0], list | tuple) else tensors
    if indexing not in ("ij", "xy"):
        raise ValueError(message("meshgrid", 'indexing must be "ij" or "xy"', indexing=repr(indexing)))
    shape = tuple(x.size for x in given)
    grids = [x.reshape(tuple(-1 if i == k else 1 for i, _ in enumerate(given))).expand(shape) for k, x in enumerate(given)]
    return tuple(g.transpose(0, 1) if indexing == "xy" and len(given) > 1 else g for g in grids)


def broadcast_tensors(*tensors: Any) -> tuple[Tensor, ...]:
    """Return the tensors expanded to their common shape."""
    shape = common_shape("broadcast_tensors", [x.shape for x in tensors], [f"tensor {i}" for i in range(len(tensors))]) if tensors else ()
    return tuple(x.expand(shape) for x in tensors)


# ---- predicates and settings


def finfo(dtype: Any = dtypes.FLOAT32) -> Any:
    """Return the limits of a floating-point dtype: ``max``, ``min``, ``eps``, ``tiny``, ``bits``."""
    row = dtypes.lookup(dtype, "finfo")
    if not row.is_float:
        raise DtypeError(message("finfo", "dtype must be a floating-point type", "use netcl.iinfo", dtype=row.name))
    own = np.finfo(row.host)  # its numbers are NumPy scalars: float16's largest times 2 would be inf
    eps, tiny = (2.0**-7, 2.0**-126) if row.name == "bfloat16" else (float(own.eps), float(own.tiny))
    most, digits = largest(row.name), 10.0 ** -(2 if row.name == "bfloat16" else own.precision)
    return SimpleNamespace(
        max=most, min=-most, eps=eps, tiny=tiny, smallest_normal=tiny, bits=row.itemsize * 8, resolution=digits, dtype=row.name
    )


def set_default_dtype(d: Any) -> None:
    """Raise unless the dtype is float32, the only supported default."""
    if dtypes.lookup(d, "set_default_dtype").name != "float32":
        raise DtypeError(message("set_default_dtype", "the default dtype must be float32", "pass dtype= instead", dtype=d))


def set_printoptions(
    precision: int | None = None, threshold: float | None = None, edgeitems: int | None = None, linewidth: int | None = None,
    profile: str | None = None, sci_mode: bool | None = None,
) -> None:  # fmt: skip
    """Set how tensors are shown, with torch's words; ``profile`` is "default", "short" or "full". Options that are not given stay."""
    profiles: dict[str | None, dict[str, Any]] = {
        None: {}, "default": {"precision": 4, "threshold": 50, "edgeitems": 3}, "short": {"precision": 2, "threshold": 50, "edgeitems": 2},
        "full": {"precision": 4, "threshold": sys.maxsize, "edgeitems": 3},
    }  # fmt: skip
    if profile not in profiles:
        raise ValueError(message("set_printoptions", 'profile must be "default", "short" or "full"', profile=repr(profile)))
    given = {"precision": precision, "threshold": threshold, "edgeitems": edgeitems, "max_line_width": linewidth}
    PRINT_OPTIONS.update(profiles[profile] | {name: value for name, value in given.items() if value is not None})
    form = f".{PRINT_OPTIONS['precision']}{'e' if sci_mode else 'f'}"
    PRINT_OPTIONS["formatter"] = None if sci_mode is None else {"float_kind": lambda x: format(x, form)}


def seed() -> int:
    """Seed all generators with a random number, and return it."""
    number = int(np.random.SeedSequence().entropy) % 2**63  # type: ignore[arg-type]
    random.manual_seed(number)
    return number


def _cartesian_prod(*tensors: Tensor) -> Tensor:
    """Return every combination of the elements of vectors, one per row; for a single vector, return that vector."""
    return twin("stack")([twin("ravel")(grid) for grid in meshgrid(*tensors)], -1) if len(tensors) > 1 else tensors[0]


#: Everything here, by the name it has at the root.
CREATION_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{f.__name__: f for f in (arange, as_tensor, broadcast_tensors, empty, finfo, from_numpy, full, linspace, meshgrid, multinomial,
                               normal, ones, rand, randint, randn, randperm, seed, set_default_dtype, set_printoptions, zeros)},
    **{name: _host_factory(name, *how) for name, how in _ON_HOST.items()},
    **{f"{f.__name__}_like": _like_function(f.__name__, f) for f in (empty, full, ones, rand, randn, zeros)},
    "randint_like": with_generator(
        lambda input, low, high=None, **options: randint(low, high, input.shape, **{"dtype": input.dtype, **_beside(input, options)})
    ),
    "asarray": as_tensor,
    "bernoulli": with_generator(lambda input: twin("bernoulli")(input)),
    "broadcast_shapes": lambda *shapes: tuple(int(n) for n in np.broadcast_shapes(*shapes)),
    "cartesian_prod": _cartesian_prod,
    "get_default_device": get_active_device, "set_default_device": set_active_device, "get_default_dtype": lambda: dtypes.FLOAT32,
    "get_rng_state": random.get_state, "set_rng_state": random.set_state,
    "iinfo": lambda dtype: np.iinfo(dtypes.lookup(dtype, "iinfo").host),
    "inference_mode": lambda mode=True: no_grad()(mode) if callable(mode) else no_grad() if mode else set_grad_enabled(is_grad_enabled()),
    "initial_seed": lambda: int(random.get_state().as_dict()["seed"]),
    "is_tensor": lambda obj: isinstance(obj, Tensor),
    "promote_types": lambda type1, type2: dtypes.promote(dtypes.lookup(type1), dtypes.lookup(type2)).name,
    "result_type": lambda tensor1, tensor2: common_dtype((tensor1, tensor2)).name,
    "typename": lambda obj: getattr(obj, "type", lambda: type(obj).__name__)(),
}  # fmt: skip
