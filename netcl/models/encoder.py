"""Encoders of texts and images, and CLIP, which has one of each."""

from __future__ import annotations

from typing import Any

import numpy as np

import netcl.autograd as ag
from netcl import nn
from netcl.core.errors import ShapeError, message
from netcl.core.tensor import Tensor
from netcl.models.config import ModelConfig
from netcl.models.layers import AttentionSpan, ConfiguredModel, TransformerLayer, make_norm_layer
from netcl.nn.parameter import empty


class Encoder(ConfiguredModel):
    """An encoder of token ids (BERT, RoBERTa, CLIP's text) or images (ViT, CLIP's vision) that computes a state per position.

    - **config**: a :class:`~netcl.models.config.ModelConfig`; :func:`netcl.models.load` reads one from a file.

    Shapes: ids ``(batch, length)`` or images ``(batch, channels, size, size)`` become ``(batch, positions, width)``. ``mask`` of shape
    ``(batch, length)`` is true where there is a token; ``token_types`` are BERT's segment numbers. ``pooled`` turns states into one
    vector per input.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        if config.image is None:
            self.embed_tokens: nn.Module | None = nn.Embedding(config.vocab_size, config.width)
            positions = config.context
        else:
            size, patch, channels = config.image
            self.class_token = empty((config.width,))
            self.patches = nn.Conv2d(channels, config.width, patch, stride=patch, bias=config.architecture == "vit")
            positions = (size // patch) ** 2 + 1
        self.embed_positions = nn.Embedding(positions, config.width)
        self.embed_types = nn.Embedding(config.token_types, config.width) if config.token_types else None
        self.embedding_norm = nn.LayerNorm(config.width, config.eps) if config.embedding_norm else None
        self.layers = nn.ModuleList(TransformerLayer(config, layer) for layer in range(config.layers))
        self.norm = make_norm_layer(config) if config.final_norm or config.pooling == "norm" else None
        self.pooler = nn.Linear(config.width, config.width) if config.pooling == "tanh" else None
        self.projection = nn.Linear(config.width, config.projection, bias=False) if config.projection else None

    def forward(self, inputs: Tensor, mask: Any = None, token_types: Tensor | None = None) -> Tensor:
        x = self._image_embeddings(inputs) if self.config.image else self._text_embeddings(inputs, token_types)
        if self.embedding_norm is not None:
            x = self.embedding_norm(x)
        span = AttentionSpan(None, {None: self._mask(x, mask)}, {})
        for layer in self.layers:
            x = layer(x, span)
        return x if self.norm is None or self.config.pooling == "norm" else self.norm(x)

    def _mask(self, x: Tensor, mask: Any) -> tuple[Tensor | None, bool]:
        if mask is None:
            return None, self.config.causal
        keys = (mask.to_host() if isinstance(mask, Tensor) else np.asarray(mask)).astype(bool)
        if keys.shape != x.shape[:2]:
            raise ShapeError(message("Encoder", "mask must have shape (batch, length)", mask=keys.shape, inputs=x.shape[:2]))
        allowed = np.broadcast_to(keys[:, None, None, :], (len(keys), 1, keys.shape[1], keys.shape[1]))
        return Tensor.from_host(x.queue, np.tril(allowed) if self.config.causal else keys[:, None, None, :]), False

    def _image_embeddings(self, images: Tensor) -> Tensor:
        size, _, channels = self.config.image or (0, 0, 0)
        if images.ndim != 4 or images.shape[1:] != (channels, size, size):
            raise ShapeError(message("Encoder", f"images must have shape (batch, {channels}, {size}, {size})", shape=images.shape))
        patches = ag.permute(ag.flatten(self.patches(images), 2), (0, 2, 1))
        first = ag.expand(ag.reshape(self.class_token, (1, 1, -1)), (images.shape[0], 1, self.config.width))
        return ag.add(ag.cat([first, patches], axis=1), self.embed_positions.weight)

    def _text_embeddings(self, ids: Tensor, token_types: Tensor | None) -> Tensor:
        offset = self.config.position_offset
        if ids.ndim != 2 or ids.shape[1] + offset > self.config.context:
            what = f"ids must have shape (batch, length), with at most {self.config.context - offset} positions"
            raise ShapeError(message("Encoder", what, shape=ids.shape))
        assert self.embed_tokens is not None
        x = self.embed_tokens(ids)
        if offset:  # RoBERTa numbers the tokens that are no padding
            there = (ids.to_host() != offset - 1).astype(np.int64)
            numbers = np.cumsum(there, axis=1) * there + offset - 1
            x = ag.add(x, self.embed_positions(Tensor.from_host(ids.queue, numbers)))
        else:
            x = ag.add(x, ag.narrow(self.embed_positions.weight, 0, 0, ids.shape[1]))
        if self.embed_types is None:
            return x
        types = ag.narrow(self.embed_types.weight, 0, 0, 1) if token_types is None else self.embed_types(token_types)
        return ag.add(x, types)

    def pooled(self, states: Tensor, ids: Tensor | None = None) -> Tensor:
        """Return a vector per input, from the state of the first position or, for CLIP's texts, of the end token."""
        if self.config.pooling == "end":
            if ids is None:
                raise ValueError(message("pooled", "ids are required to find the end of each text", "pass ids="))
            given = ids.to_host() if isinstance(ids, Tensor) else np.asarray(ids)
            end = self.config.source.get("eos_token_id", 49407)
            at = given.argmax(axis=1) if end == 2 else (given == end).argmax(axis=1)  # 2: of files whose configuration is wrong
            flat = ag.reshape(states, (-1, states.shape[-1]))
            one = ag.index_select(flat, 0, Tensor.from_host(states.queue, at + np.arange(len(given)) * given.shape[1]))
        else:
            one = ag.squeeze(ag.narrow(states, 1, 0, 1), 1)
        one = ag.tanh(self.pooler(one)) if self.pooler is not None else one
        one = self.norm(one) if self.norm is not None and self.config.pooling == "norm" else one
        return one if self.projection is None else self.projection(one)


class DualEncoder(nn.Module):
    """CLIP: an encoder of texts and one of images, whose normalized vectors are compared.

    ``forward(ids, images, mask)`` returns the scores of every image with every text, ``(images, texts)``; ``text_vectors`` and
    ``image_vectors`` return the normalized vectors.
    """

    def __init__(self, config: ModelConfig, text: ModelConfig, vision: ModelConfig):
        super().__init__()
        self.config = config
        self.text, self.vision = Encoder(text), Encoder(vision)
        self.logit_scale = empty(())

    def extra_repr(self) -> str:
        return ""

    def part_config(self, parameter: str) -> ModelConfig:
        """Return the configuration of the part that holds a parameter."""
        return self.text.config if parameter.startswith("text.") else self.vision.config

    def text_vectors(self, ids: Tensor, mask: Any = None) -> Tensor:
        """Return a vector of norm 1 per text."""
        return _unit_vectors(self.text.pooled(self.text(ids, mask), ids))

    def image_vectors(self, images: Tensor) -> Tensor:
        """Return a vector of norm 1 per image."""
        return _unit_vectors(self.vision.pooled(self.vision(images)))

    def forward(self, ids: Tensor, images: Tensor, mask: Any = None) -> Tensor:
        scores = ag.matmul(self.image_vectors(images), self.text_vectors(ids, mask), transpose_b=True)
        return ag.mul(scores, ag.exp(self.logit_scale))


def _unit_vectors(x: Tensor) -> Tensor:
    return ag.div(x, ag.norm(x, 2, axis=-1, keepdims=True))
