"""Attention layers, ``softmax(q k^T / sqrt(d) + mask) v`` per head, and the cache of keys and values of a decoder."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

import netcl.autograd as ag
from netcl.core.errors import DtypeError, ShapeError, message
from netcl.core.tensor import Tensor
from netcl.nn import init
from netcl.nn.linear import Linear
from netcl.nn.module import Module
from netcl.nn.parameter import empty


class _WithoutGradient(ag.Function):
    """The attention over a cache: its first argument, which raises when it is differentiated, because a cache is in no graph."""

    @staticmethod
    def forward(ctx: object, out: Tensor, *parts: Tensor) -> Tensor:
        return out

    @staticmethod
    def backward(ctx: object, *gradients: object) -> None:
        raise RuntimeError(message("KVCache", "attention over a cache has no gradient", "train without a cache"))


class KVCache(Module):
    """The cached keys and values of a decoder, per layer, so that a step computes only the new positions.

    - **layers**: how many attention layers share the cache.
    - **capacity**: the maximum number of positions, allocated at once; more raise an error. By default the memory grows, at least doubling.
    - **dtype**: ``int8`` rounds keys and values to int8, with a float32 scale per head and position. By default they keep their dtype.

    Attention layers call the cache with new queries, keys and values. The cache appends the keys and values in place and returns the
    attention over all positions. ``length`` is the number of cached positions. Sequences of different lengths are padded at their ends;
    ``set_lengths`` then sets the number of valid positions of each sequence.

    >>> from netcl import nn
    >>> cache = nn.KVCache(1)
    >>> attention = nn.CausalSelfAttention(8, 2)
    >>> y = attention([[[0.0] * 8] * 3], cache=cache)
    >>> cache.length
    3
    """

    lengths: Tensor | None
    most_new = 8  # positions per call up to which the cached kernel is used; more use the kernels for whole sequences of one length

    def __init__(self, layers: int, capacity: int | None = None, dtype: str | None = None):
        super().__init__()
        if dtype not in (None, "int8"):
            raise DtypeError(message("KVCache", 'dtype must be "int8", or None for the dtype of the model', dtype=dtype))
        self.layers, self.capacity, self.dtype = layers, capacity, dtype
        self.register_buffer("lengths", None, persistent=False)  # positions of each sequence, on the device
        self._count = self._room = 0
        self._even = True  # whether all sequences have the same length
        self._ahead = 0  # positions that were reserved before the call that writes them
        self._places: Tensor | None = None
        self._elsewhere: dict[Any, Tensor] = {}  # the lengths on the other devices of a model that is split over several
        self.ids: Tensor | None = None  # (batch, positions): the tokens of the cache, for models that may have to compute them again

    @property
    def length(self) -> int:
        """The number of positions in the cache; if lengths differ, the length of the longest sequence."""
        return self._count - self._ahead

    def reserve(self, new: int) -> None:
        """Reserve memory for ``new`` more positions. Calls for layer 0 do this themselves unless :meth:`reserves_ahead` is on."""
        wanted = self._count + new
        if self.capacity is not None and wanted > self.capacity:
            what, remedy = "positions must not exceed the capacity", "use a KVCache with a larger capacity, or reset() this one"
            raise ShapeError(message("KVCache", what, remedy, capacity=self.capacity, length=self._count, new=new))
        if wanted > self._room:
            self._room = self.capacity or max(64, wanted, 2 * self._room)
            for name, old in list(self.named_buffers(recurse=False)):
                if name != "lengths":
                    setattr(self, name, ag.pad(old, (0, 0, 0, self._room - old.shape[2])))
        self._count = wanted

    def reserves_ahead(self, positions: int) -> int:
        """Expect the caller to :meth:`reserve` ``positions`` before each call (compiled steps need this). With 0, calls reserve memory.

        Returns the previous number.
        """
        before, self._ahead = self._ahead, positions
        return before

    def positions(self, batch: int, new: int, queue: Any) -> Tensor:
        """Return the indices of the next ``new`` positions of each sequence, ``(batch, new)``; computed on the device."""
        if self._places is None or self._places.shape != (batch, new):
            steps = Tensor.from_host(queue, np.arange(new, dtype=np.int32)[None])
            self._places = ag.add(ag.reshape(self._lengths(batch, queue), (batch, 1)), steps)
        return self._places

    def _lengths(self, batch: int, queue: Any) -> Tensor:
        if self.lengths is None:
            self.lengths = Tensor.zeros((batch,), "int32", queue=queue)
        if self.lengths.shape != (batch,):
            what, remedy = "the batch size must be that of the cache", "use a new KVCache"
            raise ShapeError(message("KVCache", what, remedy, cache=self.lengths.size, given=batch))
        if self.lengths.queue is not queue:
            if queue not in self._elsewhere:
                self._elsewhere[queue] = self.lengths.to(queue)
            return self._elsewhere[queue]
        return self.lengths

    def forward(self, layer: int, q: Tensor, k: Tensor | None = None, v: Tensor | None = None, scale: float | None = None, window: int = 0,
                softcap: float = 0.0, heads: int = 0, tables: Sequence[Tensor | None] = (), eps: float = 1e-6) -> Tensor:  # fmt: skip
        """Append new keys and values; return the attention of the new queries, ``(batch, heads, new, size)``, over all positions.

        With ``heads`` and without ``k`` and ``v``, ``q`` holds queries, keys and values side by side, ``(batch, new, 3 * heads * size)``,
        and the result is ``(batch, new, heads * size)``. If :meth:`rotates`, ``tables`` are the RoPE frequencies and the norm weights of
        queries and keys. The other options are those of :func:`netcl.cached_attention`.
        """
        batch, new = q.shape[0], q.shape[-2]
        lengths = self.begin(batch, new, q.queue) if layer == 0 else self._lengths(batch, q.queue)
        whole = k is None and self.takes_projections(layer, new)
        apart = k is None and not whole
        if apart:
            q, k, v = split_projections(q, heads)
        keys, values = (self._memory(f"{name}{layer}", x) for name, x in (("keys", k), ("values", v)))
        scales = [getattr(self, f"{name}_scales{layer}", None) for name in ("key", "value")]
        joined = new <= self.most_new or softcap or not self._even
        if joined:
            options: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap, "eps": eps}
            out = ag.cached_attention(q, k, v, keys, values, lengths, *scales, *tables, **options)
        else:
            out = self._attend_in_tiles(q, k, v, (keys, values), scales, scale, window)
        if ag.is_grad_enabled() and (joined or self._count > new or self.dtype is not None):
            out = _WithoutGradient.apply(out, *(x for x in (q, k, v) if x is not None))
        if layer == self.layers - 1:
            self.end(new)
        return join_heads(out) if apart else out

    def begin(self, batch: int, new: int, queue: Any) -> Tensor:
        """Begin a step of ``new`` positions; returns the lengths before it. Calls for layer 0 do this themselves."""
        lengths = self._lengths(batch, queue)
        if not self._ahead:
            self.reserve(new)
        return lengths

    def end(self, new: int) -> None:
        """End a step of ``new`` positions: they count from now on. Calls for the last layer do this themselves."""
        self._places = None
        self._elsewhere.clear()
        ag.add(self.lengths, new, out=self.lengths)  # type: ignore[arg-type]

    def memory(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values of a layer that has been called before."""
        return getattr(self, f"keys{layer}"), getattr(self, f"values{layer}")

    def takes_projections(self, layer: int, new: int) -> bool:
        """Whether the kernel takes queries, keys and values of ``new`` positions side by side, in one tensor."""
        return new <= self.most_new and getattr(self, f"keys{layer}", None) is not None

    def rotates(self, positions: Tensor | None) -> bool:
        """Whether the kernel can normalize and rotate heads: if the cache is not int8, for ``positions`` of :meth:`positions`."""
        return self.dtype is None and positions is not None and positions is self._places

    def _add_buffer(self, name: str, like: Tensor, size: int, dtype: str) -> Tensor:
        self.register_buffer(name, Tensor.zeros((*like.shape[:2], self._room, size), dtype, queue=like.queue), persistent=False)
        return getattr(self, name)

    def _memory(self, name: str, like: Any) -> Tensor:
        kept = getattr(self, name, None)
        if like is None:
            return kept  # type: ignore[return-value]
        if kept is None:
            if self.dtype is not None:
                self._add_buffer(name.replace("s", "_scales"), like, 1, "float32")
            return self._add_buffer(name, like, like.shape[3], self.dtype or like.dtype)
        if kept.shape[:2] != like.shape[:2]:
            what, remedy = "the batch size and number of heads must be those of the cache", "use a new KVCache"
            raise ShapeError(message("KVCache", what, remedy, cache=kept.shape, given=like.shape))
        return kept

    def _attend_in_tiles(self, q: Any, k: Any, v: Any, kept: Any, scales: Any, scale: float | None, window: int) -> Tensor:
        new, total = q.shape[2], self._count
        seen = total - new
        with ag.no_grad():
            for x, cache, factors in zip((k, v), kept, scales, strict=True):
                if factors is None:
                    cache[:, :, seen:total] = x.detach()
                else:
                    x = ag.cast(x.detach(), "float32")
                    most = ag.amax(ag.abs(x), axis=-1, keepdims=True)
                    cache[:, :, seen:total] = ag.cast(ag.round(ag.mul(x, ag.div(127, ag.maximum(most, 1e-30)))), "int8")
                    factors[:, :, seen:total] = ag.div(most, 127)
        if seen or scales[0] is not None:
            k, v = (ag.narrow(x, 2, 0, total) for x in kept)
            if scales[0] is not None:
                past = [ag.mul(ag.cast(x, "float32"), ag.narrow(s, 2, 0, total)) for x, s in zip((k, v), scales, strict=True)]
                k, v = (ag.cast(x, q.dtype) for x in past)
        mask, causal = causal_mask(q.queue, new, seen, window or None)
        return ag.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=scale)

    def set_lengths(self, lengths: Sequence[int]) -> None:
        """Set the number of valid positions of each sequence; new positions overwrite the rest."""
        if self.lengths is None or len(lengths) != self.lengths.size or max(lengths) > self._count or min(lengths) < 0:
            what = f"lengths must be one number from 0 to {self._count} per sequence"
            raise ShapeError(message("KVCache", what, lengths=tuple(lengths), sequences=getattr(self.lengths, "size", 0)))
        self.lengths.write(np.array(lengths, np.int32))
        self._count, self._places, self._even = max(lengths), None, len(set(lengths)) == 1
        self._elsewhere.clear()

    def copy_sequence(self, row: int, source: KVCache, source_row: int = 0) -> None:
        """Copy the keys and values of sequence ``source_row`` of ``source`` to sequence ``row``; call ``set_lengths`` next."""
        count = source.length
        with ag.no_grad():
            for name, memory in self.named_buffers(recurse=False):
                if name != "lengths":
                    one = ag.narrow(getattr(source, name), 0, source_row, 1)
                    memory[row : row + 1, :, :count] = ag.narrow(one, 2, 0, count)
        self._count = max(self._count, count)
        self.ids = None if source.ids is None else ag.narrow(source.ids, 0, source_row, 1)

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace the contents with one sequence; ``tensors`` maps buffer names to tensors ``(1, heads, positions, size)``."""
        count = next(iter(tensors.values())).shape[2]
        self.reset()
        self.reserve(count)
        with ag.no_grad():
            for name, given in tensors.items():
                if getattr(self, name, None) is None:
                    self._add_buffer(name, given, given.shape[3], given.dtype)
                getattr(self, name)[:, :, :count] = given
            self._lengths(1, given.queue)
        self.set_lengths([count])

    def truncate(self, length: int) -> None:
        """Drop the positions from ``length`` on."""
        if self.lengths is not None and length < self._count:
            self.set_lengths(np.minimum(self.lengths.to_host(), max(0, length)).tolist())

    def reset(self) -> None:
        """Drop all positions. The memory is reused; the batch size, the number of heads and their size must stay the same."""
        self.truncate(0)


def split_heads(x: Tensor, heads: int) -> Tensor:
    """Convert ``(batch, positions, heads * size)`` to ``(batch, heads, positions, size)``."""
    batch, positions, width = x.shape
    if positions == 1:  # a single position needs no copy: a decoder does this for every token
        return ag.reshape(x, (batch, heads, 1, width // heads))
    return ag.permute(ag.reshape(x, (batch, positions, heads, width // heads)), (0, 2, 1, 3))


def split_projections(x: Tensor, heads: int) -> list[Tensor]:
    """Split a projection ``(batch, positions, 3 * heads * size)`` into queries, keys and values ``(batch, heads, positions, size)``."""
    batch, positions, width = x.shape
    size = width // (3 * heads)
    return list(ag.unbind(ag.reshape(x, (batch, positions, 3, heads, size)), axis=2, order=(0, 2, 1, 3)))


def join_heads(x: Tensor) -> Tensor:
    """Convert ``(batch, heads, positions, size)`` to ``(batch, positions, heads * size)``: the inverse of :func:`split_heads`."""
    batch, heads, positions, size = x.shape
    return ag.reshape(x if positions == 1 else ag.permute(x, (0, 2, 1, 3)), (batch, positions, heads * size))


def causal_mask(queue: Any, queries: int, seen: int, window: int | None = None) -> tuple[Tensor | None, bool]:
    """Return the mask and the flag ``is_causal`` for ``queries`` new positions that follow ``seen`` earlier positions.

    Each position attends to the last ``window`` positions. The mask is ``None`` where the flag alone has the same effect.
    """
    total = seen + queries
    near = window is None or window >= total
    if near and (seen == 0 or queries == 1):
        return None, queries > 1
    allowed = np.tril(np.ones((queries, total), bool), seen)
    if not near:
        allowed &= ~np.tril(np.ones((queries, total), bool), seen - (window or 0))
    return Tensor.from_host(queue, allowed), False


def _check_heads(name: str, width: int, heads: int) -> int:
    if heads < 1 or width % heads:
        raise ShapeError(message(name, "the number of heads must be at least 1 and divide the width", width=width, heads=heads))
    return width // heads


class _Causal(Module):
    """Base class of causal self-attention layers: attention with an optional cache, dropout and the output projection."""

    n_embd: int
    dropout: float

    def _attended(self, q: Tensor, k: Tensor, v: Tensor, projection: Linear, cache: KVCache | None, layer: int) -> Tensor:
        if cache is not None:
            out = cache(layer, q, k, v)
        else:
            dropout = self.dropout if self.training else 0.0
            out = ag.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=q.shape[2] > 1)
        return ag.dropout(projection(join_heads(out)), self.dropout, self.training)

    def flops(self, args: tuple[Any, ...], output: Any) -> int:
        batch, positions, _ = output.shape
        return 4 * batch * positions * positions * self.n_embd  # the two products


class CausalSelfAttention(_Causal):
    """Self-attention in which a position attends to itself and earlier positions.

    - **n_embd**: width of the input and the output.
    - **n_head**: number of heads; each has width ``n_embd / n_head``.
    - **bias**: whether projections have a bias. **dropout**: the probability for the result and, without a cache, for attention weights.

    Shapes: ``x`` ``(batch, positions, n_embd)`` in and out. Parameters: ``c_attn`` (for queries, keys and values) and ``c_proj``.
    With a :class:`KVCache`, ``x`` holds only the new positions; ``layer`` is the number of this layer in the cache.

    >>> from netcl import nn, zeros
    >>> nn.CausalSelfAttention(16, 4)(zeros((2, 5, 16))).shape
    (2, 5, 16)
    """

    def __init__(self, n_embd: int, n_head: int, bias: bool = True, dropout: float = 0.0):
        super().__init__()
        _check_heads("CausalSelfAttention", n_embd, n_head)
        self.n_embd, self.n_head, self.dropout = n_embd, n_head, dropout
        self.c_attn = Linear(n_embd, 3 * n_embd, bias)
        self.c_proj = Linear(n_embd, n_embd, bias)

    def forward(self, x: Tensor, cache: KVCache | None = None, layer: int = 0) -> Tensor:
        projected = self.c_attn(x)
        if cache is not None:
            return ag.dropout(self.c_proj(cache(layer, projected, heads=self.n_head)), self.dropout, self.training)
        q, k, v = split_projections(projected, self.n_head)
        return self._attended(q, k, v, self.c_proj, None, layer)


class RotaryAttention(_Causal):
    """Causal self-attention with rotary position embedding (RoPE) of queries and keys.

    - **n_embd**, **n_head**: width and number of heads.
    - **n_kv_head**: number of heads of keys and values, each shared by ``n_head / n_kv_head`` heads of queries; by default ``n_head``.
    - **bias**, **dropout**: as in :class:`CausalSelfAttention`.
    - **base**: pair ``i`` of a head of size ``d`` rotates by ``base ** (-2 i / d)`` radians per position.

    Shapes: ``x`` ``(batch, positions, n_embd)`` in and out. Parameters: ``q_proj``, ``k_proj``, ``v_proj``, ``o_proj``.

    >>> from netcl import nn, zeros
    >>> nn.RotaryAttention(16, 4, n_kv_head=2)(zeros((2, 5, 16))).shape
    (2, 5, 16)
    """

    def __init__(self, n_embd: int, n_head: int, n_kv_head: int | None = None, bias: bool = False, dropout: float = 0.0,
                 base: float = 10000.0):  # fmt: skip
        super().__init__()
        size = _check_heads("RotaryAttention", n_embd, n_head)
        self.n_embd, self.n_head, self.n_kv_head = n_embd, n_head, n_kv_head or n_head
        if size % 2 or n_head % self.n_kv_head:
            what = "the head size must be even (n_embd / n_head), and n_kv_head must divide n_head"
            raise ShapeError(message("RotaryAttention", what, n_embd=n_embd, n_head=n_head, n_kv_head=n_kv_head))
        self.dropout, self.base = dropout, base
        self.q_proj = Linear(n_embd, n_embd, bias)
        self.k_proj = Linear(n_embd, self.n_kv_head * size, bias)
        self.v_proj = Linear(n_embd, self.n_kv_head * size, bias)
        self.o_proj = Linear(n_embd, n_embd, bias)

    def forward(self, x: Tensor, cache: KVCache | None = None, layer: int = 0) -> Tensor:
        places = None if cache is None else cache.positions(x.shape[0], x.shape[1], x.queue)
        q = ag.rope(split_heads(self.q_proj(x), self.n_head), places, base=self.base)
        k = ag.rope(split_heads(self.k_proj(x), self.n_kv_head), places, base=self.base)
        v = split_heads(self.v_proj(x), self.n_kv_head)
        return self._attended(q, k, v, self.o_proj, cache, layer)


class MultiheadAttention(Module):
    """Attention of queries over keys and values, with torch's arguments.

    - **embed_dim**, **num_heads**: width and number of heads.
    - **dropout**: the dropout probability of attention weights. **bias**: whether projections have a bias.
    - **add_bias_kv**, **add_zero_attn**: whether to append a learned key and value (``bias_k``, ``bias_v``), or zeros.
    - **kdim**, **vdim**: widths of keys and values, if they differ from ``embed_dim``.
    - **batch_first**: whether inputs are ``(batch, positions, width)``; by default ``(positions, batch, width)``.

    Returns the result and, if ``need_weights``, the attention weights (their mean over the heads, unless
    ``average_attn_weights=False``), else ``None``. ``attn_mask`` ``(L, S)`` or ``(N * heads, L, S)`` and
    ``key_padding_mask`` ``(N, S)``: bool with True where attention is *not* allowed, or floats that are added. ``is_causal`` applies
    a causal mask. With ``attn_mask``, it states that this mask is causal, as in torch: one of both is used. Parameters: ``in_proj_weight``
    (or ``q_proj_weight``, ``k_proj_weight``, ``v_proj_weight`` if the widths differ), ``in_proj_bias``, ``out_proj``.

    >>> from netcl import nn, zeros
    >>> x = zeros((5, 2, 16))
    >>> y, weights = nn.MultiheadAttention(16, 4)(x, x, x)
    >>> y.shape, weights.shape
    ((5, 2, 16), (2, 5, 5))
    """

    bias_k: Tensor | None
    bias_v: Tensor | None

    def __init__(self, embed_dim: int, num_heads: int, dropout: float = 0.0, bias: bool = True, add_bias_kv: bool = False,
                 add_zero_attn: bool = False, kdim: int | None = None, vdim: int | None = None, batch_first: bool = False):  # fmt: skip
        super().__init__()
        _check_heads("MultiheadAttention", embed_dim, num_heads)
        self.embed_dim, self.num_heads, self.dropout, self.batch_first = embed_dim, num_heads, dropout, batch_first
        self.head_dim = embed_dim // num_heads
        self.kdim, self.vdim = kdim or embed_dim, vdim or embed_dim
        if self.kdim == self.vdim == embed_dim:
            self.in_proj_weight = empty((3 * embed_dim, embed_dim))
        else:
            for name, width in (("q", embed_dim), ("k", self.kdim), ("v", self.vdim)):
                self.register_parameter(f"{name}_proj_weight", empty((embed_dim, width)))
        self.in_proj_bias = empty((3 * embed_dim,)) if bias else None
        self.out_proj = Linear(embed_dim, embed_dim, bias)
        self.bias_k, self.bias_v = (empty((1, 1, embed_dim)) if add_bias_kv else None for _ in range(2))
        self.add_zero_attn = add_zero_attn
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Reinitialize all but ``out_proj.weight``: Xavier for input projections, ``bias_k`` and ``bias_v``, zeros for other biases."""
        for _, parameter in self.named_parameters(recurse=False):
            fill = {1: init.zeros_, 2: init.xavier_uniform_, 3: init.xavier_normal_}[parameter.ndim]
            fill(parameter)
        if self.out_proj.bias is not None:
            init.zeros_(self.out_proj.bias)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Any = None, need_weights: bool = True,
                attn_mask: Any = None, average_attn_weights: bool = True, is_causal: bool = False) -> tuple[Tensor, Any]:  # fmt: skip
        single = query.ndim == 2
        inputs = self._batch_first((query, key, value), single)
        q, k, v = self._projected(*inputs)
        if is_causal and attn_mask is not None:  # torch takes attn_mask for the causal mask
            is_causal = not need_weights and key_padding_mask is None
            attn_mask = None if is_causal else attn_mask
        mask = self._mask(attn_mask, key_padding_mask, q, k)
        longer = self.bias_k is not None or self.add_zero_attn
        if is_causal and (need_weights or longer):
            later = _blocked(~np.tril(np.ones((q.shape[2], k.shape[2]), bool)), q)
            mask, is_causal = later if mask is None else ag.add(mask, later), False
        if longer:
            k, v, mask = self._lengthened(k, v, mask)
        dropout = self.dropout if self.training else 0.0
        if need_weights:
            scores = ag.matmul(ag.mul(q, 1 / math.sqrt(q.shape[-1])), k, transpose_b=True)
            weights = ag.dropout(ag.softmax(scores if mask is None else ag.add(scores, mask), axis=-1), dropout)
            out = ag.matmul(weights, v)
        else:
            out, weights = ag.scaled_dot_product_attention(q, k, v, mask, dropout_p=dropout, is_causal=is_causal), None
        out = self.out_proj(join_heads(out))
        if weights is not None and average_attn_weights:
            weights = ag.mean(weights, axis=1)
        if single:
            return ag.squeeze(out, 0), None if weights is None else ag.squeeze(weights, 0)
        return (out if self.batch_first else ag.transpose(out, 0, 1)), weights

    def _batch_first(self, inputs: Sequence[Tensor], single: bool) -> list[Tensor]:
        """Convert inputs to (batch, positions, width); a tensor that is given several times is converted once."""
        made: dict[int, Tensor] = {}
        for x in inputs:
            if id(x) not in made:
                made[id(x)] = ag.unsqueeze(x, 0) if single else x if self.batch_first else ag.transpose(x, 0, 1)
        return [made[id(x)] for x in inputs]

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> Sequence[Tensor]:
        if getattr(self, "in_proj_weight", None) is None:
            weights = [getattr(self, f"{name}_proj_weight") for name in "qkv"]
        elif query is key and key is value:
            return split_projections(ag.linear(query, self.in_proj_weight, self.in_proj_bias), self.num_heads)
        else:
            weights = list(ag.split(self.in_proj_weight, self.embed_dim, axis=0))
        biases = [None] * 3 if self.in_proj_bias is None else ag.split(self.in_proj_bias, self.embed_dim, axis=0)
        return [split_heads(ag.linear(x, w, b), self.num_heads) for x, w, b in zip((query, key, value), weights, biases, strict=True)]

    def _lengthened(self, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Append the learned and the zero key and value, if any, and allow both in the mask; return keys, values and mask."""
        batch, heads, length, size = k.shape
        ends: list[list[Tensor]] = [[k], [v]]
        for parts, learned in zip(ends, (self.bias_k, self.bias_v), strict=True):
            if learned is not None:
                parts.append(ag.expand(ag.reshape(learned, (1, heads, 1, size)), (batch, heads, 1, size)))
            if self.add_zero_attn:
                parts.append(Tensor.zeros((batch, heads, 1, size), k.dtype, queue=k.queue))
        k, v = (ag.cat(parts, axis=2) for parts in ends)
        return k, v, None if mask is None else ag.pad(mask, (0, k.shape[2] - length))

    def _mask(self, attn_mask: Any, key_padding_mask: Any, q: Tensor, k: Tensor) -> Tensor | None:
        """Combine both masks into one that is added to the scores; ``None`` if there is no mask."""
        batch, heads, length, _ = q.shape
        total = None
        if attn_mask is not None:
            total = _blocked(attn_mask, q)
            total = ag.reshape(total, (batch, heads, length, k.shape[2]) if total.ndim == 3 else (1, 1, *total.shape))
        if key_padding_mask is not None:
            padding = ag.reshape(_blocked(key_padding_mask, q), (batch, 1, 1, k.shape[2]))
            total = padding if total is None else ag.add(total, padding)
        return total

    def flops(self, args: tuple[Any, ...], output: Any) -> int:
        batch_axis = 0 if self.batch_first else 1
        batch, queries = (output[0].shape[batch_axis], output[0].shape[1 - batch_axis]) if output[0].ndim == 3 else (1, output[0].shape[0])
        keys = args[1].size // (batch * self.kdim) if len(args) > 1 else queries
        projections = 2 * batch * self.embed_dim * (queries * self.embed_dim + keys * (self.kdim + self.vdim))
        return projections + 4 * batch * queries * keys * self.embed_dim


def multi_head_attention_forward(
    query: Tensor, key: Tensor, value: Tensor, embed_dim_to_check: int, num_heads: int, in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None, bias_k: Tensor | None, bias_v: Tensor | None, add_zero_attn: bool, dropout_p: float,
    out_proj_weight: Tensor, out_proj_bias: Tensor | None, training: bool = True, key_padding_mask: Any = None, need_weights: bool = True,
    attn_mask: Any = None, use_separate_proj_weight: bool = False, q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None, v_proj_weight: Tensor | None = None, static_k: Tensor | None = None,
    static_v: Tensor | None = None, average_attn_weights: bool = True, is_causal: bool = False,
) -> tuple[Tensor, Any]:  # fmt: skip
    """Run :class:`MultiheadAttention` with given parameters on inputs ``(positions, batch, width)``. Returns a pair like ``forward``."""
    if static_k is not None or static_v is not None:
        raise ValueError(message("multi_head_attention_forward", "static_k and static_v must be None", "use scaled_dot_product_attention"))
    if query.shape[-1] != embed_dim_to_check:
        what = "the last axis of query must have embed_dim_to_check elements"
        raise ShapeError(message("multi_head_attention_forward", what, embed_dim_to_check=embed_dim_to_check, shape=query.shape))
    layer = MultiheadAttention.__new__(MultiheadAttention)
    vars(layer).update(
        embed_dim=embed_dim_to_check, num_heads=num_heads, dropout=dropout_p, batch_first=False, training=training, bias_k=bias_k,
        bias_v=bias_v, add_zero_attn=add_zero_attn, in_proj_weight=None if use_separate_proj_weight else in_proj_weight,
        in_proj_bias=in_proj_bias, q_proj_weight=q_proj_weight, k_proj_weight=k_proj_weight, v_proj_weight=v_proj_weight,
        out_proj=lambda x: ag.linear(x, out_proj_weight, out_proj_bias),
    )  # fmt: skip
    return layer.forward(query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal)


FUNCTIONS = ["multi_head_attention_forward"]


def _blocked(given: Any, like: Tensor) -> Tensor:
    """Return a mask to add to scores like ``like``: a bool or uint8 mask, true where attention is not allowed, as 0 and ``-inf``."""
    mask = given if isinstance(given, Tensor) else Tensor.from_host(like.queue, np.asarray(given))
    return ag.cast(ag.where(mask, -math.inf, 0.0), like.dtype) if mask.dtype in ("bool", "uint8") else mask
