"""Continuous batching: sequences join and leave a running batch, whose step over all slots is compiled once.

One thread owns the model. A prompt is computed alone, in a cache of one sequence; its keys and values are then copied into a free slot of the
batch. Slots without a sequence are computed and ignored.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

import netcl.autograd as ag
from netcl.core.errors import message
from netcl.core.tensor import Tensor
from netcl.models import CausalLM, TextStream
from netcl.nn.decoding import Sampling, choose_by_row, prompt_logits
from netcl.replay import compiled
from netcl.serve.metrics import Metrics

_MODEL_FAULTS = (ValueError, TypeError, RuntimeError, MemoryError)  # what computing may raise; a request ends, the server goes on


class ServeLimits(NamedTuple):
    """What a server takes on.

    - **batch**: sequences that are computed together. **queue**: requests that wait beyond them.
    - **context**: the most tokens of a prompt and its answer; by default the model's, at most 4,096. **tokens**: the most of an answer.
    - **timeout**: seconds from a request to the end of its answer.
    """

    batch: int = 8
    queue: int = 64
    context: int | None = None
    tokens: int = 1024
    timeout: float = 120.0


class ServeError(RuntimeError):
    """A request that is not answered; ``status`` is HTTP's."""

    def __init__(self, status: int, text: str):
        super().__init__(text)
        self.status = status


class AnswerPart(NamedTuple):
    """What a request is told: a piece of text, its end, an error or a vector."""

    text: str = ""
    finish: str = ""
    error: ServeError | None = None
    vector: list[float] | None = None


class TextRequest:
    """A prompt to continue, or with ``most=0`` to embed.

    - **ids**, **most**: the prompt; the most tokens to add. **sampling**, **seed**, **stops**: as in :meth:`netcl.models.CausalLM.generate`.
    - **deliver**: called with every :class:`AnswerPart`, from the thread of the model; the last has a ``finish``, an ``error`` or a ``vector``.
    """

    def __init__(self, ids: Sequence[int], most: int, deliver: Callable[[AnswerPart], None], sampling: Sampling | None = None,
                 seed: int | None = None, stops: Sequence[str] = ()):  # fmt: skip
        self.ids, self.most, self.deliver, self.stops = [int(i) for i in ids], most, deliver, stops
        self.sampling = (sampling or Sampling(temperature=0.0)).check()
        self.made = 0  # tokens so far
        self.last = 0  # the newest of them
        self.cancelled = False
        self.begun = self.deadline = 0.0
        self.stream: TextStream | None = None
        self._rng = np.random.default_rng(seed)

    def cancel(self) -> None:
        """End the request at the next token; nothing more is delivered."""
        self.cancelled = True

    def settings(self, vocabulary: int) -> tuple[float, float, float, float]:
        """A row for :func:`~netcl.nn.decoding.choose_by_row`; draws a random number unless the temperature is 0."""
        temperature, top_k, top_p = self.sampling
        drawn = min(self._rng.random(), 1 - 2**-24) if temperature else 0.0
        return temperature, vocabulary if top_k is None else top_k, 1.0 if top_p is None else top_p, drawn


