"""The layers that the transformers of :mod:`netcl.models` have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import numpy as np

import netcl.autograd as ag
from netcl import nn
from netcl.autograd import packed
from netcl.core.errors import message
from netcl.core.tensor import Tensor
from netcl.models.config import Experts, ModelConfig, Rope
from netcl.models.tokenizer import Tokenizer
from netcl.nn.attention import KVCache, causal_mask, join_heads, split_heads
from netcl.nn.parameter import placed
from netcl.nn.quantized import QuantizedLinear, decodable, decoded_linear
from netcl.ops.quantized.layout import STRIP_ROWS

ACTIVATION_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": ag.silu,
    "relu": ag.relu,
    "gelu": ag.gelu,
    **dict.fromkeys(("gelu_new", "gelu_pytorch_tanh", "gelu_fast"), lambda x: ag.gelu(x, approximate="tanh")),
    "quick_gelu": lambda x: ag.mul(x, ag.sigmoid(ag.mul(x, 1.702))),
}
# Those that the kernel of a decoding step includes, by their names there.
_DECODED_ACTIVATIONS = {name: "gelu_tanh" if "_" in name else name for name in ACTIVATION_FUNCTIONS if name != "quick_gelu"}


class AttentionSpan(NamedTuple):
    """The values shared by the layers of a forward pass: positions (``None``: from 0), masks by window size, rotary frequencies."""

    positions: Tensor | None
    masks: dict[int | None, tuple[Tensor | None, bool]]
    tables: dict[Rope, Tensor]


def make_norm_layer(config: ModelConfig, width: int | None = None) -> nn.Module:
    """Return a norm layer of the architecture's type."""
    size = config.width if width is None else width
    return nn.RMSNorm(size, config.eps) if config.norm == "rms" else nn.LayerNorm(size, config.eps)


class ConfiguredModel(nn.Module):
    """Base class of models with one configuration, ``config``, and the tokenizer of their file, which ``make_tokenizer`` makes."""

    config: ModelConfig
    make_tokenizer: Any = None
    tokenizer_remedy = "pass token ids"

    def extra_repr(self) -> str:
        return str(self.config)

    def part_config(self, parameter: str) -> ModelConfig:
        """Return the configuration of the part that holds a parameter: here, always the model's."""
        del parameter
        return self.config

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the model's file, made at first use."""
        if self.make_tokenizer is None:
            raise ValueError(message("tokenizer", "the model has no tokenizer", self.tokenizer_remedy))
        return self.make_tokenizer()


