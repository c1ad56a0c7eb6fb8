"""GPT: a decoder-only transformer with text generation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

import netcl.autograd as ag
from netcl.core.errors import ShapeError, message
from netcl.core.tensor import Tensor
from netcl.nn import init
from netcl.nn.attention import KVCache
from netcl.nn.container import ModuleDict, ModuleList
from netcl.nn.decoding import Sampling, checked_tokens, continued, random_draws
from netcl.nn.dropout import Dropout
from netcl.nn.embedding import Embedding
from netcl.nn.linear import Linear
from netcl.nn.module import Module
from netcl.nn.summary import evaluating
from netcl.nn.transformer import TransformerBlock, make_norm


class GPT(Module):
    """A decoder-only transformer: maps tokens to the logits of the next token at each position.

    - **vocab_size**: number of tokens. **block_size**: the maximum sequence length.
    - **n_layer**, **n_head**, **n_embd**: depth, number of heads, width. **dropout**: a probability. **bias**: whether layers have biases.
    - **position**: ``learned`` vectors, or ``rotary``, with **n_kv_head** and **rope_base**.
    - **norm**: ``layer`` or ``rms``. **mlp**: ``gelu`` or ``swiglu``, of width **mlp_dim**.
    - **tie_weights**: whether the last layer shares its weights with the embedding of tokens.

    Shapes: tokens ``(batch, positions)``, logits ``(batch, positions, vocab_size)``. Names follow GPT-2: ``transformer.wte``,
    ``transformer.wpe``, ``transformer.h.0.attn.c_attn``, ..., ``transformer.ln_f``, ``lm_head``. With a ``cache``
    (:class:`~netcl.nn.attention.KVCache`) the tokens are only the new ones.

    >>> from netcl import nn, zeros
    >>> model = nn.GPT(vocab_size=65, block_size=16, n_layer=2, n_head=2, n_embd=32)
    >>> model(zeros((2, 8), dtype="int64")).shape
    (2, 8, 65)
    >>> model.generate([[1, 2, 3]], max_new_tokens=4, temperature=0).shape
    (1, 7)
    """

    def __init__(self, vocab_size: int, block_size: int = 128, n_layer: int = 4, n_head: int = 4, n_embd: int = 128, dropout: float = 0.0,
                 bias: bool = True, position: str = "learned", norm: str = "layer", mlp: str = "gelu", mlp_dim: int | None = None,
                 n_kv_head: int | None = None, rope_base: float = 10000.0, tie_weights: bool = True):  # fmt: skip
        super().__init__()
        self.vocab_size, self.block_size, self.n_layer = vocab_size, block_size, n_layer
        block = (n_embd, n_head, bias, dropout, norm, mlp, mlp_dim, position, n_kv_head, rope_base)
        parts: dict[str, Module] = {"wte": Embedding(vocab_size, n_embd)}
        if position == "learned":
            parts["wpe"] = Embedding(block_size, n_embd)
        parts["drop"] = Dropout(dropout)
        parts["h"] = ModuleList(TransformerBlock(*block) for _ in range(n_layer))
        parts["ln_f"] = make_norm(norm, n_embd, bias)
        self.transformer = ModuleDict(parts)
        self.lm_head = Linear(n_embd, vocab_size, bias=False)
        self._start()
        if tie_weights:
            self.lm_head.weight = parts["wte"].weight  # type: ignore[attr-defined]

    def _start(self) -> None:
        """Initialize as GPT-2: small normal weights, smaller ones at the end of residual branches."""
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                ends = name.endswith(("c_proj.weight", "o_proj.weight", "w2.weight"))
                init.normal_(parameter, std=0.02 / (2 * self.n_layer) ** 0.5 if ends else 0.02)
            elif name.endswith("bias"):
                init.zeros_(parameter)

    def forward(self, tokens: Tensor, cache: KVCache | None = None) -> Tensor:
        return self.head(self.states(tokens, cache))

    def head(self, states: Tensor) -> Tensor:
        """Compute the logits from the result of :meth:`states`."""
        return self.lm_head(states)

    def states(self, tokens: Tensor, cache: KVCache | None = None) -> Tensor:
        """Compute the hidden states ``(batch, positions, n_embd)``, the input of :meth:`head`."""
        seen = 0 if cache is None else cache.length
        if tokens.ndim != 2 or seen + tokens.shape[1] > self.block_size:
            what = f"tokens must be (batch, positions) with at most {self.block_size} positions, including those in the cache"
            raise ShapeError(message("GPT", what, shape=tokens.shape, in_cache=seen))
        parts = self.transformer
        x = parts["wte"](tokens)
        if "wpe" in parts:
            table, length = parts["wpe"].weight, tokens.shape[1]
            if cache is not None:
                x = ag.add(x, parts["wpe"](cache.positions(tokens.shape[0], length, tokens.queue)))
            else:
                x = ag.add(x, table if length == self.block_size else ag.narrow(table, 0, 0, length))
        x = parts["drop"](x)
        for layer, block in enumerate(parts["h"].children()):
            x = block(x, cache, layer)
        return parts["ln_f"](x)

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Compute the mean cross-entropy of the next tokens, ``targets``; targets of -100 are ignored.

        Shapes: both ``(batch, positions)``.
        """
        logits = self(tokens)
        flat = ag.reshape(targets, (-1,)) if isinstance(targets, Tensor) else np.asarray(targets).reshape(-1)
        return ag.cross_entropy(ag.reshape(logits, (-1, self.vocab_size)), flat)

    def new_cache(self, capacity: int | None = None, dtype: str | None = None) -> KVCache:
        """Return an empty :class:`KVCache` of this ``capacity`` and ``dtype`` for the model."""
        return KVCache(self.n_layer, capacity, dtype)

    def generate(self, tokens: Any, max_new_tokens: int, temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None,
                 eos_token: int | None = None, use_cache: bool = True) -> Tensor:  # fmt: skip
        """Continue sequences token by token; returns the prompts with the new tokens, int64 ``(batch, positions)``.

        - **tokens**: the prompts, ``(batch, positions)`` or ``(positions,)``.
        - **temperature**: the divisor of the logits; 0 always chooses the most likely token.
        - **top_k**: choose among this many of the most likely tokens. **top_p**: among the fewest that have this total probability.
        - **eos_token**: a sequence ends with this token and is then padded with it; generation stops when all sequences have ended.
        - **use_cache**: whether to compute only new positions. Beyond ``block_size``, every token recomputes the whole window.

        The seed of random choices comes from the device's generator, so ``netcl.manual_seed`` repeats them.
        """
        sampling = Sampling(temperature, top_k, top_p).check(max_new_tokens)
        sequence = np.atleast_2d(np.asarray(tokens.to_host() if isinstance(tokens, Tensor) else tokens, np.int64))
        if sequence.shape[1] == 0:
            raise ShapeError(message("generate", "tokens must not be empty", shape=sequence.shape))
        done = np.zeros(len(sequence), bool)
        for chosen in self._chosen(sequence, max_new_tokens, sampling, use_cache):
            if eos_token is not None:
                chosen = np.where(done, eos_token, chosen)
                done |= chosen == eos_token
            sequence = np.concatenate([sequence, chosen[:, None]], axis=1)
            if done.all():
                break
        return Tensor.from_host(self.queue, sequence)

    def _chosen(self, sequence: np.ndarray, most: int, sampling: Sampling, use_cache: bool) -> Iterator[np.ndarray]:
        draw = random_draws(None, self.queue)
        room = self.block_size - sequence.shape[1] + 1
        cached = min(most, room) if use_cache else 0
        if cached > 0:
            for chosen in continued(self, list(sequence), cached, sampling, draw):
                sequence = np.concatenate([sequence, chosen[:, None]], axis=1)
                yield chosen
        for _ in range(most - max(0, cached)):  # the window slides: every token changes every position
            with ag.no_grad(), evaluating(self):
                states = self.states(Tensor.from_host(self.queue, sequence[:, -self.block_size :]))
                logits = ag.reshape(self.head(ag.narrow(states, 1, states.shape[1] - 1, 1)), (len(sequence), -1))
                uniform = draw(len(sequence)) if sampling.temperature else np.zeros(len(sequence), np.float32)
                chosen = checked_tokens(sampling.choose(logits, Tensor.from_host(self.queue, uniform)).to_host())
            sequence = np.concatenate([sequence, chosen[:, None]], axis=1)
            yield chosen
