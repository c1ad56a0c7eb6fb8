"""Generation with decoders: prompts in one pass, then token by token over a cache, with a compiled step per token.

A decoder is a module with ``states(ids, cache)``, ``head(states)`` and ``new_cache(capacity)``: :class:`netcl.nn.GPT` and
:class:`netcl.models.CausalLM` are. A decoder whose work depends on more than shapes (on the length so far, or on values read on the
host) sets ``replayable = False``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

import netcl.autograd as ag
from netcl.core.errors import message
from netcl.core.tensor import Tensor
from netcl.nn.attention import KVCache
from netcl.nn.summary import evaluating
from netcl.replay import compiled

PREFILL = 512  # tokens of a prompt per pass
LEAST_ROOM = 64


class Sampling(NamedTuple):
    """How the next token is chosen from logits.

    - **temperature**: 0 takes the likeliest; below 1 prefers likely tokens, above 1 unlikely ones.
    - **top_k**: choose among so many likeliest. **top_p**: among the fewest whose probabilities reach it.
    - For :meth:`choose` all three may be float tensors ``(batch, 1)``, a setting per row; a ``top_k`` of 1 then takes the likeliest.
    """

    temperature: Any = 1.0
    top_k: Any = None
    top_p: Any = None

    def check(self) -> Sampling:
        """Return the options; raises ``ValueError`` for invalid ones."""
        temperature, top_k, top_p = self
        if not temperature >= 0 or (top_k is not None and top_k < 1) or (top_p is not None and not 0 < top_p <= 1):
            what = "temperature must be at least 0, top_k at least 1, and top_p in (0, 1]"
            raise ValueError(message("generate", what, temperature=temperature, top_k=top_k, top_p=top_p))
        return self

    def choose(self, logits: Tensor, uniform: Tensor) -> Tensor:
        """Choose one token per row of logits ``(batch, vocabulary)`` by a number in [0, 1) per row, on the device; ``(batch, 1)``.

        >>> import numpy as np, netcl
        >>> logits = netcl.tensor(np.log([[0.1, 0.6, 0.3]]).astype("float32"))
        >>> [Sampling(top_k=2).choose(logits, netcl.tensor([u])).item() for u in (0.65, 0.7)]
        [1, 2]
        """
        by_row = isinstance(self.top_k, Tensor)
        if not by_row and self.temperature == 0:
            return ag.argmax(logits, axis=-1, keepdims=True)
        logits, whole = ag.cast(logits, "float32"), self.top_k is None or by_row
        ranked = ag.sort(logits, axis=-1, descending=True) if whole else ag.topk(logits, min(self.top_k, logits.shape[1]))
        values, order = ranked
        weights = ag.exp(ag.div(ag.sub(values, ag.narrow(values, 1, 0, 1)), self.temperature))
        if by_row:
            places = Tensor.from_host(logits.queue, np.arange(logits.shape[1], dtype=np.float32)[None])
            weights = ag.where(ag.lt(places, self.top_k), weights, 0.0)
        total = ag.cumsum(weights, axis=1)
        if self.top_p is not None:
            before = ag.div(ag.sub(total, weights), ag.narrow(total, 1, total.shape[1] - 1, 1))
            weights = ag.where(ag.lt(before, self.top_p), weights, 0.0)
            total = ag.cumsum(weights, axis=1)
        reached = ag.le(total, ag.mul(ag.reshape(uniform, (-1, 1)), ag.narrow(total, 1, total.shape[1] - 1, 1)))
        place = ag.sum(ag.cast(reached, "int64"), axis=1, keepdims=True)
        last = ag.sub(ag.sum(ag.cast(ag.gt(weights, 0), "int64"), axis=1, keepdims=True), 1)
        return ag.gather(order, 1, ag.minimum(place, last))


class _Step(NamedTuple):
    """The cache of a batch and the compiled step over it."""

    cache: KVCache
    run: Callable[[Tensor, Tensor], Tensor]


def _make_step(model: Any, cache: KVCache, sampling: Sampling) -> _Step:
    def step(tokens: Tensor, uniform: Tensor) -> Tensor:
        with ag.no_grad():
            logits = model.head(model.states(tokens, cache))
            return sampling.choose(ag.reshape(logits, (tokens.shape[0], -1)), uniform)

    return _Step(cache, compiled.compile(step, fuse=True) if getattr(model, "replayable", True) else step)


def _step_for(model: Any, batch: int, room: int, sampling: Sampling) -> _Step:
    """Return the step of the last call if its settings match and its cache is large enough."""
    kept: dict[Any, _Step] = model.__dict__.setdefault("_decoding", {})
    key = (batch, sampling, model.queue)
    found = kept.get(key)
    if found is None or (found.cache.capacity or 0) < room:
        kept.clear()  # one cache at a time: it may be as large as the model
        capacity = min(max(LEAST_ROOM, 1 << (room - 1).bit_length()), max(room, getattr(model, "context", room)))
        found = kept[key] = _make_step(model, model.new_cache(capacity), sampling)
    found.cache.reset()
    return found


def continued(
    model: Any, prompts: Sequence[Sequence[int]], most: int, sampling: Sampling, draw: Callable[[int], np.ndarray]
) -> Iterator[np.ndarray]:
    """Yield the tokens that follow each prompt, ``(batch,)`` at a time, at most ``most`` times. Prompts may have different lengths.

    ``draw(batch)`` gives the random numbers of a token, in [0, 1); it is not called for temperature 0.
    """
    if most < 1:
        return
    lengths = [len(prompt) for prompt in prompts]
    batch, queue = len(prompts), model.queue
    ids = np.zeros((batch, max(lengths)), np.int64)
    for row, prompt in zip(ids, prompts, strict=True):
        row[: len(prompt)] = prompt

    def uniform() -> Tensor:
        drawn = np.asarray(draw(batch), np.float32) if sampling.temperature else np.zeros(batch, np.float32)
        return Tensor.from_host(queue, np.minimum(drawn, np.float32(1 - 2**-24)))

    with ag.no_grad(), evaluating(model):
        step = _step_for(model, batch, max(lengths) + most, sampling)
        tokens = sampling.choose(prompt_logits(model, ids, lengths, step.cache), uniform())
        yield tokens.to_host()[:, 0]
    step.cache.reserves_ahead(1)
    try:
        for _ in range(most - 1):
            step.cache.reserve(1)
            with evaluating(model):
                tokens = step.run(tokens, uniform())
                made = tokens.to_host()[:, 0]
            yield made
    finally:
        step.cache.reserves_ahead(0)


def prompt_logits(model: Any, ids: np.ndarray, lengths: Sequence[int], cache: KVCache) -> Tensor:
    """Compute the logits after the last token of each prompt, ``(batch, vocabulary)``; the cache then holds the prompts."""
    share = PREFILL if getattr(model, "replayable", True) else ids.shape[1]
    parts = [model.states(Tensor.from_host(model.queue, ids[:, i : i + share]), cache) for i in range(0, ids.shape[1], share)]
    states = parts[0] if len(parts) == 1 else ag.cat(parts, axis=1)
    if len(set(lengths)) == 1:
        last = ag.narrow(states, 1, ids.shape[1] - 1, 1)
    else:
        cache.set_lengths(lengths)
        rows = Tensor.from_host(model.queue, np.arange(len(lengths)) * ids.shape[1] + np.array(lengths) - 1)
        last = ag.index_select(ag.reshape(states, (-1, states.shape[-1])), 0, rows)
    return ag.reshape(model.head(last), (len(lengths), -1))
