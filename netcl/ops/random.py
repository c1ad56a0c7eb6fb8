"""Counter-based random numbers: the bits depend on the seed and their position, not on the device or the work-group size.

Every queue has a stream of its own, whose seed and counter are stored on its device; :func:`manual_seed` restarts these streams. The NumPy
backend draws the same numbers as OpenCL devices, up to the rounding of ``log``, ``sin`` and ``cos``.
"""

from __future__ import annotations

import functools
import math
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from netcl.core import dtype as dtypes
from netcl.core.arguments import find_queue
from netcl.core.device import queue_of
from netcl.core.errors import DtypeError, ShapeError, check_probability, message
from netcl.core.hooks import hooks
from netcl.core.queue_state import queue_state
from netcl.core.tensor import Tensor, duplicate, wrap_array
from netcl.engine import launch
from netcl.engine.pointwise import run
from netcl.engine.registry import Pointwise, S, composite, op
from netcl.engine.strided import copy_block
from netcl.ops.movement import SizesArgument, sizes_of

_BITS = {"float32": 24, "float16": 11, "bfloat16": 8, "float64": 53}
_OUT_QUADS = {"float32": {"OUT_QUAD(p, i, v)": "*(__global float4*)(p + i) = (v)"},
                "float16": {"OUT_QUAD(p, i, v)": "vstore_half4_rte(v, 0, p + i)"}}  # fmt: skip
_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_LOW, _SHIFT = np.uint64(0xFFFFFFFF), np.uint64(32)
_seeded = (0,)  # the seed
#: What loaders, samplers and splits without a seed draw their seeds from. Random until the first :func:`manual_seed`.
host_rng = np.random.Generator(np.random.PCG64())
_streams: weakref.WeakSet[RandomStream] = weakref.WeakSet()
_unsettled: set[RandomStream] = set()  # may have drawn numbers since their counters were advanced


def philox(start: int, blocks: int, seed: int) -> np.ndarray:
    """Return the random words of ``blocks`` blocks, beginning at ``start``, as a (blocks, 4) array of uint32: Philox 4x32-10."""
    counter = (np.arange(blocks, dtype=np.uint64) + np.uint64(start % 2**64)).astype(np.uint64)
    c0, c1 = counter & _LOW, counter >> _SHIFT
    c2 = c3 = np.zeros(blocks, np.uint64)
    k0, k1 = seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF
    for _ in range(10):
        p0, p1 = _M0 * c0, _M1 * c2
        c0, c1, c2, c3 = (p1 >> _SHIFT) ^ c1 ^ np.uint64(k0), p1 & _LOW, (p0 >> _SHIFT) ^ c3 ^ np.uint64(k1), p0 & _LOW
        k0, k1 = (k0 + _W0) & 0xFFFFFFFF, (k1 + _W1) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3], axis=1).astype(np.uint32)


# ---- streams


class RandomStream:
    """The random numbers of one queue: a tensor with the seed and a counter, and the blocks drawn since the counter was advanced."""

    def __init__(self, queue: Any, seed: int, of_queue: bool = True):
        self.state = Tensor.from_host(queue, _packed_state(seed, 0))
        self.drawn = 0
        self.of_queue = of_queue  # otherwise of a Generator, which has its own seed
        self._lock = threading.Lock()
        _streams.add(self)

    @property
    def queue(self) -> Any:
        return self.state.queue

    def reset(self, seed: int, counter: int = 0) -> None:
        with self._lock:
            self.state.from_host(_packed_state(seed, counter))
            self.drawn = 0

    def words(self, blocks: int) -> np.ndarray:
        """Return the next words of a stream on the NumPy backend and advance its counter."""
        seed, counter = (int(n) for n in self.state.array.view(np.uint64))
        self.state.array[1] += blocks
        return philox(counter, blocks, seed)

    def draw(self, name: str, blocks: int, operands: Mapping[str, str], defines: Mapping[str, Any], *args: Any) -> None:
        """Launch a kernel of ``random.cl`` over the next blocks."""
        if blocks:
            kernel = launch.kernel(self.queue, __file__, "random.cl", name, operands, defines)
            with self._lock:
                kernel(self.queue, blocks, launch.LOCAL_1D, self.state, self.drawn, *args)
                self.drawn += blocks
                _unsettled.add(self)

    def settle(self) -> Tensor:
        """Advance the counter past all drawn numbers and return the state; a snapshot or a recording starts from this state."""
        with self._lock:
            if self.drawn:
                launch.kernel(self.queue, __file__, "random.cl", "advance")(self.queue, 1, 1, self.state, self.drawn)
                self.drawn = 0
        return self.state


