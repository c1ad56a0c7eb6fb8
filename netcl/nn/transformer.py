"""Transformer layers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

import netcl.autograd as ag
from netcl.autograd import packed
from netcl.core.errors import message
from netcl.core.tensor import Tensor
from netcl.nn import init
from netcl.nn.activation import make_activation
from netcl.nn.attention import CausalSelfAttention, KVCache, MultiheadAttention, RotaryAttention
from netcl.nn.container import ModuleList
from netcl.nn.dropout import Dropout
from netcl.nn.linear import Linear
from netcl.nn.module import Module
from netcl.nn.norm import LayerNorm, RMSNorm
from netcl.nn.parameter import here
from netcl.nn.quantized import decodable, decoded_linear

Activated = str | Callable[[Tensor], Tensor]


class _TransformerLayer(Module):
    """Base class of transformer layers: attentions, then a feed-forward network; each is added to its input and normalized."""

    attentions: tuple[str, ...] = ("self_attn",)
    self_attn: MultiheadAttention

    def __init__(self, d_model: int, nhead: int, dim_feedforward: int = 2048, dropout: float = 0.1, activation: Activated = "relu",
                 layer_norm_eps: float = 1e-5, batch_first: bool = False, norm_first: bool = False, bias: bool = True):  # fmt: skip
        super().__init__()
        self.norm_first = norm_first
        for name in self.attentions:
            setattr(self, name, MultiheadAttention(d_model, nhead, dropout=dropout, bias=bias, batch_first=batch_first))
        self.linear1, self.dropout = Linear(d_model, dim_feedforward, bias), Dropout(dropout)
        self.linear2 = Linear(dim_feedforward, d_model, bias)
        branches = range(1, len(self.attentions) + 2)
        for number in branches:
            setattr(self, f"norm{number}", LayerNorm(d_model, layer_norm_eps, bias=bias))
        for number in branches:
            setattr(self, f"dropout{number}", Dropout(dropout))
        self.activation = make_activation(activation) if isinstance(activation, str) else activation

    def _through(self, x: Tensor, *attended: Callable[[Tensor], Tensor]) -> Tensor:
        branches = [*attended, lambda x: self.linear2(self.dropout(self.activation(self.linear1(x))))]
        for number, branch in enumerate(branches, 1):
            norm, drop = getattr(self, f"norm{number}"), getattr(self, f"dropout{number}")
            x = ag.add(x, drop(branch(norm(x)))) if self.norm_first else norm(ag.add(x, drop(branch(x))))
        return x


class TransformerEncoderLayer(_TransformerLayer):
    """Self-attention and a feed-forward network, each added to its input and normalized, with torch's arguments.

    ``x = norm1(x + attention(x))``, ``x = norm2(x + linear2(activation(linear1(x))))``; with ``norm_first`` the norms come before the
    branches instead.

    - **d_model**, **nhead**, **dim_feedforward**: width, heads, width between the linear layers.
    - **dropout**: probability for the attention weights, after the attention, and inside and after the feed-forward network.
    - **activation**: ``relu``, ``gelu``, another name or a function.
    - **layer_norm_eps**, **batch_first**, **norm_first**, **bias**: as in torch.

    Shapes: ``(positions, batch, d_model)``, or ``(batch, positions, d_model)`` with ``batch_first``. ``src_mask``,
    ``src_key_padding_mask`` and ``is_causal`` as in :class:`MultiheadAttention`.

    >>> from netcl import nn, zeros
    >>> nn.TransformerEncoderLayer(16, 4, 32)(zeros((5, 2, 16))).shape
    (5, 2, 16)
    """

    def forward(self, src: Tensor, src_mask: Any = None, src_key_padding_mask: Any = None, is_causal: bool = False) -> Tensor:
        masks = {"attn_mask": src_mask, "key_padding_mask": src_key_padding_mask, "is_causal": is_causal}
        return self._through(src, lambda x: self.self_attn(x, x, x, need_weights=False, **masks)[0])


class _LayerStack(Module):
    """Base class of stacks: copies of a layer, then an optional norm. The first copy replaces the given layer in the stored arguments."""

    def __init__(self, layer: Module, num_layers: int, norm: Module | None):
        super().__init__()
        self.layers, self.num_layers, self.norm = ModuleList(copy.deepcopy(layer) for _ in range(num_layers)), num_layers, norm

    def _made_with(self, arguments: Mapping[str, Any]) -> None:
        super()._made_with({**arguments, next(iter(arguments)): self.layers[0]} if self.num_layers else arguments)


class TransformerEncoder(_LayerStack):
    """A stack of encoder layers with the same settings: ``x = layer_n(... layer_1(x))``, then an optional norm.

    - **encoder_layer**: the layer to copy, with its weights.
    - **num_layers**: how many. **norm**: a module applied to the result. The other arguments of torch are ignored.

    Shapes and masks: as in :class:`TransformerEncoderLayer` (``mask``, ``src_key_padding_mask``, ``is_causal``).

    >>> from netcl import nn, zeros
    >>> nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32), 2)(zeros((5, 2, 16))).shape
    (5, 2, 16)
    """

    def __init__(self, encoder_layer: TransformerEncoderLayer, num_layers: int, norm: Module | None = None,
                 enable_nested_tensor: bool = True, mask_check: bool = True):  # fmt: skip
        super().__init__(encoder_layer, num_layers, norm)

    def forward(self, src: Tensor, mask: Any = None, src_key_padding_mask: Any = None, is_causal: bool = False) -> Tensor:
        for layer in self.layers:
            src = layer(src, src_mask=mask, src_key_padding_mask=src_key_padding_mask, is_causal=is_causal)
        return src if self.norm is None else self.norm(src)


class TransformerDecoderLayer(_TransformerLayer):
    """Self-attention, attention to the encoder's result ``memory``, and a feed-forward network, each added to its input and normalized.

    Arguments and shapes as in :class:`TransformerEncoderLayer`; ``tgt_...`` masks apply to self-attention, ``memory_...`` to ``memory``.

    >>> from netcl import nn, zeros
    >>> nn.TransformerDecoderLayer(16, 4, 32)(zeros((5, 2, 16)), zeros((7, 2, 16))).shape
    (5, 2, 16)
    """

    attentions = ("self_attn", "multihead_attn")
    multihead_attn: MultiheadAttention

    def forward(self, tgt: Tensor, memory: Tensor, tgt_mask: Any = None, memory_mask: Any = None, tgt_key_padding_mask: Any = None,
                memory_key_padding_mask: Any = None, tgt_is_causal: bool = False, memory_is_causal: bool = False) -> Tensor:  # fmt: skip
        own = {"attn_mask": tgt_mask, "key_padding_mask": tgt_key_padding_mask, "is_causal": tgt_is_causal}
        other = {"attn_mask": memory_mask, "key_padding_mask": memory_key_padding_mask, "is_causal": memory_is_causal}
        return self._through(
            tgt,
            lambda x: self.self_attn(x, x, x, need_weights=False, **own)[0],
            lambda x: self.multihead_attn(x, memory, memory, need_weights=False, **other)[0],
        )


class TransformerDecoder(_LayerStack):
    """A stack of decoder layers with the same settings, then an optional norm; arguments as in :class:`TransformerEncoder`.

    >>> from netcl import nn, zeros
    >>> decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(16, 4, 32), 2)
    >>> decoder(zeros((5, 2, 16)), zeros((7, 2, 16))).shape
    (5, 2, 16)
    """

    def __init__(self, decoder_layer: TransformerDecoderLayer, num_layers: int, norm: Module | None = None):
        super().__init__(decoder_layer, num_layers, norm)

    def forward(self, tgt: Tensor, memory: Tensor, **masks: Any) -> Tensor:
        for layer in self.layers:
            tgt = layer(tgt, memory, **masks)
        return tgt if self.norm is None else self.norm(tgt)


class Transformer(Module):
    """An encoder, and a decoder that attends to the encoder's result (Vaswani et al. 2017), with torch's arguments and masks.

    >>> from netcl import nn, zeros
    >>> model = nn.Transformer(16, 4, 1, 1, 32)
    >>> model(zeros((7, 2, 16)), zeros((5, 2, 16))).shape
    (5, 2, 16)
    """

    def __init__(self, d_model: int = 512, nhead: int = 8, num_encoder_layers: int = 6, num_decoder_layers: int = 6,
                 dim_feedforward: int = 2048, dropout: float = 0.1, activation: Activated = "relu", custom_encoder: Module | None = None,
                 custom_decoder: Module | None = None, layer_norm_eps: float = 1e-5, batch_first: bool = False, norm_first: bool = False,
                 bias: bool = True):  # fmt: skip
        super().__init__()
        options = (d_model, nhead, dim_feedforward, dropout, activation, layer_norm_eps, batch_first, norm_first, bias)
        norms = [LayerNorm(d_model, layer_norm_eps, bias=bias) for _ in range(2)]
        self.encoder = custom_encoder or TransformerEncoder(TransformerEncoderLayer(*options), num_encoder_layers, norms[0])
        self.decoder = custom_decoder or TransformerDecoder(TransformerDecoderLayer(*options), num_decoder_layers, norms[1])
        for parameter in self.parameters():
            if parameter.ndim > 1:
                init.xavier_uniform_(parameter)
        self.d_model, self.nhead, self.batch_first = d_model, nhead, batch_first

    @staticmethod
    def generate_square_subsequent_mask(size: int) -> Tensor:
        """Return a causal mask to add to attention scores: ``-inf`` at later positions, else 0."""
        return Tensor.from_host(here(), np.triu(np.full((size, size), -np.inf, np.float32), 1))

    def forward(self, src: Tensor, tgt: Tensor, src_mask: Any = None, tgt_mask: Any = None, memory_mask: Any = None,
                src_key_padding_mask: Any = None, tgt_key_padding_mask: Any = None, memory_key_padding_mask: Any = None,
                src_is_causal: bool = False, tgt_is_causal: bool = False, memory_is_causal: bool = False) -> Tensor:  # fmt: skip
        memory = self.encoder(src, mask=src_mask, src_key_padding_mask=src_key_padding_mask, is_causal=src_is_causal)
        return self.decoder(
            tgt, memory, tgt_mask=tgt_mask, memory_mask=memory_mask, tgt_key_padding_mask=tgt_key_padding_mask,
            memory_key_padding_mask=memory_key_padding_mask, tgt_is_causal=tgt_is_causal, memory_is_causal=memory_is_causal,
        )  # fmt: skip


class SwiGLU(Module):
    """A feed-forward network with a gate: ``y = w2(silu(w1(x)) * w3(x))``.

    - **dim**: width of the input and the output.
    - **hidden_dim**: width in between; by default two thirds of ``4 dim``, rounded up to a multiple of 8.
    - **bias**: whether the linear layers have biases. **dropout**: the probability for the result.

    Shapes: ``(..., dim)`` in and out. Parameters: ``w1``, ``w2``, ``w3``.

    >>> from netcl import nn, zeros
    >>> nn.SwiGLU(12)(zeros((2, 12))).shape
    (2, 12)
    """

    def __init__(self, dim: int, hidden_dim: int | None = None, bias: bool = False, dropout: float = 0.0):
        super().__init__()
        hidden = hidden_dim or -(-8 * dim // 3 // 8) * 8
        self.w1, self.w2, self.w3 = Linear(dim, hidden, bias), Linear(hidden, dim, bias), Linear(dim, hidden, bias)
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.w2(ag.mul(ag.silu(self.w1(x)), self.w3(x))))


class FeedForward(Module):
    """Two linear layers with a GELU in between: ``y = c_proj(gelu(c_fc(x)))``.

    - **dim**: width of the input and the output. **hidden_dim**: width in between; by default ``4 dim``.
    - **bias**: whether the linear layers have biases. **dropout**: after ``c_proj``. **approximate**: ``none`` or ``tanh``, for GELU.

    Shapes: ``(..., dim)`` in and out.

    >>> from netcl import nn, zeros
    >>> nn.FeedForward(12)(zeros((2, 12))).shape
    (2, 12)
    """

    def __init__(self, dim: int, hidden_dim: int | None = None, bias: bool = True, dropout: float = 0.0, approximate: str = "none"):
        super().__init__()
        hidden = hidden_dim or 4 * dim
        self.approximate = approximate
        self.c_fc, self.c_proj, self.dropout = Linear(dim, hidden, bias), Linear(hidden, dim, bias), Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.c_proj(ag.gelu(self.c_fc(x), approximate=self.approximate)))


class TransformerBlock(Module):
    """A decoder block: ``x = x + attn(ln_1(x))``, then ``x = x + mlp(ln_2(x))``.

    - **n_embd**, **n_head**: width and number of heads.
    - **bias**: whether layers have biases. **dropout**: the probability in all layers.
    - **norm**: ``layer`` or ``rms``. **mlp**: ``gelu`` or ``swiglu``; **mlp_dim** is its inner width.
    - **position**: ``learned`` (the model adds positions, attention is plain) or ``rotary``, with **n_kv_head** and **rope_base**.

    Shapes: ``(batch, positions, n_embd)`` in and out; ``cache`` and ``layer`` as in :class:`CausalSelfAttention`.

    >>> from netcl import nn, zeros
    >>> nn.TransformerBlock(16, 4, norm="rms", mlp="swiglu", position="rotary")(zeros((2, 5, 16))).shape
    (2, 5, 16)
    """

    def __init__(self, n_embd: int, n_head: int, bias: bool = True, dropout: float = 0.0, norm: str = "layer", mlp: str = "gelu",
                 mlp_dim: int | None = None, position: str = "learned", n_kv_head: int | None = None,
                 rope_base: float = 10000.0):  # fmt: skip
        super().__init__()
        for name, given, known in (("norm", norm, ("layer", "rms")), ("mlp", mlp, ("gelu", "swiglu")),
                                   ("position", position, ("learned", "rotary"))):  # fmt: skip
            if given not in known:
                raise ValueError(message("TransformerBlock", f"unknown {name}", f"known: {', '.join(known)}", **{name: repr(given)}))
        self.ln_1 = make_norm(norm, n_embd, bias)
        if position == "rotary":
            self.attn: Module = RotaryAttention(n_embd, n_head, n_kv_head, bias, dropout, rope_base)
        else:
            self.attn = CausalSelfAttention(n_embd, n_head, bias, dropout)
        self.ln_2 = make_norm(norm, n_embd, bias)
        self.mlp: Module = SwiGLU(n_embd, mlp_dim, bias, dropout) if mlp == "swiglu" else FeedForward(n_embd, mlp_dim, bias, dropout)

    def forward(self, x: Tensor, cache: KVCache | None = None, layer: int = 0) -> Tensor:
        if cache is not None and packed.decodes_together(x) and not self.training and not ag.is_grad_enabled():
            return self._decoded(x, cache, layer)
        x = ag.add(x, self.attn(self.ln_1(x), cache, layer))
        return ag.add(x, self.mlp(self.ln_2(x)))

    def _decoded(self, x: Tensor, cache: KVCache, layer: int) -> Tensor:
        """Compute a few positions with as few launches as the layers allow."""
        attn, mlp = self.attn, self.mlp
        if type(attn) is CausalSelfAttention and decodable(attn, attn.c_attn, attn.c_proj, self.ln_1):
            out = cache(layer, decoded_linear(x, attn.c_attn, self.ln_1), heads=attn.n_head)
            x = decoded_linear(out, attn.c_proj, residual=x)
        else:
            x = ag.add(x, attn(self.ln_1(x), cache, layer))
        if type(mlp) is FeedForward and decodable(mlp, mlp.c_fc, mlp.c_proj, self.ln_2):
            out = decoded_linear(x, mlp.c_fc, self.ln_2, activation="gelu" if mlp.approximate == "none" else "gelu_tanh")
            return decoded_linear(out, mlp.c_proj, residual=x)
        if type(mlp) is SwiGLU and decodable(mlp, mlp.w1, mlp.w2, mlp.w3, self.ln_2):
            return decoded_linear(decoded_linear(x, mlp.w3, self.ln_2, mlp.w1, "silu"), mlp.w2, residual=x)
        return ag.add(x, mlp(self.ln_2(x)))


def make_norm(kind: str, width: int, bias: bool) -> Module:
    """Make an RMS norm (``kind`` is ``rms``) or a layer norm over the last axis."""
    return RMSNorm(width, eps=1e-6) if kind == "rms" else LayerNorm(width, bias=bias)
