"""Text generation with decoders: fills a cache with the prompts, then runs steps of a few tokens, compiled if possible.

A decoder is a module that maps ids and a cache to logits, with ``states(ids, cache)``, ``head(states)`` and ``new_cache(capacity)``:
:class:`netcl.nn.GPT` or :class:`netcl.models.CausalLM`. A decoder whose work depends on more than shapes (on the length so far, or on
values read on the host) sets ``replayable = False``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

import netcl.autograd as ag
from netcl.amp.autocast import get_autocast_dtype
from netcl.core.device import queue_of
from netcl.core.errors import message
from netcl.core.tensor import Tensor
from netcl.nn.attention import KVCache
from netcl.nn.pickling import Recomputed
from netcl.nn.summary import evaluating
from netcl.replay import compiled

PREFILL = 512  # tokens of a prompt per pass
LEAST_ROOM = 64
NOT_FINITE = "the logits must be finite", "check the weights for NaN, or load a dtype that does not overflow: float32, bfloat16"


class Sampling(NamedTuple):
    """The options for choosing the next token from logits.

    - **temperature**: the divisor of the logits; 0 always chooses the most likely token.
    - **top_k**: choose among this many of the most likely tokens. **top_p**: among the fewest that have this total probability.
      **min_p**: among tokens with at least this fraction of the highest probability.
    - **repetition_penalty**: divides positive logits of tokens in the prompt or the generated text, and multiplies negative ones.
    - **presence_penalty**, **frequency_penalty**: subtracted from a generated token's logit once, or once per occurrence.
    - :meth:`choose` also takes float tensors ``(batch, 1)``, a value per row. In them ``top_k=1`` replaces ``temperature=0``.
    """

    temperature: Any = 1.0
    top_k: Any = None
    top_p: Any = None
    min_p: Any = None
    repetition_penalty: Any = 1.0
    presence_penalty: Any = 0.0
    frequency_penalty: Any = 0.0

    def check(self, new_tokens: int = 0) -> Sampling:
        """Raise ``ValueError`` for invalid options; returns the options, with a temperature that float32 rounds to 0 as 0."""
        if not isinstance(new_tokens, int | np.integer) or new_tokens < 0:
            raise ValueError(message("generate", "max_new_tokens must be an integer of at least 0", max_new_tokens=new_tokens))
        temperature, top_k, top_p, min_p, repetition, *others = self
        whole = top_k is None or (isinstance(top_k, int | np.integer) and top_k >= 1)
        chosen = not temperature >= 0 or not whole or (top_p is not None and not 0 < top_p <= 1)
        if chosen or not 0 <= (min_p or 0) <= 1 or not 0 < repetition < np.inf or not np.isfinite(others).all():
            what = "temperature must be at least 0, top_k an integer from 1, top_p in (0, 1], min_p in [0, 1], repetition_penalty above 0, "
            what += "and penalties finite"
            raise ValueError(message("generate", what, **self._asdict()))
        return self if temperature >= np.finfo(np.float32).tiny else self._replace(temperature=0.0)

    @property
    def penalizes(self) -> bool:
        """Whether the choice depends on earlier tokens."""
        return self[4:] != (1, 0, 0)

    def choose(self, logits: Tensor, uniform: Tensor, counts: Tensor | None = None) -> Tensor:
        """Choose one token per row of logits ``(batch, vocabulary)`` on the device; returns ``(batch, 1)``, -1 for logits with NaN or inf.

        ``uniform`` has a random number in [0, 1) per row. Penalties need ``counts`` from :func:`token_counts`; the chosen tokens are added
        to ``counts`` in place.

        >>> import numpy as np, netcl
        >>> logits = netcl.tensor(np.log([[0.1, 0.6, 0.3]]).astype("float32"))
        >>> [Sampling(top_k=2).choose(logits, netcl.tensor([u])).item() for u in (0.65, 0.7)]
        [1, 2]
        """
        if counts is None:
            return self._chosen(logits, uniform)
        token = self._chosen(self._penalized(ag.cast(logits, "float32"), counts), uniform)
        counts.scatter_add_(1, ag.maximum(token, 0), ag.cast(ag.ge(token, 0), "float32"))
        return token

    def _penalized(self, logits: Tensor, counts: Tensor) -> Tensor:
        *_, repetition, presence, frequency = self
        repeated = ag.where(ag.gt(logits, 0), ag.div(logits, repetition), ag.mul(logits, repetition))
        logits, made = ag.where(ag.gt(counts, 0), repeated, logits), ag.floor(counts)
        return ag.sub(logits, ag.add(ag.mul(made, frequency), ag.mul(ag.minimum(made, 1), presence)))

    def _chosen(self, logits: Tensor, uniform: Tensor) -> Tensor:
        if not isinstance(self.top_k, Tensor) and not isinstance(self.temperature, Tensor) and self.temperature == 0:
            return ag.finite_argmax(logits, axis=-1, keepdims=True)
        values, order, weights = self._weighed(ag.cast(logits, "float32"))
        total = ag.cumsum(weights, axis=1)
        reached = ag.le(total, ag.mul(ag.reshape(uniform, (-1, 1)), ag.narrow(total, 1, total.shape[1] - 1, 1)))
        place = ag.sum(ag.cast(reached, "int64"), axis=1, keepdims=True)
        last = ag.maximum(ag.sub(ag.sum(ag.cast(ag.gt(weights, 0), "int64"), axis=1, keepdims=True), 1), 0)
        return ag.where(ag.isfinite(ag.narrow(values, 1, 0, 1)), ag.gather(order, 1, ag.minimum(place, last)), -1)

    def _weighed(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the logits in descending order, their tokens, and weights in the ratio of the tokens' probabilities."""
        by_row = isinstance(self.top_k, Tensor)
        whole = self.top_k is None or by_row
        values, order = ag.sort(logits, axis=-1, descending=True) if whole else ag.topk(logits, min(self.top_k, logits.shape[1]))
        weights = ag.exp(ag.div(ag.sub(values, ag.narrow(values, 1, 0, 1)), self.temperature))
        if by_row:
            places = Tensor.from_host(logits.queue, np.arange(logits.shape[1], dtype=np.float32)[None])
            weights = ag.where(ag.lt(places, self.top_k), weights, 0.0)
        if self.top_p is not None:
            total = ag.cumsum(weights, axis=1)
            before = ag.div(ag.sub(total, weights), ag.narrow(total, 1, total.shape[1] - 1, 1))
            weights = ag.where(ag.lt(before, self.top_p), weights, 0.0)
        if self.min_p is not None:
            weights = ag.where(ag.ge(weights, self.min_p), weights, 0.0)
        return values, order, weights

    def probabilities(self, logits: np.ndarray) -> np.ndarray:
        """Return the distribution that :meth:`choose` draws from without penalties, for rows of finite logits, on the host."""
        if not np.isfinite(logits.max(-1)).all():
            raise ValueError(message("generate", *NOT_FINITE))
        if self.temperature == 0:
            return (np.arange(logits.shape[-1]) == logits.argmax(-1)[..., None]).astype(np.float64)
        _, order, weights = (t.to_host() for t in self._weighed(Tensor.from_host(queue_of("cpu"), logits, "float64")))
        found = np.zeros(logits.shape)
        np.put_along_axis(found, order, weights / weights.sum(-1, keepdims=True), -1)
        return found


