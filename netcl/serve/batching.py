"""Continuous batching: sequences join and leave a running batch with a fixed number of slots. Every step computes all slots.

Prompts that wait are computed together, then their keys and values are copied into free slots. Steps are compiled if the model can be
replayed.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

import netcl.autograd as ag
from netcl.core.errors import message
from netcl.core.tensor import Tensor
from netcl.models import CausalLM, TextStream
from netcl.nn.attention import KVCache
from netcl.nn.decoding import NOT_FINITE, Sampling, prompt_logits, token_counts
from netcl.replay import compiled

# What computing may raise: a request ends, the server goes on.
_MODEL_FAULTS = (ValueError, TypeError, RuntimeError, MemoryError, LookupError, ArithmeticError)
GREEDY = (1.0, 1.0, 1.0, 0.0)  # temperature, top_k, top_p, min_p; three penalties and a random number follow
_IDLE = (*GREEDY, 1.0, 0.0, 0.0, 0.0)
_JOINED_TOKENS = 2048  # of prompts that are computed together, with padding: the running sequences wait for them
_PADDED = 32  # prompts are padded to multiples of this length, because ops are planned for each length
_NO_TOKEN = f"the model failed: {message('serve', *NOT_FINITE)}"
_ENDING = message("serve", "the server is shutting down")


class ServeLimits(NamedTuple):
    """The limits of a server: batch and queue sizes, tokens, time."""

    batch: int = 8  # sequences that are computed together
    queue: int = 64  # requests that wait beyond them
    context: int | None = None  # the most tokens of a prompt and its answer; by default the model's, at most 4096
    tokens: int = 1024  # the most of an answer
    timeout: float = 120.0  # seconds from a request to the end of its answer


class ServeError(RuntimeError):
    """An error that rejects or ends a request; ``status`` is the HTTP status code of the response."""

    def __init__(self, status: int, text: str):
        super().__init__(text)
        self.status = status


class AnswerPart(NamedTuple):
    """A part of the answer to a request: a piece of text, its end (``"stop"`` or ``"length"``), an error or a vector."""

    text: str = ""
    finish: str = ""
    error: ServeError | None = None
    vector: list[float] | None = None


class TextRequest:
    """A prompt to continue with at most ``most`` tokens, or to embed if ``most`` is 0. The options are those of ``CausalLM.generate``.

    ``deliver`` is called with every :class:`AnswerPart` in the model's thread. Setting ``cancelled`` ends the request at the next token.
    """

    def __init__(self, ids: Iterable[int], most: int, deliver: Callable[[AnswerPart], None], sampling: Sampling | None = None,
                 seed: int | None = None, stops: Sequence[str] = ()):  # fmt: skip
        self.ids, self.most, self.deliver, self.stops = [int(i) for i in ids], most, deliver, stops
        self.sampling = (sampling or Sampling(temperature=0.0)).check()
        self.made = self.last = 0  # how many tokens there are, and the newest
        self.cancelled, self.begun, self._rng = False, 0.0, np.random.default_rng(seed)
        self.stream: TextStream

    def settings(self, vocabulary: int) -> tuple[float, ...]:
        """Return the sampling options and a random number in [0, 1) for the next token. ``None`` is replaced by a value without effect."""
        temperature, top_k, top_p, min_p, *penalties = self.sampling
        if not temperature:
            return *GREEDY, *penalties, 0.0
        return temperature, top_k or vocabulary, top_p or 1.0, min_p or 0.0, *penalties, float(self._rng.random(dtype=np.float32))


class Metrics:
    """Metrics in Prometheus' text format; any thread may change them. Counters end in ``_total``, durations in ``_seconds``."""

    def __init__(self) -> None:
        self._lock, self._values = threading.Lock(), Counter[str]()

    def add(self, name: str, amount: float = 1, **labels: object) -> None:
        """Add ``amount`` to a counter or, if ``name`` ends in ``_seconds``, a duration to a summary."""
        written = ",".join(f'{key}="{value}"' for key, value in labels.items())
        one = {f"{name}{{{written}}}" if written else name: amount}
        parts = {f"{name}_sum": amount, f"{name}_count": 1} if name.endswith("_seconds") else one
        with self._lock:
            self._values.update(parts)

    def text(self, waiting: int, running: int) -> str:
        """Return all metrics as text, with the current numbers of waiting and running requests."""
        gauges, families = {"netcl_queue_length": waiting, "netcl_running_sequences": running}, dict[str, list[str]]()
        with self._lock:
            for key, value in sorted({**self._values, **gauges}.items()):
                name = key.partition("{")[0].removesuffix("_sum").removesuffix("_count")
                kind = "gauge" if key in gauges else "summary" if name.endswith("_seconds") else "counter"
                families.setdefault(f"# TYPE {name} {kind}", []).append(f"{key} {value}")
        return "".join(f"{line}\n" for first, rest in families.items() for line in (first, *rest))


