"""The encoder-decoder language model of T5, and its text generation."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np

import netcl.autograd as ag
from netcl import nn
from netcl.core.errors import ShapeError, message
from netcl.core.tensor import Tensor
from netcl.io.archive import refusal
from netcl.models.config import ModelConfig, end_ids, whole_number
from netcl.models.layers import AttentionSpan, ConfiguredModel, SelfAttention, TransformerLayer, make_norm_layer
from netcl.nn.attention import join_heads, split_heads
from netcl.nn.decoding import Sampling, checked_tokens, random_draws, token_counts


class Seq2SeqCache:
    """The state of decoding: the encoder's states and mask, and all keys and values. Keys and values of self-attention grow per token."""

    def __init__(self, states: Tensor, mask: Tensor):
        self.states, self.mask, self.length = states, mask, 0
        self.kept, self.bias = dict[Any, tuple[Tensor, Tensor]](), states  # the bias of the new positions, by head

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, **_: Any) -> Tensor:
        if layer in self.kept:
            k, v = (ag.cat(parts, axis=2) for parts in zip(self.kept[layer], (k, v), strict=True))
        self.kept[layer] = k, v
        return ag.scaled_dot_product_attention(q, k, v, self.bias, scale=scale)


class Seq2SeqLayer(TransformerLayer):
    """A decoder layer: self-attention, cross-attention (keys and values are computed once per cache), and a feed-forward network."""

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__(config, layer)
        self.cross_norm, self.cross_attn = make_norm_layer(config), SelfAttention(config, layer)

    def forward(self, x: Tensor, span: AttentionSpan, cache: Any = None) -> Tensor:
        x, cross = ag.add(x, self.self_attn(self.input_layernorm(x), span, cache)), self.cross_attn
        if self not in cache.kept:
            cache.kept[self] = tuple(split_heads(part(cache.states), cross.heads) for part in (cross.k_proj, cross.v_proj))
        q = split_heads(cross.q_proj(self.cross_norm(x)), cross.heads)
        out = ag.scaled_dot_product_attention(q, *cache.kept[self], attn_mask=cache.mask, scale=cross.scale)
        x = ag.add(x, cross.o_proj(join_heads(out)))
        return ag.add(x, self.mlp(self.pre_feedforward_layernorm(x)))


class Seq2SeqStack(nn.Module):
    """The layers of the encoder or the decoder with their final norm, and the relative position bias that they share."""

    def __init__(self, config: ModelConfig, layers: int, decodes: bool):
        super().__init__()
        sizes = (("relative_attention_num_buckets", 32), ("relative_attention_max_distance", 128))
        buckets, self.distance = (whole_number(config.source, name, default=size) for name, size in sizes)
        if buckets % 4 or self.distance <= buckets // 2:
            what = f"{sizes[0][0]} must be a multiple of 4, and {sizes[1][0]} above half of it"
            raise refusal("config", what, buckets=buckets, distance=self.distance)
        self.layers = nn.ModuleList((Seq2SeqLayer if decodes else TransformerLayer)(config, layer) for layer in range(layers))
        self.norm, self.relative_bias, self.decodes = make_norm_layer(config), nn.Embedding(buckets, config.heads), decodes

    def bias(self, queries: int, keys: int) -> Tensor:
        """Return the bias of attention scores, ``(1, heads, queries, keys)``, for the last ``queries`` of ``keys`` positions."""
        apart = np.arange(keys)[None] - np.arange(keys - queries, keys)[:, None]
        count = self.relative_bias.weight.shape[0] // (1 if self.decodes else 2)
        far, exact = np.maximum(-apart, 0) if self.decodes else np.abs(apart), count // 2
        steps = np.log(np.maximum(far, 1).astype(np.float32) / np.float32(exact)) / np.float32(math.log(self.distance / exact))
        wide = np.minimum(exact + (steps * np.float32(count - exact)).astype(np.int64), count - 1)
        index = np.where(far < exact, far, wide) + (0 if self.decodes else (apart > 0) * count)
        at, before = (Tensor.from_host(self.relative_bias.weight.queue, part) for part in (index, apart <= 0))
        found = ag.permute(self.relative_bias(at), (2, 0, 1))[None]
        return ag.where(before, found, -np.inf) if self.decodes else found

    def forward(self, x: Tensor, span: AttentionSpan, cache: Seq2SeqCache | None = None) -> Tensor:
        for layer in self.layers:
            x = layer(x, span, cache)
        return self.norm(x)