def checked_tokens(tokens: np.ndarray) -> np.ndarray:
    """Return the tokens ``(batch, 1)`` of :meth:`Sampling.choose` as ``(batch,)``; raises if logits were not finite."""
    if tokens.min() < 0:
        raise ValueError(message("generate", *NOT_FINITE))
    return tokens[:, 0]


def token_counts(prompts: Sequence[Sequence[int]], vocabulary: int) -> np.ndarray:
    """Return the initial counts for penalties, ``(batch, vocabulary)``: 0.5 for tokens of the prompt, else 0. Each chosen token adds 1."""
    counts = np.zeros((len(prompts), vocabulary), np.float32)
    for row, prompt in zip(counts, prompts, strict=True):
        row[list(prompt)] = 0.5
    return counts


def random_draws(seed: int | None, queue: Any) -> Callable[[int], np.ndarray]:
    """Return a function of a count that draws numbers in [0, 1) on the host; without a seed, the queue's random numbers provide one."""
    rng = functools.cache(lambda: np.random.default_rng(ag.rand(2, queue=queue).to_host().view(np.uint32) if seed is None else seed))
    return lambda count: rng().random(count, np.float32)


class _DecodingStep(NamedTuple):
    """The cache of a batch, the function of one decoding step (compiled if the model is replayable) and token counts for penalties."""

    cache: KVCache
    run: Callable[..., Tensor]
    counts: Tensor | None = None