class Batcher:
    """Answers requests with one model, many at a time.

    - **model**: a :class:`~netcl.models.CausalLM` with a tokenizer. **limits**: see :class:`ServeLimits`.
    - **clock**: seconds, for deadlines and latencies.

    ``with batcher:`` runs it in a thread of its own. ``turn()`` does one round of its work, where there is no thread.
    """

    def __init__(self, model: CausalLM, limits: ServeLimits | None = None, clock: Callable[[], float] = time.monotonic):
        self.model, self.limits, self.clock, self.metrics = model.eval(), limits or ServeLimits(), clock, Metrics()
        self.capacity = min(model.context, self.limits.context or 4096)
        self.ends = {*model.end_tokens(), *model.tokenizer.end_tokens}
        # Rotary angles that depend on the longest length of a batch would mix the sequences.
        grows = any(rope is not None and rope.stretch(1) != rope.stretch(model.context) for rope in model.config.ropes)
        self.slots: list[TextRequest | None] = [None] * (1 if grows else self.limits.batch)
        self.waiting: deque[TextRequest] = deque()
        self._changed = threading.Condition()
        self._closing: float | None = None  # when what is left must have ended
        self._thread: threading.Thread | None = None
        self._make_cache()

    def _make_cache(self) -> None:
        """An empty batch; allocates its memory, which may be as large as the model's."""
        model, cache = self.model, self.model.new_cache(self.capacity)
        self._alone, self._cache = model.new_cache(self.capacity), cache
        self._lengths = [0] * len(self.slots)
        self._members: list[TextRequest | None] = []  # of the slots when lengths were last written
        with ag.no_grad():
            model.states(Tensor.from_host(model.queue, np.zeros((len(self.slots), 1), np.int64)), cache)
        cache.set_lengths(self._lengths)
        cache.reserves_ahead(1)

        def step(tokens: Tensor, settings: Tensor | None = None) -> Tensor:
            with ag.no_grad():
                logits = ag.reshape(model.head(model.states(tokens, cache)), (tokens.shape[0], -1))
                return ag.argmax(logits, axis=-1, keepdims=True) if settings is None else choose_by_row(logits, settings)

        self._step = compiled.compile(step) if model.replayable else step

    # ---- requests

    @property
    def running(self) -> int:
        """Sequences in the batch."""
        return sum(request is not None for request in self.slots)

    @property
    def alive(self) -> bool:
        """Whether requests are taken."""
        return self._closing is None and (self._thread is None or self._thread.is_alive())

    def submit(self, request: TextRequest) -> None:
        """Put a request into the queue; :class:`ServeError` if that is full, the server ends, or the request is longer than the context."""
        longest, tokens = self.capacity, len(request.ids)
        if not tokens or tokens + request.most > longest or min(request.ids) < 0 or max(request.ids) >= self.model.config.vocab_size:
            what = f"a prompt must have tokens of the vocabulary, and with its answer at most {longest}"
            raise ServeError(400, message("serve", what, prompt=tokens, answer=request.most))
        request.begun = self.clock()
        request.deadline = request.begun + self.limits.timeout
        request.stream = TextStream(self.model.tokenizer, request.ids, request.stops)
        with self._changed:
            if not self.alive:
                raise ServeError(503, message("serve", "the server is shutting down"))
            if len(self.waiting) >= self.limits.queue:
                raise ServeError(429, message("serve", "too many requests wait", "try again later", waiting=len(self.waiting)))
            self.waiting.append(request)
            self._changed.notify()

    def _end(self, request: TextRequest, outcome: str, part: AnswerPart | None = None) -> None:
        self.metrics.count("netcl_answers_total", outcome=outcome)
        self.metrics.observe("netcl_answer_seconds", self.clock() - request.begun)
        if request in self.slots:
            self.slots[self.slots.index(request)] = None
        if part is not None and not request.cancelled:
            request.deliver(part)

    def _fail(self, requests: Sequence[TextRequest | None], status: int, text: str) -> None:
        for request in requests:
            if request is not None:
                self._end(request, "error", AnswerPart(error=ServeError(status, text)))

    # ---- rounds

    def turn(self) -> None:
        """One round: sequences that must end leave, at most one prompt joins, every sequence gets a token."""
        self._drop_ended()
        with self._changed:
            free = None in self.slots
            joins = self.waiting.popleft() if self.waiting and (free or not self.waiting[0].most) else None
        try:
            if joins is not None:
                self._embed(joins) if not joins.most else self._join(joins)
        except _MODEL_FAULTS as fault:
            self._fail([joins], 500, f"the model failed: {fault}")
        self._align_lengths()
        try:
            if self.running:
                self._decode()
        except _MODEL_FAULTS as fault:
            self._fail(list(self.slots), 500, f"the model failed: {fault}")
            self._make_cache()

    def _drop_ended(self) -> None:
        """Remove requests that were cancelled or have no time left."""
        now = self.clock()
        with self._changed:
            asked = [*self.waiting, *(request for request in self.slots if request is not None)]
            over = self._closing is not None and now >= self._closing
            ended = [request for request in asked if request.cancelled or over or now >= request.deadline]
            self.waiting = deque(request for request in self.waiting if request not in ended)
        for request in ended:
            if request.cancelled:
                self._end(request, "cancelled")
            elif over:
                self._fail([request], 503, message("serve", "the server is shutting down"))
            else:
                text = message("serve", "the request took too long", seconds=self.limits.timeout)
                self._end(request, "timeout", AnswerPart(error=ServeError(504, text)))

    def _embed(self, request: TextRequest) -> None:
        with ag.no_grad():
            states = self.model.states(Tensor.from_host(self.model.queue, np.array([request.ids], np.int64)))
            vector = ag.cast(ag.mean(states, axis=1), "float32").to_host()[0].tolist()
        self.metrics.count("netcl_prompt_tokens_total", len(request.ids))
        self._end(request, "embedding", AnswerPart(vector=vector))

    def _join(self, request: TextRequest) -> None:
        slot, cache, count = self.slots.index(None), self._alone, len(request.ids)
        cache.reset()
        with ag.no_grad():
            logits = prompt_logits(self.model, np.array([request.ids], np.int64), [count], cache)
            drawn = request.settings(logits.shape[1])[3:]
            token = int(request.sampling.choose(logits, Tensor.from_host(self.model.queue, np.array(drawn, np.float32))).item())
        self.metrics.count("netcl_prompt_tokens_total", count)
        self.metrics.observe("netcl_first_token_seconds", self.clock() - request.begun)
        self.slots[slot] = request
        self._advance(request, token)
        if self.slots[slot] is request:
            self._cache.copy_sequence(slot, cache)
            self._lengths[slot] = count

    def _align_lengths(self) -> None:
        """Tell the cache the lengths of sequences. Empty slots begin at 0 again, so that none outgrows the longest sequence."""
        if self.running and self.slots != self._members:
            self._lengths = [0 if request is None else length for request, length in zip(self.slots, self._lengths, strict=True)]
            self._cache.set_lengths(self._lengths)
            self._members = list(self.slots)

    def _decode(self) -> None:
        queue, vocabulary = self.model.queue, self.model.config.vocab_size
        tokens = np.array([[0 if request is None else request.last] for request in self.slots], np.int64)
        inputs = [Tensor.from_host(queue, tokens)]
        if any(request is not None and request.sampling.temperature for request in self.slots):
            rows = [(0.0, 1.0, 1.0, 0.0) if request is None else request.settings(vocabulary) for request in self.slots]
            inputs.append(Tensor.from_host(queue, np.array(rows, np.float32)))
        self._cache.reserve(1)
        made = self._step(*inputs).to_host()[:, 0]
        self._lengths = [length + 1 for length in self._lengths]
        for request, token in zip(list(self.slots), made, strict=True):
            if request is not None:
                self._advance(request, int(token))

    def _advance(self, request: TextRequest, token: int) -> None:
        """Give a request its next token."""
        request.made, request.last, stream = request.made + 1, token, request.stream
        assert stream is not None
        self.metrics.count("netcl_generated_tokens_total")
        piece = "" if token in self.ends else stream.add(token)
        finish = "stop" if token in self.ends or stream.stopped else "length" if request.made >= request.most else ""
        piece += stream.rest() if finish else ""
        if finish:
            self._end(request, finish, AnswerPart(piece, finish))
        elif not request.cancelled:
            request.deliver(AnswerPart(piece))

    # ---- the thread

    def __enter__(self) -> Batcher:
        self._thread = threading.Thread(target=self._work, name="netcl-serve", daemon=True)
        self._thread.start()
        return self

    def _work(self) -> None:
        try:
            while self._has_work():
                self.turn()
        finally:  # whatever ended the thread: nobody waits for ever
            with self._changed:
                self._closing, left = self.clock(), [*self.waiting, *self.slots]
                self.waiting.clear()
            self._fail(left, 503, message("serve", "the server ended"))

    def _has_work(self) -> bool:
        """Wait for something to do; False when the server ends and nothing is left."""
        with self._changed:
            self._changed.wait_for(lambda: self.waiting or self.running or self._closing is not None)
            return bool(self.waiting or self.running)

    def close(self, grace: float = 0.0) -> None:
        """Take no more requests, answer those that are there for at most ``grace`` seconds, and end the thread."""
        with self._changed:
            self._closing = self.clock() + grace
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def __exit__(self, *_: Any) -> None:
        self.close()
