"""Vision transformers (Dosovitskiy et al. 2021), with torchvision's layout and names."""

from __future__ import annotations

from typing import Any

import netcl.autograd as ag
from netcl.core.errors import ShapeError, message
from netcl.core.tensor import Tensor
from netcl.nn import init
from netcl.nn.activation import GELU
from netcl.nn.attention import MultiheadAttention
from netcl.nn.container import Sequential
from netcl.nn.conv import Conv2d
from netcl.nn.dropout import Dropout
from netcl.nn.linear import Linear
from netcl.nn.module import Module
from netcl.nn.norm import LayerNorm
from netcl.nn.parameter import constructor, empty


class _EncoderBlock(Module):
    """Attention and a feed-forward network, each after a norm and added to its input."""

    def __init__(self, num_heads: int, hidden_dim: int, mlp_dim: int, dropout: float, attention_dropout: float):
        super().__init__()
        self.ln_1 = LayerNorm(hidden_dim, eps=1e-6)
        self.self_attention = MultiheadAttention(hidden_dim, num_heads, dropout=attention_dropout, batch_first=True)
        self.dropout = Dropout(dropout)
        self.ln_2 = LayerNorm(hidden_dim, eps=1e-6)
        self.mlp = Sequential(Linear(hidden_dim, mlp_dim), GELU(), Dropout(dropout), Linear(mlp_dim, hidden_dim), Dropout(dropout))
        for layer in (self.mlp[0], self.mlp[3]):
            init.xavier_uniform_(layer.weight)
            init.normal_(layer.bias, std=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.ln_1(x)
        attended, _ = self.self_attention(normed, normed, normed, need_weights=False)
        x = ag.add(x, self.dropout(attended))
        return ag.add(x, self.mlp(self.ln_2(x)))


class _Encoder(Module):
    """The encoder: adds positions, then applies the blocks and a norm."""

    def __init__(self, positions: int, num_layers: int, num_heads: int, hidden_dim: int, mlp_dim: int, dropout: float,
                 attention_dropout: float):  # fmt: skip
        super().__init__()
        self.pos_embedding = init.normal_(empty((1, positions, hidden_dim)), std=0.02)
        self.dropout = Dropout(dropout)
        blocks = [_EncoderBlock(num_heads, hidden_dim, mlp_dim, dropout, attention_dropout) for _ in range(num_layers)]
        self.layers = Sequential({f"encoder_layer_{i}": block for i, block in enumerate(blocks)})
        self.ln = LayerNorm(hidden_dim, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        return self.ln(self.layers(self.dropout(ag.add(x, self.pos_embedding))))


class ViT(Module):
    """A vision transformer. Its input is a sequence of patches after a learned token; the final state of this token is classified.

    - **image_size**, **patch_size**: side lengths of images and patches. ``patch_size`` must divide ``image_size``.
    - **num_layers**, **num_heads**, **hidden_dim**, **mlp_dim**: depth, heads and widths; by default ViT-S/16.
    - **num_classes**: width of the output. **in_channels**: channels of the input.
    - **dropout**: the probability inside the encoder. **attention_dropout**: the probability for the attention weights.

    Shapes: ``(N, in_channels, image_size, image_size)`` becomes ``(N, num_classes)``.

    >>> from netcl import nn, zeros
    >>> model = nn.ViT(image_size=32, patch_size=8, num_layers=2, num_heads=2, hidden_dim=32, mlp_dim=64, num_classes=10)
    >>> model(zeros((2, 3, 32, 32))).shape
    (2, 10)
    """

    def __init__(self, image_size: int = 224, patch_size: int = 16, num_layers: int = 12, num_heads: int = 6, hidden_dim: int = 384,
                 mlp_dim: int = 1536, num_classes: int = 1000, in_channels: int = 3, dropout: float = 0.0,
                 attention_dropout: float = 0.0):  # fmt: skip
        super().__init__()
        if image_size % patch_size:
            raise ShapeError(message("ViT", "patch_size must divide image_size", image_size=image_size, patch_size=patch_size))
        self.image_size, self.hidden_dim = image_size, hidden_dim
        self.class_token = init.zeros_(empty((1, 1, hidden_dim)))
        self.conv_proj = Conv2d(in_channels, hidden_dim, patch_size, patch_size)
        positions = (image_size // patch_size) ** 2 + 1
        self.encoder = _Encoder(positions, num_layers, num_heads, hidden_dim, mlp_dim, dropout, attention_dropout)
        self.heads = Sequential({"head": Linear(hidden_dim, num_classes)})
        init.trunc_normal_(self.conv_proj.weight, std=(in_channels * patch_size * patch_size) ** -0.5)
        init.zeros_(self.conv_proj.bias)  # type: ignore[arg-type]
        init.zeros_(self.heads[0].weight)
        init.zeros_(self.heads[0].bias)

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim != 4 or x.shape[2:] != (self.image_size, self.image_size):
            raise ShapeError(message("ViT", f"images must be (batch, channels, {self.image_size}, {self.image_size})", shape=x.shape))
        patches = self.conv_proj(x)
        n = x.shape[0]
        tokens = ag.transpose(ag.reshape(patches, (n, self.hidden_dim, -1)), 1, 2)
        first = ag.expand(self.class_token, (n, 1, self.hidden_dim))
        encoded = self.encoder(ag.cat([first, tokens], axis=1))
        return self.heads(ag.reshape(ag.narrow(encoded, 1, 0, 1), (n, self.hidden_dim)))


VisionTransformer = ViT


@constructor
def vit_small(num_classes: int = 1000, **options: Any) -> ViT:
    """Return ViT-S/16, with 22 million parameters; ``options`` are those of :class:`ViT`."""
    return ViT(num_classes=num_classes, **options)