class SelfAttention(nn.Module):
    """Self-attention with grouped queries, optional biases, norms of queries and keys, rotary positions, windows and soft-capped scores.

    Parameters: ``q_proj``, ``k_proj``, ``v_proj``, ``o_proj``, and ``q_norm``, ``k_norm`` where the architecture has them. If
    ``merge()`` returns True, ``qkv_proj`` replaces the first three.
    """

    q_proj: Any
    k_proj: Any
    v_proj: Any
    qkv_proj: Any = None

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        size = config.head_size
        self.heads, self.kv_heads, self.size, self.layer = config.heads, config.kv_heads, size, layer
        self.q_proj = nn.Linear(config.width, config.heads * size, config.query_bias)
        self.k_proj = nn.Linear(config.width, config.kv_heads * size, config.query_bias)
        self.v_proj = nn.Linear(config.width, config.kv_heads * size, config.query_bias)
        self.o_proj = nn.Linear(config.heads * size, config.width, config.output_bias)
        self.q_norm, self.k_norm = (make_norm_layer(config, size) if config.qk_norm else None for _ in range(2))
        self.scale = size**-0.5 if config.scale is None else config.scale
        self.cap = config.attention_cap
        self.rope, self.window = (config.ropes[layer], config.windows[layer]) if config.ropes else (None, None)

    def forward(self, x: Tensor, span: AttentionSpan, cache: KVCache | None = None) -> Tensor:
        if self.qkv_proj is not None:
            x = self.qkv_proj(x)
            if self.attends_whole(x, span, cache):
                return self.o_proj(self.attend_whole(x, span, cache))
            parts = list(ag.split(x, [n * self.size for n in (self.heads, self.kv_heads, self.kv_heads)], axis=2))
        else:
            parts = [projection(x) for projection in (self.q_proj, self.k_proj, self.v_proj)]
        q, k, v = (split_heads(part, n) for part, n in zip(parts, (self.heads, self.kv_heads, self.kv_heads), strict=True))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rope is not None:
            q, k = (rotate_heads(x, self.rope, span) for x in (q, k))
        if cache is not None:
            out = cache(self.layer, q, k, v, scale=self.scale, window=self.window or 0, softcap=self.cap or 0.0)
            return self.o_proj(join_heads(out))
        mask, causal = span.masks[self.window]
        if self.cap is None:
            out = ag.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=self.scale)
        else:
            out = _capped_attention(q, k, v, mask, causal, self.scale, self.cap)
        return self.o_proj(join_heads(out))

    def attends_whole(self, x: Tensor, span: AttentionSpan, cache: KVCache | None) -> bool:
        """Whether :meth:`attend_whole` can be used for the merged projection of ``x``."""
        placed_by_row = span.positions is not None and span.positions.ndim == 2
        if cache is None or self.qkv_proj is None or not placed_by_row or not cache.takes_projections(self.layer, x.shape[1]):
            return False
        return cache.rotates(span.positions) or (self.q_norm is None and (self.rope is None or self.rope.size == self.size))

    def attend_whole(self, x: Tensor, span: AttentionSpan, cache: Any) -> Tensor:
        """Return the attention of a few new positions. ``x`` is the result of ``qkv_proj``: queries, keys and values side by side."""
        batch, new, wide = x.shape
        options = {"heads": self.heads, "scale": self.scale, "window": self.window or 0, "softcap": self.cap or 0.0}
        table = None if self.rope is None else span.tables[self.rope]
        if cache.rotates(span.positions):
            weights = [None if norm is None else cast(Any, norm).weight for norm in (self.q_norm, self.k_norm)]
            return cache(self.layer, x, tables=(table, *weights), eps=getattr(self.q_norm, "eps", 0.0), **options)
        if table is not None and span.positions is not None:
            places = ag.reshape(span.positions, (batch * new, 1))
            apart = ag.reshape(x, (batch * new, wide // self.size, 1, self.size))
            x = ag.reshape(ag.rope(apart, places, table, heads=self.heads + self.kv_heads), x.shape)
        return cache(self.layer, x, **options)

    def merge(self) -> bool:
        """Merge the projections into ``qkv_proj`` if this saves launches per token; returns whether it did. For inference only."""
        within = type(self.q_norm) in (nn.RMSNorm, type(None)) and (self.rope is None or self.rope.attention_factor == 1)  # of a cache
        apart = self.qkv_proj is None
        merged = joined_linear([self.q_proj, self.k_proj, self.v_proj]) if within and apart else None
        if merged is not None:
            self.qkv_proj, self.q_proj, self.k_proj, self.v_proj = merged, None, None, None
        return merged is not None


def joined_linear(layers: Sequence[Any]) -> Any:
    """Return one layer that replaces several with the same input; ``None`` if their weights or biases cannot be joined."""
    first, rows = layers[0], sum(layer.out_features for layer in layers)
    packed = type(first) is QuantizedLinear
    forms = {(type(layer), layer.bias is None, getattr(layer, "kind", ""), getattr(layer, "activations", "")) for layer in layers}
    if len(forms) > 1 or type(first) not in (nn.Linear, QuantizedLinear) or (packed and any(n.out_features % STRIP_ROWS for n in layers)):
        return None
    form = (first.kind, first.activations) if packed else ()
    dtype = first.weight.dtype if not packed else "float32" if first.bias is None else first.bias.dtype
    with ag.no_grad(), placed(first.weight.queue, dtype, blank=True):
        made: Any = (QuantizedLinear if packed else nn.Linear)(first.in_features, rows, first.bias is not None, *form)
        for name in ("weight", "bias"):
            if getattr(first, name) is not None:
                getattr(made, name).write(np.concatenate([getattr(layer, name).to_host() for layer in layers]))
                getattr(made, name).requires_grad = getattr(first, name).requires_grad
    return made.train(first.training)


def rotate_heads(x: Tensor, rope: Rope, span: AttentionSpan) -> Tensor:
    """Rotate the first ``rope.size`` elements of each head of queries or keys by their positions."""
    depth, factor = x.shape[-1], rope.attention_factor
    part = x if rope.size == depth else ag.narrow(x, 3, 0, rope.size)
    part = ag.rope(part, span.positions, span.tables[rope])
    part = part if factor == 1 else ag.mul(part, factor)
    return part if rope.size == depth else ag.cat([part, ag.narrow(x, 3, rope.size, depth - rope.size)], axis=3)


def _capped_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float, cap: float) -> Tensor:
    """Return attention with scores ``cap * tanh(score / cap)``. The whole matrix of scores is allocated."""
    batch, heads, queries, size = q.shape
    groups, keys = k.shape[1], k.shape[2]
    grouped = ag.reshape(q, (batch, groups, heads // groups * queries, size))
    scores = ag.matmul(ag.mul(grouped, scale / cap), k, transpose_b=True)
    scores = ag.reshape(ag.mul(ag.tanh(scores), cap), (batch, heads, queries, keys))
    if causal:
        mask = Tensor.from_host(q.queue, np.tril(np.ones((queries, keys), bool)))
    shares = ag.softmax(scores if mask is None else ag.where(mask, scores, -np.inf), axis=-1)
    out = ag.matmul(ag.reshape(shares, (batch, groups, heads // groups * queries, keys)), v)
    return ag.reshape(out, (batch, heads, queries, v.shape[-1]))


class FeedForwardNetwork(nn.Module):
    """A network of ``gate_proj``, ``up_proj``, ``down_proj``: ``down(act(gate(x)) * up(x))``, or ``down(act(up(x)))`` without a gate."""

    def __init__(self, config: ModelConfig, inner: int | None = None):
        super().__init__()
        size = config.inner if inner is None else inner
        self.gate_proj = nn.Linear(config.width, size, config.mlp_bias) if config.gated else None
        self.up_proj = nn.Linear(config.width, size, config.mlp_bias)
        self.down_proj = nn.Linear(size, config.width, config.mlp_bias)
        self.activation = config.activation

    def forward(self, x: Tensor) -> Tensor:
        act = ACTIVATION_FUNCTIONS[self.activation]
        inside = act(self.up_proj(x)) if self.gate_proj is None else ag.mul(act(self.gate_proj(x)), self.up_proj(x))
        return self.down_proj(inside)


class MixtureOfExperts(nn.Module):
    """A layer of expert networks. Experts with the highest router scores process a token; their results are summed, weighted by the scores.

    The host reads the choice of experts, and only chosen experts run. ``shared_expert``, if there is one, runs for every token.
    """

    def __init__(self, config: ModelConfig, experts: Experts):
        super().__init__()
        self.chosen, self.normalized = experts.chosen, experts.normalized
        self.gate = nn.Linear(config.width, experts.count, bias=False)
        self.experts = nn.ModuleList(FeedForwardNetwork(config, experts.width) for _ in range(experts.count))
        self.shared_expert = FeedForwardNetwork(config, experts.shared) if experts.shared else None
        self.shared_expert_gate = nn.Linear(config.width, 1, bias=False) if experts.shared else None

    def forward(self, x: Tensor) -> Tensor:
        flat = ag.reshape(x, (-1, x.shape[-1]))
        scores, index = ag.topk(ag.softmax(ag.cast(self.gate(flat), "float32"), axis=-1), self.chosen)
        if self.normalized:
            scores = ag.div(scores, ag.sum(scores, axis=-1, keepdims=True))
        weights, routes = ag.reshape(ag.cast(scores, x.dtype), (-1, 1)), index.to_host()
        total = Tensor.zeros(flat.shape, flat.dtype, queue=flat.queue)
        for expert in np.unique(routes):
            tokens, places = np.nonzero(routes == expert)
            at, slots = (Tensor.from_host(x.queue, part.astype(np.int64)) for part in (tokens, tokens * self.chosen + places))
            out = self.experts[int(expert)](ag.index_select(flat, 0, at))
            total = ag.index_add(total, 0, at, ag.mul(out, ag.index_select(weights, 0, slots)))
        if self.shared_expert is not None and self.shared_expert_gate is not None:
            total = ag.add(total, ag.mul(ag.sigmoid(self.shared_expert_gate(flat)), self.shared_expert(flat)))
        return ag.reshape(total, x.shape)


class TransformerLayer(nn.Module):
    """Attention and a feed-forward network, each added to its input; norms come before, after or both, depending on the architecture."""

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        experts = config.experts if config.experts is not None and layer in config.experts.layers else None
        self.norm_first = config.norm_first
        self.input_layernorm = make_norm_layer(config)
        self.self_attn = SelfAttention(config, layer)
        self.pre_feedforward_layernorm = make_norm_layer(config)
        self.mlp: nn.Module = FeedForwardNetwork(config) if experts is None else MixtureOfExperts(config, experts)
        self.post_attention_norm, self.post_feedforward_norm = (make_norm_layer(config) if config.post_norms else None for _ in range(2))

    def forward(self, x: Tensor, span: AttentionSpan, cache: KVCache | None = None) -> Tensor:
        if not self.norm_first:
            x = self.input_layernorm(ag.add(x, self.self_attn(x, span, cache)))
            return self.pre_feedforward_layernorm(ag.add(x, self.mlp(x)))
        few = cache is not None and packed.decodes_together(x) and not ag.is_grad_enabled()
        attn, mlp = self.self_attn, cast(Any, self.mlp)
        whole = few and type(attn) is SelfAttention and attn.attends_whole(x, span, cache)
        if whole and decodable(attn, attn.qkv_proj, self.input_layernorm):
            out = attn.attend_whole(decoded_linear(x, attn.qkv_proj, self.input_layernorm), span, cache)
            x = self._end_decoded(x, out, attn.o_proj, self.post_attention_norm)
        else:
            out = attn(self.input_layernorm(x), span, cache)
            x = ag.add(x, out if self.post_attention_norm is None else self.post_attention_norm(out))
        act = _DECODED_ACTIVATIONS.get(mlp.activation) if few and type(mlp) is FeedForwardNetwork else None
        if act and decodable(mlp, mlp.up_proj, mlp.gate_proj or mlp.up_proj, self.pre_feedforward_layernorm):
            out = decoded_linear(x, mlp.up_proj, self.pre_feedforward_layernorm, mlp.gate_proj, act)
            return self._end_decoded(x, out, mlp.down_proj, self.post_feedforward_norm)
        out = mlp(self.pre_feedforward_layernorm(x))
        return ag.add(x, out if self.post_feedforward_norm is None else self.post_feedforward_norm(out))

    def decodes_whole(self, x: Tensor, span: AttentionSpan, cache: KVCache) -> bool:
        """Whether :func:`decode_whole` computes the layer: packed layers without biases, RMS norms in front, a gated network."""
        attn, mlp = self.self_attn, cast(Any, self.mlp)
        apart = not self.norm_first or self.post_attention_norm is not None or type(attn) is not SelfAttention
        if apart or type(mlp) is not FeedForwardNetwork or mlp.gate_proj is None or mlp.activation not in _DECODED_ACTIVATIONS:
            return False
        norms: Any = (self.input_layernorm, self.pre_feedforward_layernorm)
        layers: Any = (attn.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj)
        if {*map(type, norms)} != {nn.RMSNorm} or None in [norm.eps for norm in norms] or {*map(type, layers)} != {QuantizedLinear}:
            return False
        if not packed.decodes_in_blocks(x, layers[0].kind, layers[0].activations):
            return False
        whole = not any(layer.bias is not None for layer in layers) and attn.attends_whole(x, span, cache)
        return whole and decodable(attn, attn.qkv_proj, attn.o_proj) and decodable(self, *norms, attn.qkv_proj) and decodable(mlp, *layers)

    def _end_decoded(self, x: Tensor, inside: Tensor, linear: Any, norm: Any) -> Tensor:
        """Return ``x + norm(linear(inside))``; without a norm, in one launch if possible."""
        if norm is None and decodable(self, linear):
            return decoded_linear(inside, linear, residual=x)
        return ag.add(x, linear(inside) if norm is None else norm(linear(inside)))


def decode_whole(layers: Sequence[Any], x: Tensor, span: AttentionSpan, cache: KVCache) -> Tensor | None:
    """Compute layers for a few new positions of each sequence: one op, or one between two attentions.

    Returns ``None`` unless all layers :meth:`~TransformerLayer.decodes_whole`, with one kind of weights.
    """
    whole = bool(layers) and all(layer.decodes_whole(x, span, cache) for layer in layers)
    if not whole or len({(layer.mlp.up_proj.kind, layer.mlp.up_proj.activations) for layer in layers}) > 1:
        return None
    attn, norm, mlp = layers[0].self_attn, layers[0].input_layernorm, layers[0].mlp
    options = {"kind": mlp.up_proj.kind, "activations": mlp.up_proj.activations}
    numbers = {
        (own.rope, own.window, own.cap, own.scale, layer.mlp.activation, layer.input_layernorm.eps, layer.pre_feedforward_layernorm.eps)
        for layer in layers for own in (layer.self_attn,)
    }  # fmt: skip
    alike = len(numbers) == 1 and attn.cap is None and norm.eps == layers[0].pre_feedforward_layernorm.eps
    if not alike or x.shape[1] != 1 or not cache.rotates(span.positions):
        projected = decoded_linear(x, attn.qkv_proj, norm)
        for layer, after in zip(layers, [*layers[1:], None], strict=True):
            own, mlp, norm = layer.self_attn, layer.mlp, layer.pre_feedforward_layernorm
            weights = [part.weight for part in (own.o_proj, norm, mlp.gate_proj, mlp.up_proj, mlp.down_proj)]
            end: dict[str, Any] = {}
            if after is not None:
                following = after.self_attn.qkv_proj
                weights += [after.input_layernorm.weight, following.weight, following.bias]
                end = {"next_rows": following.out_features, "next_eps": after.input_layernorm.eps}
            x, *rest = ag.decode_block(  # type: ignore[misc]
                own.attend_whole(projected, span, cache), x, *weights, inner=mlp.up_proj.out_features, eps=norm.eps,
                activation=_DECODED_ACTIVATIONS[mlp.activation], **end, **options,
            )  # fmt: skip
            projected = rest[0] if rest else projected
        return x
    lengths, tensors = cache.begin(x.shape[0], 1, x.queue), []
    for layer in layers:
        own, network, last = layer.self_attn, layer.mlp, (layer.self_attn.q_norm, layer.self_attn.k_norm)
        linear = (own.o_proj, layer.pre_feedforward_layernorm, network.gate_proj, network.up_proj, network.down_proj)
        first = (layer.input_layernorm.weight, own.qkv_proj.weight, own.qkv_proj.bias)
        memory = cache.memory(own.layer)
        tensors += [t for t in (*first, *(part.weight for part in linear), *memory, *(n and n.weight for n in last)) if t is not None]
    out = ag.decode_layers(
        x, lengths, None if attn.rope is None else span.tables[attn.rope], tensors, inner=mlp.up_proj.out_features, heads=attn.heads,
        count=len(layers), scale=attn.scale, window=attn.window or 0, eps=norm.eps, head_eps=getattr(attn.q_norm, "eps", 0.0),
        activation=_DECODED_ACTIVATIONS[mlp.activation], **options,
    )  # fmt: skip
    cache.end(1)
    return out


def make_span(config: ModelConfig, queue: Any, queries: int, seen: int, positions: Tensor | None, kept: dict[Any, Tensor],
              cached: bool = False, documents: Tensor | None = None) -> AttentionSpan:  # fmt: skip
    """Return the :class:`AttentionSpan` of ``queries`` positions after ``seen``. ``kept`` caches frequencies; ``cached`` omits masks."""
    tables = {}
    for rope in dict.fromkeys(rope for rope in config.ropes if rope is not None):
        key = (rope, rope.stretch(seen + queries), queue)
        if key not in kept:
            if len(kept) > 16:  # dynamic frequencies change with every length
                kept.clear()
            kept[key] = Tensor.from_host(queue, rope.frequencies(seen + queries).astype(np.float32))
        tables[rope] = kept[key]
    masks = {} if cached else {window: causal_mask(queue, queries, 0, window) for window in dict.fromkeys(config.windows)}
    if documents is not None:
        if cached:
            raise ValueError(message("CausalLM", "documents cannot be given with a cache", "leave one of them out"))
        batch = documents.shape[0]
        same = ag.eq(ag.reshape(documents, (batch, 1, queries, 1)), ag.reshape(documents, (batch, 1, 1, queries)))
        for window in masks:  # causal masks (batch, 1, length, length), also false between positions of different documents
            allowed = np.tri(queries, dtype=bool) & ~np.tri(queries, k=-(window or queries), dtype=bool)
            masks[window] = (ag.logical_and(same, Tensor.from_host(queue, allowed)), False)
    return AttentionSpan(positions, masks, tables)


def check_activation(name: Any) -> str:
    """Return ``name`` if it is a known activation; raises otherwise."""
    if not isinstance(name, str) or name not in ACTIVATION_FUNCTIONS:
        raise ValueError(message("config", f"the activation must be one of {', '.join(ACTIVATION_FUNCTIONS)}", given=repr(name)))
    return name