def _packed_state(seed: int, counter: int) -> np.ndarray:
    return np.array([seed % 2**64, counter % 2**64], np.uint64).view(np.int64)


def stream_of(queue: Any) -> RandomStream:
    """Return the stream of a queue, started from the current seed at first use."""
    try:
        return queue.netcl.random
    except AttributeError:
        return queue_state(queue).part("random", lambda real: RandomStream(real, _seeded[0]))


def _settle_all() -> None:
    for stream in list(_unsettled):
        _unsettled.discard(stream)
        stream.settle()


hooks.settlers.append((_unsettled, _settle_all))


class RandomState:
    """The position of a stream, taken without waiting for the device; ``as_dict()`` converts it to numbers, which can be saved."""

    def __init__(self, snapshot: Tensor):
        self.snapshot = snapshot

    def as_dict(self) -> dict[str, int]:
        """Return ``{"seed": ..., "counter": ...}``; waits for the device."""
        seed, counter = (int(n) for n in self.snapshot.to_host().view(np.uint64))
        return {"seed": seed, "counter": counter}


def manual_seed(seed: int) -> None:
    """Restart the random numbers of every device from a seed, and those of loaders, samplers and splits made later without a seed.

    >>> manual_seed(7)
    >>> first = rand(3).tolist()
    >>> manual_seed(7)
    >>> rand(3).tolist() == first
    True
    """
    global _seeded
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)):
        raise ShapeError(message("manual_seed", "seed must be an integer", seed=repr(seed)))
    _seeded = (int(seed),)
    host_rng.bit_generator.state = np.random.PCG64(_seeded[0] % 2**64).state
    for stream in list(_streams):
        if stream.of_queue:
            stream.reset(_seeded[0])


def seeded() -> tuple[int]:
    """Return a tuple that holds the seed. :func:`manual_seed` creates a new tuple, so that an identity test detects a restart."""
    return _seeded


def get_state(queue: Any = None) -> RandomState:
    """Return the state of a queue's stream (by default the active device's); :func:`set_state` continues from it."""
    return RandomState(duplicate(stream_of(queue_of(queue)).settle()))


def set_state(state: RandomState | Mapping[str, int], queue: Any = None) -> None:
    """Continue a queue's stream from a state: a result of :func:`get_state`, or its ``as_dict()``."""
    stream = stream_of(queue_of(queue))
    if isinstance(state, RandomState) and state.snapshot.queue is stream.queue:
        copy_block((2,), state.snapshot, 0, (1,), stream.settle(), 0, (1,))  # in place: recorded launches hold this memory
        return
    values = state.as_dict() if isinstance(state, RandomState) else state
    stream.reset(int(values["seed"]), int(values["counter"]))


def repeating() -> Callable[[], None]:
    """Return a function that sets all streams back to where they are now, and those that began since to their start."""
    held = {stream: duplicate(stream.settle()) for stream in list(_streams)}

    def back() -> None:
        for stream in list(_streams):
            if stream in held:
                copy_block((2,), held[stream], 0, (1,), stream.settle(), 0, (1,))
            else:
                stream.reset(int(stream.settle().to_host().view(np.uint64)[0]))

    return back


class _RefusingStream:
    """A stream that raises ``message`` when this thread draws numbers."""

    def __init__(self, stream: RandomStream, message: str):
        self.stream, self.message, self.thread = stream, message, threading.get_ident()

    def refuse(self) -> None:
        if threading.get_ident() == self.thread:
            raise RuntimeError(self.message)

    def draw(self, *args: Any) -> None:
        self.refuse()
        self.stream.draw(*args)

    def words(self, blocks: int) -> np.ndarray:
        self.refuse()
        return self.stream.words(blocks)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextmanager
def without_numbers(queue: Any, message: str) -> Iterator[None]:
    """Raise ``message`` if this thread draws numbers on a queue inside the ``with`` block."""
    state: Any = queue_state(queue)
    state.random = _RefusingStream(before := stream_of(queue), message)
    try:
        yield
    finally:
        state.random = before


