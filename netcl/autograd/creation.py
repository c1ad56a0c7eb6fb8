"""torch's functions that are no ops: tensors from sizes, values and other tensors, questions about tensors, and states of the library.

They are found at the root of the package, ``netcl.eye(3)``. ``device=``, ``dtype=`` and ``requires_grad=`` mean what they do in torch;
``layout=``, ``pin_memory=``, ``memory_format=`` and ``non_blocking=`` are taken and change nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from netcl.autograd.ops import twin
from netcl.autograd.tape import no_grad
from netcl.core import dtype as dtypes
from netcl.core.arguments import find_queue
from netcl.core.device import get_active_device, set_active_device
from netcl.core.errors import DtypeError, ShapeError, message
from netcl.core.tensor import Tensor
from netcl.ops import random
from netcl.ops.composed import largest

NAMES = """arange as_tensor asarray bartlett_window blackman_window broadcast_shapes broadcast_tensors can_cast cartesian_prod combinations
    empty empty_like eye finfo from_numpy full full_like get_default_device get_default_dtype get_rng_state hamming_window hann_window
    iinfo inference_mode initial_seed is_tensor linspace logspace meshgrid multinomial normal ones ones_like promote_types rand rand_like
    randint randint_like randn randn_like randperm range result_type scalar_tensor seed set_default_device set_default_dtype set_rng_state
    tril_indices triu_indices typename unravel_index vander zeros zeros_like""".split()
_UNUSED = ("layout", "pin_memory", "memory_format", "non_blocking")


def _place(options: dict[str, Any]) -> tuple[Any, bool]:
    """The queue that a call names, and whether its result requires grad; anything that torch does not take raises."""
    queue = find_queue(options.pop("queue", None), None, options.pop("device", None))
    grad = options.pop("requires_grad", False)
    unknown = [name for name in options if name not in _UNUSED]
    if unknown:
        raise TypeError(f"unexpected keyword argument {unknown[0]!r}")
    return queue, bool(grad)


def _made(values: Any, dtype: Any, options: dict[str, Any]) -> Tensor:
    queue, grad = _place(options)
    return Tensor.from_host(queue, values, dtype, requires_grad=grad)


def _sizes(size: tuple[Any, ...], options: dict[str, Any]) -> tuple[int, ...]:
    given = (options.pop("size"),) if "size" in options else size
    return tuple(given[0]) if len(given) == 1 and not isinstance(given[0], int | np.integer) else tuple(given)


# ---- from sizes


def full(size: Any, fill_value: Any, *, dtype: Any = None, **options: Any) -> Tensor:
    """A tensor with ``fill_value`` everywhere."""
    queue, grad = _place(options)
    value = fill_value.item() if isinstance(fill_value, Tensor) else fill_value
    return Tensor.full(size, value, dtype, queue=queue, requires_grad=grad)


def zeros(*size: Any, dtype: Any = None, **options: Any) -> Tensor:
    """Zeros: ``zeros(2, 3)``, ``zeros((2, 3))`` or ``zeros(size=(2, 3))``; a dtype may follow a tuple."""
    return _constant(Tensor.zeros, size, dtype, options)


def ones(*size: Any, dtype: Any = None, **options: Any) -> Tensor:
    """Ones; arguments as those of :func:`zeros`."""
    return _constant(Tensor.ones, size, dtype, options)


def _constant(make: Callable[..., Tensor], size: tuple[Any, ...], dtype: Any, options: dict[str, Any]) -> Tensor:
    given = (options.pop("size"),) if "size" in options else size
    return make(*given, dtype=dtype, **{name: value for name, value in options.items() if name not in _UNUSED})


def empty(*size: Any, dtype: Any = None, **options: Any) -> Tensor:
    """A tensor whose values are whatever the memory holds."""
    *sizes, dtype = size if len(size) == 2 and isinstance(size[1], str) else (*size, dtype)
    shape = _sizes(tuple(sizes), options)
    queue, grad = _place(options)
    return Tensor.empty(shape, dtype or dtypes.FLOAT32, queue=queue, requires_grad=grad)


def rand(*size: Any, dtype: Any = None, **options: Any) -> Tensor:
    """Values uniform in [0, 1)."""
    return _random("rand", size, dtype, options)


def randn(*size: Any, dtype: Any = None, **options: Any) -> Tensor:
    """Values of the standard normal distribution."""
    return _random("randn", size, dtype, options)


def _random(kind: str, size: tuple[Any, ...], dtype: Any, options: dict[str, Any]) -> Tensor:
    shape = _sizes(size, options)
    queue, grad = _place(options)
    return twin(kind)(shape, dtype=dtype or dtypes.FLOAT32, queue=queue).requires_grad_(grad)


def randint(low: int, high: Any = None, size: Any = None, *, dtype: Any = "int64", **options: Any) -> Tensor:
    """Integers from ``low`` up to but not including ``high``: ``randint(10, (2, 3))`` or ``randint(3, 10, (2, 3))``."""
    size = options.pop("shape", size)
    if size is None and high is not None and not isinstance(high, int | np.integer):
        high, size = None, high
    queue, _ = _place(options)
    row = dtypes.lookup(dtype or "int64", "randint")
    made = twin("randint")(low, high, () if size is None else tuple(np.atleast_1d(size).tolist()), dtype="int64", queue=queue)
    return made.to(row.name)


def randperm(n: int, *, dtype: Any = "int64", **options: Any) -> Tensor:
    """The numbers from 0 to n - 1 in random order."""
    queue, _ = _place(options)
    return twin("argsort")(twin("rand")((n,), queue=queue)).to(dtype)


def normal(mean: Any = 0.0, std: Any = 1.0, size: Any = None, *, dtype: Any = None, **options: Any) -> Tensor:
    """Normal values of a mean and a deviation, each a number or a tensor; two numbers need ``size``."""
    like = next((x for x in (mean, std) if isinstance(x, Tensor)), None)
    if like is None and size is None:
        raise ShapeError(message("normal", "size is needed where mean and std are numbers", mean=mean, std=std))
    shape = np.broadcast_shapes(*(x.shape for x in (mean, std) if isinstance(x, Tensor))) if like is not None else size
    options = {"queue": like.queue} if like is not None else options
    made: Tensor = randn(shape, dtype=dtype or (dtypes.FLOAT32 if like is None else like.dtype), **options)
    return made * std + mean


def eye(n: int, m: int | None = None, *, dtype: Any = None, **options: Any) -> Tensor:
    """Ones on the diagonal of an n by m matrix of zeros."""
    return _made(np.eye(n, m, dtype=np.float32), dtype, options)


def arange(start: Any, end: Any = None, step: Any = 1, dtype: Any = None, **options: Any) -> Tensor:
    """``start, start + step, ...`` below ``end``; integers give int64, floats float32."""
    end = options.pop("stop", end)
    queue, grad = _place(options)
    return Tensor.arange(start, end, step, dtype, queue=queue).requires_grad_(grad)


def range(start: float = 0, end: float = 0, step: float = 1, *, dtype: Any = None, **options: Any) -> Tensor:
    """``start, start + step, ...`` up to ``end`` itself, float32."""
    return _made(start + step * np.arange(int((end - start) / step) + 1), dtype or dtypes.FLOAT32, options)


def linspace(start: Any, end: Any, steps: int, *, dtype: Any = None, **options: Any) -> Tensor:
    """``steps`` values from ``start`` to ``end``, equally far apart."""
    return _made(np.linspace(float(start), float(end), steps), dtype or dtypes.FLOAT32, options)


def logspace(start: Any, end: Any, steps: int, base: float = 10.0, *, dtype: Any = None, **options: Any) -> Tensor:
    """``base`` to the power of ``steps`` values from ``start`` to ``end``."""
    return _made(np.logspace(float(start), float(end), steps, base=base), dtype or dtypes.FLOAT32, options)


def tril_indices(row: int, col: int | None = None, offset: int = 0, *, dtype: Any = "int64", **options: Any) -> Tensor:
    """Rows and columns of the lower triangle of a matrix, one line each."""
    return _made(np.stack(np.tril_indices(row, offset, row if col is None else col)), dtype, options)


def triu_indices(row: int, col: int | None = None, offset: int = 0, *, dtype: Any = "int64", **options: Any) -> Tensor:
    """Rows and columns of the upper triangle of a matrix, one line each."""
    return _made(np.stack(np.triu_indices(row, offset, row if col is None else col)), dtype, options)


def _window(shape: Callable[[int], np.ndarray]) -> Callable[..., Tensor]:
    def window(window_length: int, periodic: bool = True, *, dtype: Any = None, **options: Any) -> Tensor:
        """A window of a length, for signals: its period is the length, or (``periodic=False``) its ends are alike."""
        values = shape(window_length + 1)[:-1] if periodic and window_length > 1 else shape(window_length)
        return _made(np.maximum(values, 0), dtype or dtypes.FLOAT32, options)

    return window


hann_window, hamming_window = _window(np.hanning), _window(np.hamming)
blackman_window, bartlett_window = _window(np.blackman), _window(np.bartlett)


# ---- from values and tensors


def as_tensor(data: Any, dtype: Any = None, device: Any = None) -> Tensor:
    """A tensor of values; a tensor that already has the dtype and the device is returned itself."""
    if isinstance(data, Tensor):
        return data.to(device, dtype)
    return Tensor.from_host(find_queue(None, None, device), data, dtype)


def asarray(obj: Any, *, dtype: Any = None, device: Any = None, copy: bool | None = None, requires_grad: bool = False) -> Tensor:
    """As :func:`as_tensor`, with ``copy=True`` for memory of its own."""
    made = as_tensor(obj, dtype, device)
    return (made.clone() if copy and made is obj else made).requires_grad_(requires_grad) if requires_grad or copy else made


def from_numpy(array: np.ndarray) -> Tensor:
    """A copy of an array on the active device; float64 becomes float32. (torch shares the memory.)"""
    if not isinstance(array, np.ndarray):
        raise TypeError(message("from_numpy", "takes a NumPy array", "use netcl.tensor", given=type(array).__name__))
    return Tensor.from_host(array)


def scalar_tensor(value: Any, *, dtype: Any = None, **options: Any) -> Tensor:
    """A tensor without axes, float32 unless a dtype is given."""
    return full((), value, dtype=dtype or dtypes.FLOAT32, **options)


def full_like(input: Tensor, fill_value: Any, *, dtype: Any = None, **options: Any) -> Tensor:
    """``fill_value`` everywhere, in the shape, dtype and place of a tensor."""
    return full(input.shape, fill_value, dtype=dtype or input.dtype, **_beside(input, options))


def zeros_like(input: Tensor, *, dtype: Any = None, **options: Any) -> Tensor:
    """Zeros in the shape, dtype and place of a tensor."""
    return full_like(input, 0, dtype=dtype, **options)


def ones_like(input: Tensor, *, dtype: Any = None, **options: Any) -> Tensor:
    """Ones in the shape, dtype and place of a tensor."""
    return full_like(input, 1, dtype=dtype, **options)


def empty_like(input: Tensor, *, dtype: Any = None, **options: Any) -> Tensor:
    """Memory in the shape, dtype and place of a tensor."""
    return empty(input.shape, dtype=dtype or input.dtype, **_beside(input, options))


def rand_like(input: Tensor, *, dtype: Any = None, **options: Any) -> Tensor:
    """Values uniform in [0, 1) in the shape, dtype and place of a tensor."""
    return rand(input.shape, dtype=dtype or input.dtype, **_beside(input, options))


def randn_like(input: Tensor, *, dtype: Any = None, **options: Any) -> Tensor:
    """Standard normal values in the shape, dtype and place of a tensor."""
    return randn(input.shape, dtype=dtype or input.dtype, **_beside(input, options))


def randint_like(input: Tensor, low: int, high: int | None = None, *, dtype: Any = None, **options: Any) -> Tensor:
    """Integers as :func:`randint` gives them in the shape, dtype and place of a tensor."""
    return randint(low, high, input.shape, dtype=dtype or input.dtype, **_beside(input, options))


def _beside(x: Tensor, options: dict[str, Any]) -> dict[str, Any]:
    return options if options.get("device") is not None else {**options, "queue": x.queue}


def multinomial(input: Any, num_samples: int, replacement: bool = False) -> Tensor:
    """Indices along the last axis, drawn with probabilities proportional to its values, which need not sum to 1."""
    if input.ndim not in (1, 2) or not num_samples > 0 or (not replacement and num_samples > input.shape[-1]):
        what = "x must be a vector or a matrix, and without replacement have as many columns as samples"
        raise ShapeError(message("multinomial", what, num_samples=num_samples, **{"x.shape": input.shape}))
    with no_grad():
        repeats = num_samples if replacement else 1
        shape = (*input.shape[:-1], repeats, input.shape[-1])
        # The least of exponential times with rates p falls on i with probability p[i] / sum(p).
        times = twin("clamp_min")(twin("neg")(twin("log1p")(twin("neg")(rand(shape, queue=input.queue)))), 1e-30)
        score = twin("div")(input.detach().to("float32").unsqueeze(-2), times)
        return score.argmax(-1) if replacement else score.squeeze(-2).topk(num_samples).indices


def meshgrid(*tensors: Any, indexing: str = "ij") -> tuple[Tensor, ...]:
    """Vectors spread over the axes of a grid, the first over rows; ``indexing="xy"`` exchanges the first two axes."""
    given = tuple(tensors[0]) if len(tensors) == 1 and isinstance(tensors[0], list | tuple) else tensors
    if indexing not in ("ij", "xy"):
        raise ValueError(message("meshgrid", 'indexing must be "ij" or "xy"', indexing=repr(indexing)))
    shape = tuple(x.size for x in given)
    grids = [x.reshape(tuple(-1 if i == k else 1 for i, _ in enumerate(given))).expand(shape) for k, x in enumerate(given)]
    return tuple(g.transpose(0, 1) if indexing == "xy" and len(given) > 1 else g for g in grids)


def cartesian_prod(*tensors: Any) -> Tensor:
    """All combinations of one element of each vector, one row each."""
    return twin("stack")([twin("reshape")(grid, (-1,)) for grid in meshgrid(*tensors)], -1) if len(tensors) > 1 else tensors[0]


def combinations(input: Tensor, r: int = 2, with_replacement: bool = False) -> Tensor:
    """The ways to take ``r`` elements of a vector, one row each."""
    choose = itertools.combinations_with_replacement if with_replacement else itertools.combinations
    places = np.array(list(choose(np.arange(input.size), r)), np.int64).reshape(-1, r)
    return input[Tensor.from_host(input.queue, places)]


def vander(x: Any, N: int | None = None, increasing: bool = False) -> Tensor:
    """The powers of every element from N - 1 down to 0 (or up from it), one row each."""
    powers: Any = Tensor.arange(x.size if N is None else N, queue=x.queue).to(x.dtype)
    return twin("pow")(x.unsqueeze(-1), powers if increasing else powers.flip(0))


def broadcast_tensors(*tensors: Any) -> tuple[Tensor, ...]:
    """Tensors expanded to their common shape."""
    shape = broadcast_shapes(*(x.shape for x in tensors))
    return tuple(x.expand(shape) for x in tensors)


def unravel_index(indices: Any, shape: Any) -> tuple[Tensor, ...]:
    """The coordinates of places in a flattened tensor of a shape."""
    strides = [int(np.prod(shape[i + 1 :])) for i, _ in enumerate(shape)]
    return tuple(indices // stride % size for stride, size in zip(strides, shape, strict=True))


# ---- questions and states


def broadcast_shapes(*shapes: Any) -> tuple[int, ...]:
    """The common shape of shapes."""
    return tuple(int(n) for n in np.broadcast_shapes(*shapes))


def is_tensor(obj: Any) -> bool:
    """Whether something is a tensor."""
    return isinstance(obj, Tensor)


def typename(obj: Any) -> str:
    """The name of the type of a tensor, as ``x.type()``, or of anything else."""
    return obj.type() if is_tensor(obj) else type(obj).__name__


def promote_types(type1: Any, type2: Any) -> dtypes.dtype:
    """The dtype of a result of two dtypes."""
    return dtypes.promote(*(dtypes.lookup(name, "promote_types") for name in (type1, type2))).name


def result_type(tensor1: Any, tensor2: Any) -> dtypes.dtype:
    """The dtype of a result of two tensors or numbers."""
    from netcl.ops.elementwise import common_dtype

    return common_dtype((tensor1, tensor2)).name


def can_cast(from_: Any, to: Any) -> bool:
    """Whether a cast keeps the kind of values: floats may not become integers, nor numbers bool."""
    kinds = [0 if row.name == "bool" else 1 + row.is_float for row in (dtypes.lookup(x, "can_cast") for x in (from_, to))]
    return kinds[0] <= kinds[1]


def finfo(dtype: Any = dtypes.FLOAT32) -> Any:
    """The limits of a dtype of floats: ``max``, ``min``, ``eps``, ``tiny``, ``bits``."""
    row = dtypes.lookup(dtype, "finfo")
    if not row.is_float:
        raise DtypeError(message("finfo", "takes a dtype of floats", "use netcl.iinfo", dtype=row.name))
    if row.name != "bfloat16":
        return np.finfo(row.host)
    return SimpleNamespace(max=largest(row.name), min=-largest(row.name), eps=2.0**-7, tiny=2.0**-126, smallest_normal=2.0**-126, bits=16)


def iinfo(dtype: Any) -> Any:
    """The limits of a dtype of integers: ``max``, ``min``, ``bits``."""
    return np.iinfo(dtypes.lookup(dtype, "iinfo").host)


def get_default_dtype() -> dtypes.dtype:
    """The dtype of new tensors of floats: always float32."""
    return dtypes.FLOAT32


def set_default_dtype(d: Any) -> None:
    """Only float32 is taken."""
    if dtypes.lookup(d, "set_default_dtype").name != "float32":
        raise DtypeError(message("set_default_dtype", "new tensors are float32", "pass dtype= where another is wanted", dtype=d))


def get_default_device() -> Any:
    """The device new tensors are made on."""
    return get_active_device()


def set_default_device(device: Any) -> None:
    """Make a device that of new tensors in this thread."""
    set_active_device(device)


def get_rng_state(device: Any = None) -> random.RandomState:
    """The state of a device's generator."""
    return random.get_state(find_queue(None, None, device))


def set_rng_state(new_state: Any, device: Any = None) -> None:
    """Give a device's generator a state that :func:`get_rng_state` returned."""
    random.set_state(new_state, find_queue(None, None, device))


def initial_seed() -> int:
    """The seed of the active device's generator."""
    return int(random.get_state(get_active_device().queue).as_dict()["seed"])


def seed() -> int:
    """Seed all generators with a number nobody chose, and return it."""
    number = int(np.random.SeedSequence().entropy) % 2**63  # type: ignore[arg-type]
    random.manual_seed(number)
    return number


def inference_mode(mode: bool = True) -> Any:
    """``no_grad()``; with ``mode=False``, nothing."""
    from netcl.autograd.tape import is_grad_enabled, set_grad_enabled

    return no_grad() if mode else set_grad_enabled(is_grad_enabled())
