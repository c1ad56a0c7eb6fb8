"""Attention over a preallocated cache of keys and values, for decoding token by token."""

from __future__ import annotations

from typing import Any

import numpy as np

from netcl.core.capabilities import DeviceProfile
from netcl.core.device import profile_of
from netcl.core.dtype import DTYPES, encode, sum_dtype
from netcl.core.errors import ShapeError, message
from netcl.core.tensor import Tensor
from netcl.core.writes import wrote
from netcl.engine import launch
from netcl.engine.registry import S, op
from netcl.ops.attention.geometry import score_scale
from netcl.ops.attention.rope import rope_arrays
from netcl.ops.pointwise import cast

QUERIES_AT_ONCE = 8  # queries of a work-group, whose sums are kept in registers
GROUP_ITEMS = 512, 256  # work-items of a GPU's work-group: if all work-groups can run at the same time, and otherwise
KEYS_AT_ONCE = 4  # keys whose loads a work-item of a GPU waits for together
KEY_LOADS, KEY_PARTS = 4, 16  # loads of a work-item for a key, and these times queries, at most
RANGE_LIMITS = (64, 512)  # positions of a work-group, at least and at most
ONE_RANGE = 256  # positions that a work-group of a GPU takes alone: combining ranges is one launch more
SCORES_AT_ONCE = 2048  # scores of a work-group, in local memory
CPU_SCORES = 16384  # the same of a CPU, whose local memory is a cache, if heads suffice to keep all compute units busy
SUMS_AT_ONCE = 8  # vectors of sums of a CPU: their additions do not wait for each other
GROUPS_PER_CU = 2  # work-groups per compute unit that keep a device busy