class Generator(np.random.Generator):
    """A random number generator with its own seed, for the ``generator=`` argument of random functions, samplers and loaders.

    >>> g = Generator().manual_seed(3)
    >>> with_tensor = with_generator(rand)
    >>> first = with_tensor(2, generator=g).tolist()
    >>> first == with_tensor(2, generator=g).tolist(), first == with_tensor(2, generator=g.manual_seed(3)).tolist()
    (False, True)
    """

    def __init__(self, device: Any = None):
        super().__init__(np.random.PCG64(0))
        self.device, self._seed = device, 0
        self._own: dict[Any, RandomStream] = {}  # by queue

    def manual_seed(self, seed: int) -> Generator:
        """Restart the numbers from a seed; returns the generator."""
        if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)):
            raise ShapeError(message("manual_seed", "seed must be an integer", seed=repr(seed)))
        self._seed, self.bit_generator.state = int(seed), np.random.PCG64(int(seed) % 2**64).state
        for stream in self._own.values():
            stream.reset(self._seed)
        return self

    def seed(self) -> int:
        """Restart from a random seed, and return that seed."""
        return self.manual_seed(int(np.random.SeedSequence().generate_state(1, np.uint64)[0] >> 1))._seed

    def initial_seed(self) -> int:
        """Return the seed that was set last."""
        return self._seed

    def __deepcopy__(self, memo: object) -> Generator:
        made = _generator_of(self.device, self._seed, self.bit_generator.state)
        for queue, stream in self._own.items():
            made._own[queue] = copy = RandomStream(queue, self._seed, of_queue=False)
            copy_block((2,), stream.settle(), 0, (1,), copy.state, 0, (1,))
        return made

    def __reduce__(self) -> Any:
        if self._own:
            what = "a generator that has drawn numbers on a device cannot be pickled"
            raise TypeError(message("pickle", what, "make one from a seed: Generator().manual_seed(seed)", seed=self._seed))
        return _generator_of, (self.device, self._seed, self.bit_generator.state)

    @contextmanager
    def drawing_on(self, queue: Any) -> Iterator[None]:
        """Draw the random numbers of a queue from this generator inside the ``with`` block."""
        state: Any = queue_state(queue)
        before = stream_of(queue)
        if isinstance(before, _RefusingStream):
            before.refuse()
        if queue not in self._own:
            self._own[queue] = RandomStream(queue, self._seed, of_queue=False)
        state.random = self._own[queue]
        try:
            yield
        finally:
            state.random = before


def _generator_of(device: object, seed: int, state: Mapping[str, object]) -> Generator:
    made = Generator(device)
    made._seed, made.bit_generator.state = seed, state
    return made