def _next_tokens(logits: Tensor, settings: Tensor | None, counts: Tensor | None) -> Tensor:
    """Choose a token per row with the values of :meth:`TextRequest.settings`, by default the most likely; -1 for NaN or infinite logits."""
    if settings is None:
        return Sampling(temperature=0.0).choose(logits, logits)
    *options, drawn = (ag.narrow(settings, 1, i, 1) for i in range(settings.shape[1]))
    return Sampling(*options).choose(logits, drawn, counts)


class Batcher:
    """Answers many requests at a time with one model, which must have a tokenizer.

    ``with batcher:`` answers requests in a thread that owns the model. Without the thread, call ``turn()`` for each round.
    """

    def __init__(self, model: CausalLM, limits: ServeLimits | None = None, clock: Callable[[], float] = time.monotonic):
        self.model, self.limits, self.clock, self.metrics = model.eval(), limits or ServeLimits(), clock, Metrics()
        self.capacity, self.vocabulary = min(model.context, self.limits.context or 4096), model.config.vocab_size
        self.ends = {*model.end_tokens(), *model.tokenizer.end_tokens}
        # Rotary angles that depend on the longest length of a batch would mix the sequences.
        grows = model.rope_stretch(1) != model.rope_stretch(model.context)
        self.slots: list[TextRequest | None] = [None] * (1 if grows else self.limits.batch)
        self._padded = 1 if grows else _PADDED
        self.waiting: deque[TextRequest] = deque()
        self._changed, self._thread = threading.Condition(), threading.Thread(target=self._work, name="netcl-serve", daemon=True)
        self.closing: float | None = None  # when what is left must have ended
        self._make_cache()

    def _make_cache(self) -> None:
        """Allocate the caches of an empty batch and create its step, compiled if the model can be replayed."""
        model, cache = self.model, self.model.new_cache(self.capacity)
        self._joining, self._cache, self._lengths = dict[tuple[int, int], KVCache](), cache, [0] * len(self.slots)
        self._members: list[TextRequest | None] = []  # of the slots when lengths were last written
        with ag.no_grad():
            model.states(Tensor.from_host(model.queue, np.zeros((len(self.slots), 1), np.int64)), cache)
        cache.set_lengths(self._lengths)
        cache.reserves_ahead(1)
        counts = self._counts = Tensor.zeros((len(self.slots), self.vocabulary), "float32", queue=model.queue, persistent=True)

        def step(tokens: Tensor, settings: Tensor | None = None, penalize: bool = False) -> Tensor:
            with ag.no_grad():
                logits = ag.reshape(model(tokens, cache), (tokens.shape[0], -1))
                return _next_tokens(logits, settings, counts if penalize else None)

        self._step = compiled.compile(step) if model.replayable else step

    @property
    def running(self) -> int:
        """The number of sequences in the batch."""
        return sum(request is not None for request in self.slots)

    def submit(self, request: TextRequest) -> None:
        """Enqueue a request. Raises :class:`ServeError` if it is invalid or too long, the queue is full, or the server is shutting down."""
        tokens = len(request.ids)
        if not tokens or tokens + request.most > self.capacity:
            what = f"a prompt must have at least 1 token, and at most {self.capacity} tokens together with its answer"
            raise ServeError(400, message("serve", what, prompt=tokens, answer=request.most))
        lowest, highest = min(request.ids), max(request.ids)
        if lowest < 0 or highest >= self.vocabulary:
            raise ServeError(400, message("serve", f"token ids must be from 0 to {self.vocabulary - 1}", lowest=lowest, highest=highest))
        request.begun, request.stream = self.clock(), TextStream(self.model.tokenizer, request.ids, request.stops)
        with self._changed:
            if self.closing is not None:
                raise ServeError(503, _ENDING)
            if len(self.waiting) >= self.limits.queue:
                raise ServeError(429, message("serve", "the request queue is full", "try again later", waiting=len(self.waiting)))
            self.waiting.append(request)
            self._changed.notify()

    def _end(self, request: TextRequest, outcome: str, part: AnswerPart) -> None:
        self.metrics.add("netcl_answers_total", outcome=outcome)
        self.metrics.add("netcl_answer_seconds", self.clock() - request.begun)
        if request in self.slots:
            self.slots[self.slots.index(request)] = None
        if not request.cancelled:
            request.deliver(part)

    def _fail(self, requests: Iterable[TextRequest | None], status: int, text: str) -> None:
        for request in [request for request in requests if request is not None]:
            outcome = "cancelled" if request.cancelled else "timeout" if status == 504 else "error"
            self._end(request, outcome, AnswerPart(error=ServeError(status, text)))

    def turn(self) -> None:
        """Run one round: end requests that are cancelled or timed out, add waiting prompts, and compute one token of every sequence."""
        now, late = self.clock(), message("serve", "the request took longer than the timeout of the server", seconds=self.limits.timeout)
        over = self.closing is not None and now >= self.closing
        with self._changed:
            asked = [request for request in (*self.waiting, *self.slots) if request is not None]
            ended = [one for one in asked if one.cancelled or over or now >= one.begun + self.limits.timeout]
            self.waiting = deque(request for request in self.waiting if request not in ended)
        self._fail(ended, *((503, _ENDING) if over else (504, late)))
        with self._changed:
            joins = self._next_prompts()
        try:
            if joins and not joins[0].most:
                self._embed(joins[0])
            elif joins:
                self._join(joins)
        except _MODEL_FAULTS as fault:
            self._fail(joins, 500, f"the model failed: {fault}")
        try:
            if self.running:
                self._decode()
        except _MODEL_FAULTS as fault:
            self._fail(self.slots, 500, f"the model failed: {fault}")
            self._make_cache()

    def _next_prompts(self) -> list[TextRequest]:
        """Remove the first waiting requests that can be computed together and return them: one to embed, or those with a free slot."""
        found: list[TextRequest] = []
        while self.waiting:
            longest = max(len(request.ids) for request in (*found, self.waiting[0]))
            fits = not found or (self.waiting[0].most and (len(found) + 1) * longest <= _JOINED_TOKENS)
            if not fits or (self.waiting[0].most and len(found) == self.slots.count(None)):
                break
            found.append(self.waiting.popleft())
            if not found[0].most:
                break
        return found

    def _embed(self, request: TextRequest) -> None:
        with ag.no_grad():
            states = self.model.states(Tensor.from_host(self.model.queue, np.array([request.ids], np.int64)))
            vector = ag.cast(ag.mean(states, axis=1), "float32").to_host()[0].tolist()
        self.metrics.add("netcl_prompt_tokens_total", len(request.ids))
        self._end(request, "embedding", AnswerPart(vector=vector))

    def _join(self, requests: list[TextRequest]) -> None:
        """Compute prompts and their first tokens, and put the sequences into free slots."""
        lengths = [len(request.ids) for request in requests]
        width = min(self.capacity, -(-max(lengths) // self._padded) * self._padded)
        ids = np.zeros((min(len(self.slots), 1 << (len(requests) - 1).bit_length()), width), np.int64)
        for i, request in enumerate(requests):
            ids[i, : len(request.ids)] = request.ids
        lengths += [1] * (len(ids) - len(requests))  # rows that round the number of prompts up
        cache = self._cache_for(*ids.shape)
        rows = [*requests, *[None] * (len(ids) - len(requests))]
        with ag.no_grad():
            settings, penalize = self._settings(rows)
            known = token_counts([[] if request is None else request.ids for request in rows], self.vocabulary) if penalize else None
            counts = None if known is None else Tensor.from_host(self.model.queue, known)
            tokens = _next_tokens(prompt_logits(self.model, ids, lengths, cache), settings, counts).to_host()[:, 0].tolist()
            for row, (request, token) in enumerate(zip(requests, tokens, strict=False)):
                self.metrics.add("netcl_prompt_tokens_total", len(request.ids))
                if token < 0:
                    self._fail([request], 500, _NO_TOKEN)
                    continue
                self.metrics.add("netcl_first_token_seconds", self.clock() - request.begun)
                slot = self.slots.index(None)
                self.slots[slot] = request
                self._advance(request, token)
                if self.slots[slot] is request:
                    self._cache.copy_sequence(slot, cache, row)
                    self._lengths[slot] = len(request.ids)
                    if request.sampling.penalizes and counts is not None:
                        self._counts[slot : slot + 1] = ag.narrow(counts, 0, row, 1)

    def _cache_for(self, rows: int, width: int) -> KVCache:
        """Return an empty cache for prompts; the last one is used again if it has these sizes."""
        key = rows, min(self.capacity, 1 << (width - 1).bit_length())
        if key not in self._joining:
            self._joining = {key: self.model.new_cache(key[1])}
        self._joining[key].reset()
        return self._joining[key]

    def _settings(self, requests: Sequence[TextRequest | None]) -> tuple[Tensor | None, bool]:
        """Return the settings of requests by row, ``None`` if all take the most likely token, and whether one of them has penalties."""
        options = [request.sampling for request in requests if request is not None]
        penalize = any(one.penalizes for one in options)
        if not penalize and not any(one.temperature for one in options):
            return None, False
        rows = [_IDLE if request is None else request.settings(self.vocabulary) for request in requests]
        return Tensor.from_host(self.model.queue, np.array(rows, np.float32)), penalize

    def _decode(self) -> None:
        queue, slots = self.model.queue, list(self.slots)
        if slots != self._members:  # empty slots begin at 0 again, so that none outgrows the longest sequence
            self._lengths = [0 if request is None else length for request, length in zip(slots, self._lengths, strict=True)]
            self._cache.set_lengths(self._lengths)
            self._members = slots
        last = Tensor.from_host(queue, np.array([[0 if request is None else request.last] for request in slots], np.int64))
        settings, penalize = self._settings(slots)
        self._cache.reserve(1)
        made = (self._step(last) if settings is None else self._step(last, settings, penalize)).to_host()[:, 0]
        self._lengths = [length + 1 for length in self._lengths]
        for request, token in zip(slots, made, strict=True):
            if request is not None and token < 0:
                self._fail([request], 500, _NO_TOKEN)
            elif request is not None:
                self._advance(request, int(token))

    def _advance(self, request: TextRequest, token: int) -> None:
        """Add a token to a request's answer, deliver its text, and end the request if it is complete."""
        request.made, request.last, stream = request.made + 1, token, request.stream
        self.metrics.add("netcl_generated_tokens_total")
        piece, ends = ("", True) if token in self.ends else (stream.add(token), stream.stopped)
        finish = "stop" if ends else "length" if request.made >= request.most else ""
        if finish:
            self._end(request, finish, AnswerPart(piece + stream.rest(), finish))
        elif not request.cancelled:
            request.deliver(AnswerPart(piece))

    def __enter__(self) -> Batcher:
        self._thread.start()
        return self

    def _work(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self.waiting or self.running or self.closing is not None)
                    if not self.waiting and not self.running:
                        return
                self.turn()
        finally:  # whatever ended the thread, nobody waits forever
            with self._changed:
                self.closing, left = self.clock(), [*self.waiting, *self.slots]
                self.waiting.clear()
            self._fail(left, 503, _ENDING)

    def close(self, *_: Any, grace: float = 0.0) -> None:
        """Accept no more requests, finish the pending ones within ``grace`` seconds, and end the thread."""
        with self._changed:
            self.closing = self.clock() + grace
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join()

    __exit__ = close