@contextmanager
def _step_for(model: Any, role: str, batch: int, room: int, sampling: Sampling | None = None) -> Iterator[_DecodingStep]:
    """Provide an empty cache for ``room`` positions and a decoding step. The step returns tokens, or logits without ``sampling``.

    Cache and step are reused from an ended block with the same ``role`` if its settings match and its cache is large enough.
    """
    idle: dict[Any, _DecodingStep] = model.__dict__.setdefault("_decoding", Recomputed())
    dtypes = getattr(model, "cache_dtype", None), *sorted({p.dtype for p in model.parameters()})
    key = (role, id(model), batch, sampling, model.queue, getattr(model, "layer_queues", ()), dtypes, get_autocast_dtype())
    found = idle.pop(key, None)
    if found is None or (found.cache.capacity or 0) < room:
        for other in [other for other in idle if other[0] == role]:  # one cache at a time: it may be as large as the model
            idle.pop(other, None)
        cache = model.new_cache(min(max(LEAST_ROOM, 1 << (room - 1).bit_length()), max(room, getattr(model, "context", room))))
        counts = None
        if sampling is not None and sampling.penalizes:
            counts = Tensor.zeros((batch, model.lm_head.out_features), queue=model.queue, persistent=True)

        def step(tokens: Tensor, uniform: Tensor | None = None) -> Tensor:
            with ag.no_grad():
                if sampling is None or uniform is None:
                    return model(tokens, cache)
                logits = model(ag.maximum(tokens, 0), cache)  # -1: the host has not read yet that the last logits were not finite
                return sampling.choose(ag.reshape(logits, (tokens.shape[0], -1)), uniform, counts)

        found = _DecodingStep(cache, compiled.compile(step, fuse=True) if getattr(model, "replayable", True) else step, counts)
    found.cache.reset()
    try:
        yield found
    finally:
        found.cache.reserves_ahead(0)
        idle[key] = found


def _evaluation_of(model: Any) -> Callable[[], AbstractContextManager[None]]:
    """Return a function that makes :func:`evaluating` contexts, one per token; they do nothing if no module is in training mode."""
    parts, training = list(model.modules()), attrgetter("training")
    return lambda: evaluating(model) if True in map(training, parts) else nullcontext()


def continued(
    model: Any, prompts: Sequence[Sequence[int]], most: int, sampling: Sampling, draw: Callable[[int], np.ndarray], file: Any = None
) -> Iterator[np.ndarray]:
    """Yield the next token of each prompt as an array ``(batch,)``, at most ``most`` times. Prompts may have different lengths.

    ``draw`` is a function of :func:`random_draws`; it is not called for temperature 0. ``file`` stores the cache of a single prompt on
    disk: a :class:`netcl.models.prompt_cache.PromptFile`.
    """
    if most < 1:
        return
    lengths = [len(prompt) for prompt in prompts]
    batch, queue = len(prompts), model.queue
    ids = np.zeros((batch, max(lengths)), np.int64)
    for row, prompt in zip(ids, prompts, strict=True):
        row[: len(prompt)] = prompt

    unused = Tensor.zeros((batch,), queue=queue)

    def uniform() -> Tensor:
        return Tensor.from_host(queue, draw(batch)) if sampling.temperature else unused

    quiet = _evaluation_of(model)
    with _step_for(model, "text", batch, max(lengths) + most, sampling) as step:
        with ag.no_grad(), quiet():
            if step.counts is not None:
                step.counts.write(token_counts(prompts, step.counts.shape[1]))
            logits = prompt_logits(model, ids, lengths, step.cache, file)
            tokens = sampling.choose(logits, uniform(), step.counts)
            made = checked_tokens(tokens.to_host())
        yield made  # outside of the contexts, which would be the caller's too
        step.cache.reserves_ahead(1)
        ahead = getattr(model, "replayable", True)  # the device computes the next token while the host reads this one
        waiting: list[Callable[[], np.ndarray]] = []
        for _ in range(most - 1):
            step.cache.reserve(1)
            with quiet():
                tokens = step.run(tokens, uniform())
                waiting.append(tokens.to_host_async().wait if ahead else tokens.to_host().copy)
            if len(waiting) > ahead:
                yield checked_tokens(waiting.pop(0)())
        for read in waiting:
            yield checked_tokens(read())


def prompt_logits(model: Any, ids: np.ndarray, lengths: Sequence[int], cache: KVCache, file: Any = None) -> Tensor:
    """Return the logits after the last token of each prompt, ``(batch, vocabulary)``; the cache then holds the prompts.

    ``ids`` ``(batch, length)`` is padded where ``lengths`` are shorter.
    """
    whole = ids
    if file is not None:
        ids = whole[:, file.restore(cache, whole[0].tolist()) :]
    share = PREFILL if getattr(model, "replayable", True) else ids.shape[1]
    parts = [model.states(Tensor.from_host(model.queue, ids[:, i : i + share]), cache) for i in range(0, ids.shape[1], share)]
    states = parts[0] if len(parts) == 1 else ag.cat(parts, axis=1)
    if file is not None:
        file.store(cache, whole[0].tolist())
    if min(lengths) == whole.shape[1]:
        last = ag.narrow(states, 1, ids.shape[1] - 1, 1)
    else:
        cache.set_lengths(lengths)
        rows = Tensor.from_host(model.queue, np.arange(len(lengths)) * ids.shape[1] + np.array(lengths) - 1)
        last = ag.index_select(ag.reshape(states, (-1, states.shape[-1])), 0, rows)
    return ag.reshape(model.head(last), (len(lengths), -1))