def with_generator(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add an argument ``generator=`` to ``function``. The generator draws on the device of the first tensor, ``queue=`` or ``device=``."""

    @functools.wraps(function)
    def drawn(*args: Any, generator: Generator | None = None, **kwargs: Any) -> Any:
        if generator is None:
            return function(*args, **kwargs)
        if not isinstance(generator, Generator):
            raise TypeError(message(function.__name__, "generator must be a netcl.Generator", given=type(generator).__name__))
        like = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), None)
        with generator.drawing_on(find_queue(kwargs.get("queue"), None, kwargs.get("device")) if like is None else like.queue):
            return function(*args, **kwargs)

    return drawn


# ---- numbers


def _checked_shape(name: str, shape: tuple[Any, ...]) -> tuple[int, ...]:
    sizes = sizes_of(shape[0]) if len(shape) == 1 else sizes_of((), shape)
    if min(sizes, default=0) < 0:
        raise ShapeError(message(name, "sizes must not be negative", shape=sizes))
    return sizes


def _empty_of(name: str, shape: tuple[Any, ...], dtype: str, queue: Any) -> Tensor:
    row = dtypes.lookup(dtype, name)
    if not row.is_float:
        raise DtypeError(message(name, "dtype must be a floating-point type", "use randint for integers", dtype=row.name))
    return Tensor.empty(_checked_shape(name, shape), row.name, queue=queue)


def _fill_float(kind: str, out: Tensor) -> Tensor:
    """Return ``out`` filled with "uniform" or "normal" numbers; on the NumPy backend, a new tensor."""
    wide = out.dtype == "float64"
    blocks = -(-out.size // (2 if wide else 4))
    stream = stream_of(out.queue)
    if out.array is None:
        macros = {"WIDE": int(wide), "BITS": min(_BITS[out.dtype], 24), **_OUT_QUADS.get(out.dtype, {})}
        stream.draw(kind, blocks, {"OUT": out.dtype}, macros, out, out.size)
        return out
    values = _NUMPY_DRAWS[kind](stream.words(blocks), wide, _BITS[out.dtype]).reshape(-1)[: out.size].reshape(out.shape)
    return wrap_array(dtypes.encode(values, dtypes.DTYPES[out.dtype]), out.dtype, out.queue)


def _word_pairs(words: np.ndarray) -> np.ndarray:
    return words[:, 0::2].astype(np.uint64) | (words[:, 1::2].astype(np.uint64) << _SHIFT)


def _uniform_words(words: np.ndarray, wide: bool, bits: int) -> np.ndarray:
    if wide:
        return (_word_pairs(words) >> np.uint64(11)) * 2.0**-53
    return ((words >> np.uint32(32 - bits)) * 2.0**-bits).astype(np.float32)


def _normal_words(words: np.ndarray, wide: bool, bits: int) -> np.ndarray:
    del bits
    values = _word_pairs(words) >> np.uint64(11) if wide else words >> np.uint32(8)
    unit = 2.0**-53 if wide else 2.0**-24
    radius = np.sqrt(-2 * np.log((values[:, 0::2].astype(np.float64) + 1) * unit))
    turn = 2 * np.pi * (values[:, 1::2] * unit)
    both = np.stack([radius * np.cos(turn), radius * np.sin(turn)], axis=2)
    return both if wide else both.astype(np.float32)


_NUMPY_DRAWS = {"uniform": _uniform_words, "normal": _normal_words}


def _draws(stream: RandomStream, shape: tuple[int, ...]) -> np.ndarray:
    """Return the next float32 numbers, uniform in [0, 1), of a stream on the NumPy backend."""
    size = math.prod(shape)
    return _uniform_words(stream.words(-(-size // 4)), False, 24).reshape(-1)[:size].reshape(shape)


@op(vjp=None, ref=None, at_once=True)
def rand(*shape: Any, dtype: str = "float32", queue: Any = None) -> Tensor:
    """Values uniform in [0, 1).

    >>> rand(2, 3).shape
    (2, 3)
    """
    return _fill_float("uniform", _empty_of("rand", shape, dtype, queue))


@op(vjp=None, ref=None, at_once=True)
def randn(*shape: Any, dtype: str = "float32", queue: Any = None) -> Tensor:
    """Values of the standard normal distribution."""
    return _fill_float("normal", _empty_of("randn", shape, dtype, queue))


def _high_word(a: np.ndarray, b: int) -> np.ndarray:
    """Return the upper 64 bits of the products of 64-bit numbers with ``b``, where 0 means 2^64."""
    if b == 0:
        return a
    a0, a1, b0, b1 = a & _LOW, a >> _SHIFT, np.uint64(b & 0xFFFFFFFF), np.uint64(b >> 32)
    middle = a1 * b0 + (a0 * b0 >> _SHIFT)
    other = a0 * b1 + (middle & _LOW)
    return a1 * b1 + (middle >> _SHIFT) + (other >> _SHIFT)


#: The largest integer n for which a dtype holds all integers from 0 to n.
EXACT_INTEGERS = {"float16": 2**11, "bfloat16": 2**8, "float32": 2**24, "float64": 2**53, "bool": 1}


def check_integers(name: str, low: int, high: int, dtype: str) -> None:
    """Raise unless ``dtype`` holds all integers from ``low`` up to but not including ``high``, and there is one."""
    if (exact := EXACT_INTEGERS.get(dtype)) is not None:
        least, most = -exact * (dtype != "bool"), exact
    else:
        limits = np.iinfo(dtypes.DTYPES[dtype].storage)
        least, most = int(limits.min), int(limits.max)
    if not least <= low < high <= most + 1:
        what = f"low must be below high, and {dtype} must hold all integers from low to high - 1"
        raise ShapeError(message(name, what, "choose a wider dtype", low=low, high=high))


@op(vjp=None, ref=None, at_once=True)
def randint(low: int = 0, high: int | None = None, shape: SizesArgument = (), *, dtype: str = "int64", queue: Any = None) -> Tensor:
    """Draw integers from ``low`` up to but not including ``high``; ``randint(n, shape=...)`` starts at 0."""
    low, high = 0 if high is None else low, low if high is None else high
    row = dtypes.lookup(dtype, "randint")
    if row.is_float or row.name == "bool":
        raise DtypeError(message("randint", "dtype must be an integer type", dtype=row.name))
    check_integers("randint", low, high, row.name)
    out = Tensor.empty(_checked_shape("randint", (shape,)), row.name, queue=queue)
    stream, blocks, width = stream_of(out.queue), -(-out.size // 2), (high - low) % 2**64
    if out.array is None:
        stream.draw("integers", blocks, {"OUT": row.name}, {}, out, out.size, low, width - 2**64 if width >= 2**63 else width)
        return out
    offsets = _high_word(_word_pairs(stream.words(blocks)), width).reshape(-1)[: out.size]
    values = (offsets + np.uint64(low % 2**64)).view(np.int64)
    return wrap_array(values.astype(row.storage).reshape(out.shape), row.name, out.queue)


@op(vjp=None, ref=None, at_once=True)
def bernoulli(p: Tensor) -> Tensor:
    """Draw 1 with probability ``p[i]``, else 0, in the dtype and shape of ``p``; NaN where ``p[i]`` is not from 0 to 1."""
    (p,) = launch.as_tensors("bernoulli", p)
    launch.check_dtype("bernoulli", p, name="p")
    stream, blocks = stream_of(p.queue), -(-p.size // 4)
    if p.array is None:
        out = Tensor.empty(p.shape, p.dtype, queue=p.queue)
        stream.draw("bernoulli", blocks, {"OUT": p.dtype, "P": p.dtype}, {}, p, out, p.size)
        return out
    draws = _draws(stream, p.shape)
    return launch.run_cpu(lambda values: np.where((values >= 0) & (values <= 1), draws < values, np.float32(np.nan)), p)


# ---- dropout


_MASKED_SCALE = Pointwise("masked_scale", "WHERE(v1, v0 * scale, 0)", (None, None), np.multiply, params={"scale": 1.0})


@op(vjp=None, ref=None, at_once=True)
def keep_mask(shape: SizesArgument = (), p: float = 0.5, *, queue: Any = None) -> Tensor:
    """Draw uint8 values: 0 with probability ``p``, else 1."""
    out = Tensor.empty(_checked_shape("keep_mask", (shape,)), "uint8", queue=queue)
    stream, blocks = stream_of(out.queue), -(-out.size // 4)
    if out.array is None:
        stream.draw("keep_mask", blocks, {}, {}, out, out.size, float(p))
        return out
    return wrap_array((_draws(stream, out.shape) >= np.float32(p)).astype(np.uint8), "uint8", out.queue)


@op(
    vjp=lambda F, g, mask, scale: (F.masked_scale(g, mask, scale), None),
    ref=lambda x, mask, scale: np.where(mask, x * scale, 0),
    samples=[
        S((3, 5), (3, 5), dtypes=("float32", "uint8"), high=(1.0, 2), low=(-1.0, 0), scale=1.5),
        S((0,), (0,), dtypes=("float32", "uint8"), low=0, high=2, scale=2.0),
    ],
    errors=[
        (S((3,), (4,), dtypes=("float32", "uint8"), low=0, high=2, scale=2.0), r"\[masked_scale\] x and mask must have the same shape")
    ],
)
def masked_scale(x: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Return ``x * scale`` where ``mask`` (uint8 or bool) is not 0, else 0: dropout and its gradient."""
    x, mask = launch.as_tensors("masked_scale", x, mask)
    launch.check_dtype("masked_scale", x)
    launch.check_dtype("masked_scale", mask, ("uint8", "bool"), "mask")
    if x.shape != mask.shape:
        raise ShapeError(message("masked_scale", "x and mask must have the same shape", **{"x.shape": x.shape, "mask.shape": mask.shape}))
    return run(_MASKED_SCALE, (x, mask, float(scale)))


@composite(
    ref=lambda x, p=0.5, training=True: x if not training or p == 0 else x * 0,
    samples=[S((3, 5), training=False), S((3, 5), p=0.0), S((4,), p=1.0)],
    errors=[(S((3,), p=1.5), r"\[dropout\] p must be a number from 0 to 1; p=1\.5")],
)
def dropout(F: Any, x: Tensor, p: float = 0.5, training: bool = True) -> Tensor:
    """Zero elements with probability ``p`` and scale the rest by ``1 / (1 - p)``; the identity unless ``training``."""
    (x,) = launch.as_tensors("dropout", x)
    check_probability("dropout", "p", p)
    if not training or p == 0:
        return x
    mask = F.keep_mask(x.shape, p, queue=x.queue)
    return F.masked_scale(x, mask, 1 / (1 - p) if p < 1 else 0.0)
