"""Vision transformers: ViT (the class is that of netcl.nn) and Swin, versions 1 and 2."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

import netcl.autograd as ag
from netcl import nn
from netcl.core.tensor import Tensor
from netcl.nn import init
from netcl.nn.parameter import empty, here
from netcl.vision.models.blocks import architecture, draw
from netcl.vision.ops import Permute, StochasticDepth

for _name, _patch, *_sizes in (("b", 16, 12, 12, 768), ("b", 32, 12, 12, 768), ("l", 16, 24, 16, 1024), ("l", 32, 24, 16, 1024),
                               ("h", 14, 32, 16, 1280)):  # fmt: skip
    _shape = dict(zip(("num_layers", "num_heads", "hidden_dim", "mlp_dim"), (*_sizes, 4 * _sizes[2]), strict=True))
    architecture(f"vit_{_name}_{_patch}", nn.ViT, patch_size=_patch, **_shape)


class WindowAttention(nn.Module):
    """Swin's (shifted) window attention with a bias per relative position. Version 2: cosine attention, and an MLP computes the bias."""

    relative_position_index: Tensor
    relative_coords_table: Tensor

    def __init__(self, dim: int, window_size: Sequence[int], shift_size: Sequence[int], num_heads: int, dropout: float, version: int = 1):
        super().__init__()
        self.window_size, self.shift_size, self.num_heads, self.version = tuple(window_size), tuple(shift_size), num_heads, version
        self.qkv, self.proj, self.dropout = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim), nn.Dropout(dropout)
        spans = [2 * size - 1 for size in window_size]
        y, x = (at.reshape(-1, 1) - at.reshape(1, -1) for at in np.indices(self.window_size))
        index = (y + window_size[0] - 1) * spans[1] + x + window_size[1] - 1
        self.register_buffer("relative_position_index", Tensor.from_host(here(), index.reshape(-1).astype(np.int64)))
        if version == 1:
            self.relative_position_bias_table = init.trunc_normal_(empty((math.prod(spans), num_heads)), std=0.02)
        else:
            self.logit_scale = init.constant_(empty((num_heads, 1, 1)), math.log(10.0))
            self.cpb_mlp = nn.Sequential(nn.Linear(2, 512), nn.ReLU(), nn.Linear(512, num_heads, bias=False))
            table = np.stack(np.meshgrid(*(np.linspace(-8, 8, span) for span in spans), indexing="ij"), -1)[None]
            table = np.sign(table) * np.log2(np.abs(table) + 1) / 3
            self.register_buffer("relative_coords_table", Tensor.from_host(here(), table.astype(np.float32)))

    def _attend(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Return attention inside windows ``(batch * windows, positions, channels)``, in the same shape."""
        _, area, channels = x.shape
        weight, bias = self.qkv.weight, self.qkv.bias
        if self.version == 2:  # keys have no bias, whatever their part of it is
            q, k, v = ag.split(bias, channels, axis=0)  # type: ignore[arg-type]
            bias = ag.cat([q, ag.mul(k, 0.0), v])
        parts = ag.reshape(ag.linear(x, weight, bias), (-1, area, 3, self.num_heads, channels // self.num_heads))
        q, k, v = (ag.squeeze(part, 0) for part in ag.split(ag.permute(parts, (2, 0, 3, 1, 4)), 1, axis=0))
        if self.version == 1:
            scale, table = q.shape[-1] ** -0.5, self.relative_position_bias_table
        else:
            q, k = (ag.div(x, ag.maximum(ag.sqrt(ag.sum(ag.mul(x, x), axis=-1, keepdims=True)), 1e-12)) for x in (q, k))
            scale = ag.exp(ag.clamp(self.logit_scale, max=math.log(100.0)))
            table = ag.mul(ag.sigmoid(ag.reshape(self.cpb_mlp(self.relative_coords_table), (-1, self.num_heads))), 16.0)
        offsets = ag.reshape(ag.embedding(self.relative_position_index, table), (area, area, self.num_heads))
        scores = ag.add(ag.mul(ag.matmul(q, ag.transpose(k, -2, -1)), scale), ag.permute(offsets, (2, 0, 1)))
        if mask is not None:
            windows = ag.reshape(scores, (-1, mask.shape[0], self.num_heads, area, area))
            scores = ag.reshape(ag.add(windows, mask), scores.shape)
        made = ag.permute(ag.matmul(self.dropout(ag.softmax(scores, axis=-1)), v), (0, 2, 1, 3))
        return self.dropout(self.proj(ag.reshape(made, (-1, area, channels))))

    def forward(self, x: Tensor) -> Tensor:
        (n, height, width, channels), (rows, columns) = x.shape, self.window_size
        x = ag.pad(x, (0, 0, 0, -width % columns, 0, -height % rows)) if height % rows or width % columns else x
        tall, wide = x.shape[1:3]
        shift = tuple(0 if size >= side else step for size, side, step in zip(self.window_size, (tall, wide), self.shift_size, strict=True))
        mask = Tensor.from_host(x.queue, self._mask(tall, wide, shift), x.dtype) if any(shift) else None
        x = ag.roll(x, (-shift[0], -shift[1]), (1, 2)) if any(shift) else x
        x = ag.permute(ag.reshape(x, (n, tall // rows, rows, wide // columns, columns, channels)), (0, 1, 3, 2, 4, 5))
        made = ag.reshape(self._attend(ag.reshape(x, (-1, rows * columns, channels)), mask), x.shape)
        made = ag.reshape(ag.permute(made, (0, 1, 3, 2, 4, 5)), (n, tall, wide, channels))
        made = ag.roll(made, shift, (1, 2)) if any(shift) else made
        return made if (tall, wide) == (height, width) else ag.narrow(ag.narrow(made, 1, 0, height), 2, 0, width)

    def _mask(self, tall: int, wide: int, shift: tuple[int, ...]) -> np.ndarray:
        """Return a mask ``(windows, 1, area, area)``: -100 between positions that ``shift`` moved in from opposite edges, else 0."""
        (rows, columns), (y, x) = self.window_size, np.indices((tall, wide))
        part = 8 * (y >= tall - rows) + 4 * (y >= tall - shift[0]) + 2 * (x >= wide - columns) + (x >= wide - shift[1])
        windows = part.reshape(tall // rows, rows, wide // columns, columns).transpose(0, 2, 1, 3).reshape(-1, 1, rows * columns)
        return np.where(windows[..., None] != windows[:, :, None, :], -100.0, 0.0).astype(np.float32)


class SwinBlock(nn.Module):
    """Attention and a feed-forward network, each with a shortcut and a norm. The norm comes first in version 1, last in version 2."""

    def __init__(self, dim: int, num_heads: int, window: Sequence[int], shift: Sequence[int], mlp_ratio: float, dropout: float,
                 attention_dropout: float, p: float, version: int):  # fmt: skip
        super().__init__()
        self.version, hidden = version, int(dim * mlp_ratio)
        self.norm1 = nn.LayerNorm(dim)
        self.attn = WindowAttention(dim, window, shift, num_heads, attention_dropout, version)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Dropout(dropout), nn.Linear(hidden, dim), nn.Dropout(dropout))
        self.stochastic_depth = StochasticDepth(p, "row")

    def forward(self, x: Tensor) -> Tensor:
        for norm, layer in ((self.norm1, self.attn), (self.norm2, self.mlp)):
            x = ag.add(x, self.stochastic_depth(layer(norm(x)) if self.version == 1 else norm(layer(x))))
        return x


class PatchMerging(nn.Module):
    """Merges 2 x 2 neighbors into one position with twice the channels; images with odd sides are padded."""

    def __init__(self, dim: int, version: int = 1):
        super().__init__()
        self.version = version
        self.reduction, self.norm = nn.Linear(4 * dim, 2 * dim, bias=False), nn.LayerNorm(4 * dim if version == 1 else 2 * dim)

    def forward(self, x: Tensor) -> Tensor:
        x = ag.pad(x, (0, 0, 0, x.shape[2] % 2, 0, x.shape[1] % 2)) if x.shape[1] % 2 or x.shape[2] % 2 else x
        n, height, width, channels = x.shape
        x = ag.permute(ag.reshape(x, (n, height // 2, 2, width // 2, 2, channels)), (0, 1, 3, 4, 2, 5))
        x = ag.reshape(x, (n, height // 2, width // 2, 4 * channels))
        return self.reduction(self.norm(x)) if self.version == 1 else self.norm(self.reduction(x))


class SwinTransformer(nn.Module):
    """Swin transformer (Liu et al. 2021, 2022), ``version`` 1 or 2."""

    def __init__(self, patch_size: Sequence[int], embed_dim: int, depths: Sequence[int], num_heads: Sequence[int],
                 window_size: Sequence[int], mlp_ratio: float = 4.0, dropout: float = 0.0, attention_dropout: float = 0.0,
                 stochastic_depth_prob: float = 0.1, num_classes: int = 1000, version: int = 1):  # fmt: skip
        super().__init__()
        conv = nn.Conv2d(3, embed_dim, tuple(patch_size), tuple(patch_size))
        layers: list[Any] = [nn.Sequential(conv, Permute((0, 2, 3, 1)), nn.LayerNorm(embed_dim))]
        done, dim, options = 0, embed_dim, (mlp_ratio, dropout, attention_dropout)
        for stage, (count, heads) in enumerate(zip(depths, num_heads, strict=True)):
            layers += [PatchMerging(dim // 2, version)] if stage else []
            shifts = [[0 if i % 2 == 0 else size // 2 for size in window_size] for i in range(count)]
            shares = [stochastic_depth_prob * (done + i) / (sum(depths) - 1) for i in range(count)]
            blocks = [SwinBlock(dim, heads, window_size, s, *options, p, version) for s, p in zip(shifts, shares, strict=True)]
            layers.append(nn.Sequential(*blocks))
            done, dim = done + count, 2 * dim
        self.features, self.norm, self.head = nn.Sequential(*layers), nn.LayerNorm(dim // 2), nn.Linear(dim // 2, num_classes)
        draw(self, "", "trunc_normal 0.02")

    def forward(self, x: Tensor) -> Tensor:
        return self.head(ag.mean(self.norm(self.features(x)), axis=(1, 2)))


for _name, _dim, _deep, _drop in (("t", 96, 6, 0.2), ("s", 96, 18, 0.3), ("b", 128, 18, 0.5)):
    for _version in (1, 2):
        _given = ((4, 4), _dim, (2, 2, _deep, 2), tuple(_dim // 32 << i for i in range(4)), (6 + _version,) * 2)
        _full = f"swin_{_name}" if _version == 1 else f"swin_v2_{_name}"
        architecture(_full, SwinTransformer, *_given, stochastic_depth_prob=_drop, version=_version)