def round_positions(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Round keys or values for an int8 cache; returns the codes and a scale for each head and position."""
    most = np.abs(x).max(axis=-1, keepdims=True)
    inverse = np.divide(127, most, out=np.zeros_like(most), where=most > 0)
    return np.rint(x * inverse).astype(np.int8), (most / 127).astype(np.float32)


def _split_projection(q, groups, size, lengths, frequencies, query_norm, key_norm, eps):
    """Split a projection into heads of queries, keys and values. Normalize queries and keys by RMS norms, and rotate them by position."""
    heads = np.moveaxis(q.reshape(*q.shape[:2], -1, size), 2, 1).astype(np.float64)
    for weight, part in ((query_norm, np.s_[:, : -2 * groups]), (key_norm, np.s_[:, -2 * groups : -groups])):
        if weight is not None:
            heads[part] *= weight / np.sqrt((heads[part] ** 2).mean(-1, keepdims=True) + eps)
    if frequencies is not None:
        turned, places = np.s_[:, :-groups, :, : 2 * len(frequencies)], np.asarray(lengths)[:, None] + np.arange(q.shape[1])
        heads[turned] = rope_arrays(heads[turned], places, frequencies, 0.0, 0, False, False)
    return np.split(heads, [heads.shape[1] - 2 * groups, heads.shape[1] - groups], axis=1)


def cached_arrays(q, k, v, keys, values, lengths, key_scales=None, value_scales=None, frequencies=None, query_norm=None, key_norm=None,
                scale=None, window=0, softcap=0.0, eps=1e-6):  # fmt: skip
    """Compute the attention position by position, without writing to the cache."""
    if packed := k is None:
        q, k, v = _split_projection(q, keys.shape[1], keys.shape[3], lengths, frequencies, query_norm, key_norm, eps)
    if key_scales is not None:
        coded = (keys, key_scales), (values, value_scales), round_positions(k), round_positions(v)
        keys, values, k, v = (codes.astype(np.float64) * scales for codes, scales in coded)
    (batch, heads, new, depth), groups = q.shape, k.shape[1]
    out = np.zeros((*q.shape[:3], v.shape[3]), q.dtype)
    for b in range(batch):
        seen = int(lengths[b])
        both = [np.concatenate([old[b, :, :seen], fresh[b]], 1) for old, fresh in ((keys, k), (values, v))]
        for t in range(new):
            first = max(0, seen + t + 1 - window) if window else 0
            near_keys, near_values = (part[:, first : seen + t + 1] for part in both)
            scores = q[b, :, t].reshape(groups, -1, depth) @ near_keys.swapaxes(1, 2) * score_scale(scale, depth)
            scores = softcap * np.tanh(scores / softcap) if softcap else scores
            shares = np.exp(scores - scores.max(-1, keepdims=True))
            out[b, :, t] = (shares @ near_values / shares.sum(-1, keepdims=True)).reshape(heads, -1)
    return _joined_heads(out) if packed else out


def _joined_heads(out: np.ndarray) -> np.ndarray:
    return np.moveaxis(out, 1, 2).reshape(len(out), out.shape[2], -1)


def _cached_cpu(q: Any, k: Any, v: Any, keys: Any, values: Any, lengths: Any, *more: Any, eps: float, **options: Any) -> Any:
    """Compute the attention with NumPy and write the new keys and values into the cache."""
    scales = more[:2]
    _check_room(lengths, q.shape[-2], keys.shape[2])
    if packed := k is None:
        q, k, v = _split_projection(q, keys.shape[1], keys.shape[3], lengths, *more[2:], eps)  # type: ignore[call-arg]
    result = cached_arrays(*(np.asarray(x, np.float64) for x in (q, k, v, keys, values)), lengths, *scales, **options)  # type: ignore[call-arg]
    for b, seen in enumerate(lengths):
        for cache, fresh, scale in zip((keys, values), (k, v), scales, strict=True):
            place = (b, slice(None), slice(seen, seen + fresh.shape[2]))
            if scale is None:
                cache[place] = fresh[b]
            else:
                cache[place], scale[place] = round_positions(fresh[b])
    return _joined_heads(result) if packed else result


def _check_packed(q: Tensor, keys: Tensor, values: Tensor) -> None:
    fits = q.ndim == 3 and keys.ndim == 4 and keys.shape == values.shape and keys.shape[0] == q.shape[0] and min(keys.shape[1:]) > 0
    if fits:
        heads, rest = divmod(q.shape[2], keys.shape[3])
        fits = not rest and heads > 2 * keys.shape[1] and not heads % keys.shape[1] and 0 < q.shape[1] <= keys.shape[2]
    if not fits:
        what = "without k and v, q must be (batch, new, (heads + 2 * groups) * size) for keys and values of (batch, groups, positions, "
        what += "size), with heads a multiple of groups and new from 1 to positions"
        raise ShapeError(message("cached_attention", what, q=q.shape, keys=keys.shape, values=values.shape))


def _check_tables(k: Any, keys: Tensor, frequencies: Any, norms: list[Any]) -> None:
    size, given = keys.shape[3], [t.shape for t in norms if t is not None]
    apart = keys.dtype == "int8" or k is not None or size % 2 or len({t.dtype for t in norms if t is not None}) > 1
    if (given or frequencies is not None) and (apart or given not in ([], [(size,)] * 2) or 2 * getattr(frequencies, "size", 0) > size):
        what = f"frequencies (at most {size // 2}), and query_norm with key_norm (shape ({size},), one dtype), require k and v to be "
        what += "None, an even head size and a cache that is not int8"
        seen = {"k_given": k is not None, "keys": (keys.shape, keys.dtype), "frequencies": getattr(frequencies, "shape", None),
                "norms": [(t.shape, t.dtype) for t in norms if t is not None]}  # fmt: skip
        raise ShapeError(message("cached_attention", what, "apply rms_norm and rope first", **seen))


def _check_room(lengths: np.ndarray, new: int, positions: int) -> None:
    if max(lengths, default=0) + new > positions:
        what, remedy = f"the {new} new positions must fit into the {positions} positions of the cache", "use a larger cache"
        raise ShapeError(message("cached_attention", what, remedy, lengths=lengths.tolist()))


def _check_cache(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor) -> None:
    shapes: dict[str, Any] = {name: t.shape for name, t in (("q", q), ("k", k), ("v", v), ("keys", keys), ("values", values))}
    if any(len(shape) != 4 for shape in shapes.values()) or q.shape[1] % max(1, k.shape[1]):
        what = "q, k, v, keys and values must be (batch, heads, positions, size), and the number of heads of k must divide that of q"
        raise ShapeError(message("cached_attention", what, **shapes))
    batch, _, new, depth = q.shape
    fits = k.shape[0] == batch and k.shape[2:] == (new, depth) and v.shape[:3] == k.shape[:3]
    same = all(c.shape[:2] == t.shape[:2] and c.shape[3] == t.shape[3] for c, t in ((keys, k), (values, v)))
    if not fits or not same or keys.shape[2] != values.shape[2] or not 0 < new <= keys.shape[2]:
        what = "for q of (batch, heads, new, size), k and v must be (batch, groups, new, size) and keys and values (batch, groups, "
        what += "positions, size), with new from 1 to positions (v and values may have another size)"
        raise ShapeError(message("cached_attention", what, **shapes))


def _check_scales(keys: Tensor, values: Tensor, scales: tuple[Tensor | None, Tensor | None]) -> None:
    for name, cache, scale in (("key_scales", keys, scales[0]), ("value_scales", values, scales[1])):
        wanted = (*cache.shape[:3], 1) if cache.dtype == "int8" else None
        if scale is not None:
            launch.check_dtype("cached_attention", scale, name=name)
        if (None if scale is None else scale.shape) != wanted:
            what = f"{name} must have shape {wanted}" if wanted else f"{name} must be None unless the cache is int8"
            raise ShapeError(message("cached_attention", what, shape=None if scale is None else scale.shape, cache=cache.dtype))


def _lanes_of(x: Tensor, depths: tuple[int, int], most: int) -> tuple[int, str]:
    """Return the number of values per load, a divisor of both ``depths``, and the load in OpenCL C. ``most``: of a load on a CPU."""
    if x.dtype == "float64" or (x.dtype == "float32" and launch.on_cpu_device(x.queue)):
        lanes = next((n for n in (16, 8, 4) if n <= max(4, most) and not any(d % n for d in depths)), 1)
        return lanes, f"vload{lanes}(0, p)" if lanes > 1 else "(*(p))"
    return (4, launch.QUADS[x.dtype]) if not any(d % 4 for d in depths) else (1, "X_LOAD((p), 0)")


def _items(profile: DeviceProfile, count: int, rows: int, others: int, size: int) -> int:
    """Return the size of ``count`` work-groups of a GPU, whose local memory has ``others`` elements of ``size`` bytes besides sums."""
    most = min(GROUP_ITEMS[count > profile.max_compute_units], int(profile.max_work_group_size))
    fit = [n for n in (32, 64, 128, 256, 512) if n <= most and (n * (KEYS_AT_ONCE * rows + 1) + others) * size <= profile.local_mem_size]
    return fit[-1] if fit else 32


def _mates(loads: int, rows: int) -> int:
    """Return how many work-items share a key of ``loads`` loads: as few as have each few loads, and few products with the queries."""
    shares = [n for n in (1, 2, 4, 8, 16, 32) if loads % n == 0]
    return next((n for n in shares if loads // n * rows <= KEY_PARTS and loads // n <= KEY_LOADS), shares[-1])


_TABLES = "".join(f"__global const {t}, " for t in ("REAL* frequencies", "N_T* query_norm", "N_T* key_norm"))
_CACHE_SCALES = "__global S_T* restrict key_scales, __global S_T* restrict value_scales, "
_T = {"dtypes": (None,) * 5 + ("int32",), "low": (-1.0,) * 5 + (0,)}


def _coded_sample(q: tuple[int, ...], cache: tuple[int, ...], **options: Any) -> Any:
    rng, new = np.random.default_rng(q[2]), (*cache[:2], q[2], cache[3])
    (keys, key_scales), (values, value_scales) = (round_positions(rng.standard_normal(cache)) for _ in range(2))
    lengths = np.arange(q[0], dtype=np.int32) + 4
    return S(q, new, new, keys, values, lengths, key_scales, value_scales, **options)


@op(
    vjp=None, ref=cached_arrays, tol=4,
    samples=[S((2, 4, 1, 8), (2, 2, 1, 8), (2, 2, 1, 8), (2, 2, 9, 8), (2, 2, 9, 8), (2,), high=(1.0,) * 5 + (8,), **_T),
             S((1, 6, 3, 12), (1, 2, 3, 12), (1, 2, 3, 5), (1, 2, 130, 12), (1, 2, 130, 5), (1,), high=(1.0,) * 5 + (120,), window=4, **_T),
             S((2, 2, 1, 16), (2, 2, 1, 16), (2, 2, 1, 16), (2, 2, 70, 16), (2, 2, 70, 16), (2,), high=(1.0,) * 5 + (66,), softcap=2.0,
               scale=0.5, **_T),
             S((2, 3, 32), None, None, (2, 2, 70, 4), (2, 2, 70, 4), (2,), high=(1.0,) * 5 + (66,), **_T),
             S((2, 3, 32), None, None, (2, 2, 70, 4), (2, 2, 70, 4), (2,), None, None, (1,), (4,), (4,), dtypes=(*(None,) * 5, "int32",
               *(None,) * 5), low=(*(-1.0,) * 5, 0, *(-1.0,) * 5), high=(*(1.0,) * 5, 66, *(1.0,) * 5)),
             _coded_sample((2, 4, 5, 8), (2, 2, 70, 8), window=5), _coded_sample((1, 2, 1, 6), (1, 2, 9, 6))],
    errors=[(S((1, 3, 1, 8), (1, 2, 1, 8), (1, 2, 1, 8), (1, 2, 9, 8), (1, 2, 9, 8), (1,), **_T), r"heads of k must divide that of q"),
            (S((1, 2, 1, 8), (1, 2, 1, 8), (1, 2, 1, 8), (1, 2, 9, 4), (1, 2, 9, 8), (1,), **_T), r"k and v must be \(batch, groups, new"),
            (S((1, 2, 1, 8), (1, 2, 1, 8), (1, 2, 1, 8), (1, 2, 9, 8), (1, 2, 9, 8), np.zeros(1, np.int32), (1, 2, 9, 1)),
             r"key_scales must be None unless the cache is int8")],
)  # fmt: skip
def cached_attention(
    q: Tensor, k: Tensor | None, v: Tensor | None, keys: Tensor, values: Tensor, lengths: Tensor, key_scales: Tensor | None = None,
    value_scales: Tensor | None = None, frequencies: Tensor | None = None, query_norm: Tensor | None = None,
    key_norm: Tensor | None = None, *, scale: float | None = None, window: int = 0, softcap: float = 0.0, eps: float = 1e-6,
) -> Tensor:  # fmt: skip
    """Write the keys and values of new positions to a cache, and return the causal attention of these positions over the cache.

    - **q**: queries ``(batch, heads, new, size)``. **k**, **v**: keys and values of the same positions; they may have fewer heads.
      With ``None`` for k and v, q is a projection of all three side by side, ``(batch, new, (heads + 2 * kv_heads) * size)``, and
      the result is ``(batch, new, heads * size)``.
    - **keys**, **values**: the cache, ``(batch, kv_heads, positions, size)``; changed in place. A cache of int8 has **key_scales** and
      **value_scales** ``(batch, kv_heads, positions, 1)``: a position is rounded when it is written, also for the queries
      of the call that writes it.
    - **lengths**: ``(batch,)`` integers, the number of filled positions of each sequence. They are read on the device, so that a compiled
      step works for every length. The new positions must fit into the cache. The NumPy backend checks this, and so does every backend
      if ``lengths`` is not a tensor. Otherwise keys and values past the end are neither written nor used.
    - **query_norm**, **key_norm**, **eps**: weights and epsilon of RMS norms over the heads of a projection. **frequencies**: rotate these
      heads by :func:`rope` at positions ``lengths``, ``lengths + 1``, ..; each frequency rotates two elements.
    - **window**: how many positions a query sees, itself included; 0 for all. **softcap**: if not 0, a score s becomes
      ``softcap * tanh(s / softcap)``.

    There is no gradient: use :func:`scaled_dot_product_attention` to train.
    """
    given: object = lengths
    q, k, v, keys, values, lengths, *scales, frequencies, query_norm, key_norm = launch.as_tensors(
        "cached_attention", q, k, v, keys, values, lengths, key_scales, value_scales, frequencies, query_norm, key_norm
    )
    for name, t in (("q", q), ("k", k), ("v", v), ("keys", keys), ("values", values)):
        if t is not None and not (t.dtype == "int8" and name in ("keys", "values")):
            launch.check_dtype("cached_attention", t, (q.dtype,) if q.dtype in launch.FLOATS else launch.FLOATS, name)
    if k is None or v is None:
        _check_packed(q, keys, values)
    else:
        _check_cache(q, k, v, keys, values)
    if lengths.shape != q.shape[:1] or lengths.dtype not in ("int32", "int64"):
        what = "lengths must be one integer (int32 or int64) per sequence"
        raise ShapeError(message("cached_attention", what, lengths=lengths.shape, dtype=lengths.dtype, batch=q.shape[0]))
    _check_scales(keys, values, (scales[0], scales[1]))
    _check_tables(k, keys, frequencies, [query_norm, key_norm])
    if not isinstance(given, Tensor):
        _check_room(np.asarray(given), q.shape[-2], keys.shape[2])
    wrote((keys, values, *(scale for scale in scales if scale is not None)))
    options = {"scale": scale, "window": window, "softcap": softcap, "eps": eps}
    tables = (frequencies, query_norm, key_norm)
    if q.backend == "cpu":
        arrays = [launch.decoded(cache) for cache in (keys, values)]  # copies, of a cache of 16 bits
        result = launch.run_cpu(_cached_cpu, q, k, v, *arrays, lengths, *scales, *tables, dtype=q.dtype, **options)
        for cache, array in zip((keys, values), arrays, strict=True):
            if array is not cache.array:
                np.copyto(cache.array, encode(array, DTYPES[cache.dtype]))  # type: ignore[arg-type]
        return result
    return _cached_cl(q, k, v, (keys, values, *scales), tables, lengths, score_scale(scale, keys.shape[3]), window, softcap, eps)


def _cached_cl(q: Any, k: Any, v: Any, cache: tuple[Any, ...], tables: tuple[Any, ...], lengths: Any, scale: float, window: int,
               softcap: float, eps: float) -> Tensor:  # fmt: skip
    keys, values = cache[:2]
    batch, (groups, length, wide), depth, packed = q.shape[0], values.shape[1:], keys.shape[3], k is None
    heads, new = (q.shape[2] // depth - 2 * groups, q.shape[1]) if packed else q.shape[1:3]
    profile, on_cpu = profile_of(q.queue), launch.on_cpu_device(q.queue)
    out = Tensor.empty((batch, new, heads * wide) if packed else (*q.shape[:3], wide), q.dtype, queue=q.queue)
    k, v = (q, q) if packed else (k, v)
    rows = min(QUERIES_AT_ONCE, heads // groups * new)
    blocks = -(-(heads // groups * new) // rows)
    even = length * batch * groups * blocks // (GROUPS_PER_CU * profile.max_compute_units)  # all units have work
    span = min(RANGE_LIMITS[1], SCORES_AT_ONCE // rows, max(RANGE_LIMITS[0], 1 << max(0, even.bit_length() - 1)))
    alone = batch * groups * blocks >= profile.max_compute_units if on_cpu else length <= ONE_RANGE
    if alone and rows * length <= (CPU_SCORES if on_cpu else SCORES_AT_ONCE):
        span = -(-length // RANGE_LIMITS[0]) * RANGE_LIMITS[0]  # caches of similar lengths share their programs
    ranges, new_rows = -(-length // span), 0 if all(t is None for t in tables) else new
    lanes, read = _lanes_of(q, (depth, wide), SUMS_AT_ONCE * profile.vector_width // rows)
    sums_in, real = sum_dtype(q.dtype), DTYPES[q.dtype].c_compute
    operands = {"X": q.dtype, "P": lengths.dtype, "Y": q.dtype if ranges == 1 else sums_in}
    others = rows * (span + 2) + (rows + new_rows) * (depth + 8)
    items = 1 if on_cpu else _items(profile, ranges * batch * groups * blocks, rows, others, DTYPES[sums_in].itemsize)
    defines: dict[str, Any] = {
        "ITEMS": items, "KEYS": KEYS_AT_ONCE, "RANGE": span, "ROWS": rows, "DEPTH": depth, "DEPTH_V": wide, "VW": lanes, "REAL": real,
        "SPLITS": int(ranges > 1), "PACKED": int(packed), "CODED": int(keys.dtype == "int8"), "X_LANES(p)": read, "PART": 1,
        "MATES": 1 if on_cpu else _mates(depth // lanes, rows), "PUTS": int(blocks == 1),
    }  # fmt: skip
    turned: list[Any] = []
    if any(t is not None for t in tables):
        turned = [q if tables[0] is None else cast(tables[0], sums_in), *(q if t is None else t for t in tables[1:])]
        operands["N"] = turned[1].dtype
    normed = tables[1] is not None
    defines |= {"NEW": new_rows, "ROTARY": 0 if tables[0] is None else 2 * tables[0].size, "EPS": float(eps) if normed else 0.0,
                "HEAD_NORM": int(normed), "MORE_POINTERS": _CACHE_SCALES * (cache[2] is not None) + _TABLES * bool(turned)}  # fmt: skip
    if cache[2] is not None:
        operands["S"] = cache[2].dtype
    exps, text = launch.exponential(q.queue, real, 4) if span % 4 == 0 else ({}, "")
    kernel = launch.kernel(q.queue, __file__, "cached.cl", "cached_attention", operands, defines | exps | {"FOURS": int(bool(exps))}, text)
    parts = out if ranges == 1 else Tensor.empty((out.size * ranges,), sums_in, queue=q.queue)
    sums = parts if ranges == 1 else Tensor.empty((2 * ranges * batch * heads * new,), sums_in, queue=q.queue)
    pointers = (q, k, v, *(t for t in cache if t is not None), *turned, lengths, parts, sums)
    numbers = (heads, groups, new, length, window, ranges, scale, softcap)
    if cache[2] is not None and blocks > 1:
        put = launch.kernel(q.queue, __file__, "cached.cl", "round_positions", operands, defines | {"PART": 3})
        put(q.queue, (new * items, batch * groups), (items, 1), k, v, *cache, lengths, *numbers[:4])
    kernel(q.queue, (ranges * items, batch * groups, blocks), (items, 1, 1), *pointers, *numbers)
    if ranges > 1:
        combine = launch.kernel(q.queue, __file__, "cached.cl", "combine_ranges", operands | {"Y": q.dtype}, defines | {"PART": 2})
        combine(q.queue, (out.size,), (launch.LOCAL_1D,), parts, sums, out, out.size, ranges)
    return out