class Speculator:
    """Generates text with two models. The draft proposes tokens one by one; the model then judges all proposals in one pass.

    Up to rounding, the text has the distribution of the model alone. Penalties are ignored. Both models must have the same vocabulary.
    """

    def __init__(self, model: Any, draft: Any, sampling: Sampling, draw: Callable[[int], np.ndarray], proposals: int = 4):
        self.sampling, self.draw, self.proposals = sampling, draw, proposals
        self._models = (model, draft)
        self._quiet: list[Callable[[], AbstractContextManager[None]]] = []
        self._steps: list[_DecodingStep] = []
        self.judged = self.accepted = 0  # proposals

    def _logits(self, which: int, tokens: Sequence[int]) -> np.ndarray:
        """Return the logits after each of the new ``tokens``, from the model (``which=0``) or the draft (``which=1``)."""
        (cache, run, _), model, new = self._steps[which], self._models[which], len(tokens)
        cache.reserves_ahead(new)
        try:
            cache.reserve(new)
            with self._quiet[which]():
                return run(Tensor.from_host(model.queue, np.array([tokens], np.int64))).to_host()[0]
        finally:
            cache.reserves_ahead(0)

    def _chosen(self, shares: np.ndarray) -> int:
        if self.sampling.temperature == 0:
            return int(shares.argmax())
        return int(min(np.searchsorted(shares.cumsum(), float(self.draw(1)[0]) * shares.sum(), side="right"), np.flatnonzero(shares)[-1]))

    def judge(self, proposed: Sequence[int], wanted: np.ndarray, drafted: np.ndarray) -> list[int]:
        """Return the accepted proposals and one more token. ``drafted`` and ``wanted`` are the draft's and the model's distributions.

        A proposal is accepted with probability ``min(1, wanted / drafted)``. The first rejected proposal is replaced by a draw from
        ``max(0, wanted - drafted)`` (Leviathan et al. 2023, https://arxiv.org/abs/2211.17192). If all proposals are accepted, one more
        token is drawn from the last distribution in ``wanted``.
        """
        for i, token in enumerate(proposed):
            p, q = wanted[i], drafted[i]
            if p[token] < q[token] and (p[token] == 0 or float(self.draw(1)[0]) * q[token] >= p[token]):
                return [*proposed[:i], self._chosen(np.maximum(p - q, 0))]
        return [*proposed, self._chosen(wanted[-1])]

    def tokens(self, prompt: Sequence[int], most: int, file: Any = None) -> Iterator[np.ndarray]:
        """Yield the next tokens after a prompt, each as an array ``(1,)``, at most ``most`` times; ``most`` must be at least 1."""
        (model, draft), room = self._models, len(prompt) + most + self.proposals
        with _step_for(model, "judge", 1, room) as judge, _step_for(draft, "draft", 1, room) as propose:
            self._steps = [judge, propose]
            self._quiet = [_evaluation_of(model) for model in self._models]
            yield from self._written(prompt, most, file)

    def _written(self, prompt: Sequence[int], most: int, file: Any) -> Iterator[np.ndarray]:
        ids, stretch = np.array([prompt], np.int64), getattr(self._models[0], "rope_stretch", lambda _: None)
        with ag.no_grad():
            with self._quiet[0]():
                logits = prompt_logits(self._models[0], ids, [len(prompt)], self._steps[0].cache, file).to_host()
            with self._quiet[1]():
                prompt_logits(self._models[1], ids, [len(prompt)], self._steps[1].cache)
        made = [self._chosen(self.sampling.probabilities(logits)[0])]
        written = [*prompt, *made]
        yield np.array(made)
        while len(written) < len(prompt) + most:
            proposals, drafted, now = min(self.proposals, len(prompt) + most - len(written) - 1), [], len(written)
            while stretch(now + proposals) != stretch(now):  # the model judges proposals with the frequencies of the longest text
                proposals -= 1
            fed = self._steps[1].cache.length
            proposed: list[int] = []
            for _ in range(proposals):
                for token in [*written, *proposed][fed:]:
                    shares = self.sampling.probabilities(self._logits(1, [token]))[-1]
                fed = len(written) + len(proposed)
                drafted.append(shares)
                proposed.append(self._chosen(shares))
            wanted = self.sampling.probabilities(self._logits(0, [written[-1], *proposed]))
            made = self.judge(proposed, wanted, np.array(drafted))
            self.judged, self.accepted = self.judged + len(proposed), self.accepted + len(made) - 1
            for token in made:
                written.append(token)
                yield np.array([token])
            for step in self._steps:
                step.cache.truncate(len(written) - 1)