class Seq2SeqLM(ConfiguredModel):
    """An encoder-decoder language model (T5): maps the ids of a text and of its answer so far to the logits of the next tokens.

    Shapes: ids ``(batch, length)``, decoder ids ``(batch, positions)``, logits ``(batch, positions, vocabulary)``. ``mask`` of shape
    ``(batch, length)`` is true where there is a token. ``decode(ids, cache)`` takes only new ids, with a cache made by ``encode``.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config, self.generation = config, dict[str, Any]()
        self.shared = nn.Embedding(config.vocab_size, config.width)
        self.encoder = Seq2SeqStack(config, config.layers, False)
        self.decoder = Seq2SeqStack(config, whole_number(config.source, "num_decoder_layers", default=config.layers), True)
        self.lm_head = nn.Linear(config.width, 0 if config.tied else config.vocab_size, bias=False)
        if config.tied:
            self.lm_head.out_features, self.lm_head.weight = config.vocab_size, self.shared.weight

    def encode(self, ids: Tensor, mask: Any = None) -> Seq2SeqCache:
        """Encode a text; returns its states in a new cache for the decoder."""
        given = np.ones(ids.shape, bool) if mask is None else np.asarray(mask.to_host() if isinstance(mask, Tensor) else mask, bool)
        if ids.ndim != 2 or given.shape != ids.shape:
            raise ShapeError(message("Seq2SeqLM", "ids and mask must have shape (batch, length)", ids=ids.shape, mask=given.shape))
        there = Tensor.from_host(ids.queue, given[:, None, None])
        bias = ag.where(there, self.encoder.bias(ids.shape[1], ids.shape[1]), -np.inf)
        return Seq2SeqCache(self.encoder(self.shared(ids), AttentionSpan(None, {None: (bias, False)}, {})), there)

    def decode(self, ids: Tensor, cache: Seq2SeqCache) -> Tensor:
        """Return the logits that follow each new id of the answer; adds these ids to the cache."""
        cache.length += ids.shape[1]
        cache.bias = self.decoder.bias(ids.shape[1], cache.length)
        x, source = self.decoder(self.shared(ids), AttentionSpan(None, {}, {}), cache), self.config.source
        scaled = source.get("scale_decoder_outputs", source.get("tie_word_embeddings") is not False)
        return self.lm_head(ag.mul(x, self.config.width**-0.5) if scaled else x)

    def forward(self, ids: Tensor, decoder_ids: Tensor, mask: Any = None) -> Tensor:
        return self.decode(decoder_ids, self.encode(ids, mask))

    def generate(self, prompt: Any, max_new_tokens: int = 64, seed: int | None = None, **options: Any) -> Any:
        """Answer a prompt: returns text for text, ids for ids, and a list for several prompts. ``options`` are fields of ``Sampling``."""
        sampling, draw = Sampling(**{"temperature": 0.0, **options}).check(max_new_tokens), random_draws(seed, self.shared.weight.queue)
        several = not isinstance(prompt, str) and len(prompt) and not isinstance(prompt[0], int | np.integer)
        prompts = list(prompt) if several else [prompt]
        ids = [self.tokenizer.encode(one) if isinstance(one, str) else [int(i) for i in one] for one in prompts]
        if not all(ids):
            raise ShapeError(message("generate", "a prompt must have at least 1 token", tokens=[*map(len, ids)]))
        if min(map(min, ids)) < 0 or max(map(max, ids)) >= self.config.vocab_size:
            what = f"token ids must be from 0 to {self.config.vocab_size - 1}"
            raise ShapeError(message("generate", what, lowest=min(map(min, ids)), highest=max(map(max, ids))))
        longest, going, made = max(map(len, ids)), set(range(len(ids))), [list[int]() for _ in ids]
        settings, host = {**self.config.source, **self.generation}, partial(Tensor.from_host, self.shared.weight.queue)
        start, ends = whole_number(settings, "decoder_start_token_id", default=0, least=0), end_ids(settings)
        tokens = host(np.full((len(ids), 1), start))
        drawn = host(np.zeros(len(ids), np.float32))
        counts = host(token_counts([[start]] * len(ids), self.config.vocab_size)) if sampling.penalizes else None
        with ag.no_grad():
            mask = np.array([[len(row)] for row in ids]) > np.arange(longest)
            cache = self.encode(host(np.array([row + [0] * (longest - len(row)) for row in ids])), mask)
            while going and max(map(len, made)) < max_new_tokens:
                if sampling.temperature:
                    drawn = host(draw(len(ids)))
                tokens = sampling.choose(ag.reshape(self.decode(tokens, cache), (len(ids), -1)), drawn, counts)
                new = checked_tokens(tokens.to_host()).tolist()
                going -= {row for row in going if new[row] in ends}
                for row in going:
                    made[row].append(new[row])
        found = [self.tokenizer.decode(row) if isinstance(prompts[i], str) else row for i, row in enumerate(made)]
        return found if several else found[0]
