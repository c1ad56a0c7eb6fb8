"""The decoder-only language model of :mod:`netcl.models`, and its text generation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

import netcl.autograd as ag
from netcl import nn
from netcl.autograd import packed
from netcl.core.device import queue_of
from netcl.core.errors import ShapeError, message
from netcl.core.tensor import Tensor
from netcl.models.config import ModelConfig, end_ids
from netcl.models.layers import ConfiguredModel, TransformerLayer, decode_whole, make_norm_layer, make_span
from netcl.models.prompt_cache import PromptFile
from netcl.models.tokenizer import Tokenizer
from netcl.nn.attention import KVCache
from netcl.nn.decoding import Sampling, Speculator, continued, random_draws
from netcl.nn.pickling import Recomputed
from netcl.nn.quantized import QuantizedLinear, decodable, decoded_linear, pack_halves

_CONTEXT_TOKENS = 4  # of a prompt that the text behind it is decoded with: a word's first token decodes differently at the start of a text
_REPLACED, _CHARACTER_BYTES = "\N{REPLACEMENT CHARACTER}", 4  # what incomplete characters decode to; bytes of a character at most
_DECODED_TOGETHER = 64  # tokens of a text; more are decoded in parts, or long texts would take quadratic time


class CausalLM(ConfiguredModel):
    """A decoder-only language model: maps token ids to the logits of the next token at each position.

    - **config**: a :class:`~netcl.models.config.ModelConfig`; :func:`netcl.models.load` reads one from a file.

    Shapes: ids ``(batch, length)``, logits ``(batch, length, vocabulary)``. With a ``cache`` (:class:`~netcl.nn.attention.KVCache`, made
    by ``new_cache()``) the ids are only the new ones. ``positions``, of shape ``(length,)`` or ``(batch, length)``, replace the positions
    that follow from the cache. ``documents``, of shape ``(batch, length)``, has document numbers; attention stays inside a document.

    With ``checkpointing = True`` a training step keeps only the input of each layer and recomputes the rest of the layer in backward.
    """

    tokenizer_remedy = "pass token ids, or load a folder with tokenizer.json or a GGUF file"

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config, self.context = config, config.context
        self.embed_tokens = nn.Embedding(config.vocab_size, config.width)
        self.embed_positions = nn.Embedding(config.context, config.width) if config.learned_positions else None
        self.layers = nn.ModuleList(TransformerLayer(config, layer) for layer in range(config.layers))
        self.norm = make_norm_layer(config)
        self.lm_head = nn.Linear(config.width, config.vocab_size if not config.tied else 0, bias=False)
        if config.tied:
            self.lm_head.out_features, self.lm_head.weight = config.vocab_size, self.embed_tokens.weight
        self.checkpointing = False
        self.cache_dtype: str | None = None
        self.merged = False
        self.generation: dict[str, Any] = {}
        self._tables: dict[Any, Tensor] = Recomputed()
        self.is_split = False  # over devices, by split()
        # As in transformers, a text that outgrows the original context is computed again: its keys have the angles of short texts.
        self.recomputes = config.architecture == "phi3" and any(rope is not None and rope.kind == "longrope" for rope in config.ropes)

    def new_cache(self, capacity: int | None = None, dtype: str | None = None) -> KVCache:
        """Return an empty cache of ``capacity`` positions (``None``: it grows); ``dtype`` is ``"int8"`` or, by default, ``cache_dtype``."""
        return KVCache(self.config.layers, capacity, dtype or self.cache_dtype)

    def rope_stretch(self, length: int) -> tuple[int, ...]:
        """Return a key of the rotary frequencies of a text of ``length`` positions: equal keys mean equal frequencies."""
        return tuple(rope.stretch(length) for rope in self.config.ropes if rope is not None)

    @property
    def replayable(self) -> bool:
        """Whether decoding steps can be compiled: on one device, with the same work for all lengths and values."""
        return self.rope_stretch(1) == self.rope_stretch(self.context) and self.config.experts is None and not self.layer_queues

    @property
    def layer_queues(self) -> tuple[Any, ...]:
        """The queue of each layer if the model is split over devices; else empty."""
        queues = tuple(layer.queue for layer in self.layers) if self.is_split else ()
        return queues if any(queue is not self.queue for queue in queues) else ()

    def forward(self, ids: Tensor, cache: KVCache | None = None, positions: Tensor | None = None,
                documents: Tensor | None = None) -> Tensor:  # fmt: skip
        if type(self) is not CausalLM:  # a subclass may define the methods differently
            return self.head(self.states(ids, cache, positions, documents))
        norm: nn.Module = self.norm
        head: nn.Module = self.lm_head
        x = self._states(ids, cache, positions, documents)
        few = type(norm) is nn.RMSNorm and type(head) is QuantizedLinear and packed.decodes_together(x) and not ag.is_grad_enabled()
        return self._capped(decoded_linear(x, head, norm)) if few and decodable(self, norm, head) else self.head(norm(x))

    def states(self, ids: Tensor, cache: KVCache | None = None, positions: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        """Compute the hidden states ``(batch, length, width)``, the input of :meth:`head`."""
        return self.norm(self._states(ids, cache, positions, documents))

    def _states(self, ids: Tensor, cache: KVCache | None, positions: Tensor | None, documents: Tensor | None) -> Tensor:
        """Compute the hidden states before the last norm."""
        seen = 0 if cache is None else cache.length
        if cache is not None and self.recomputes and positions is None:
            past = [] if not seen or cache.ids is None else [ag.narrow(cache.ids, 1, 0, seen)]
            cache.ids = whole = ag.cat([*past, ids], axis=1) if past else ids
            if past and self.rope_stretch(seen) != self.rope_stretch(whole.shape[1]):
                ahead = cache.reserves_ahead(0)
                cache.reset()
                states = self._states(whole, cache, None, documents)
                cache.reserves_ahead(ahead)
                return ag.narrow(states, 1, seen, ids.shape[1])
        if ids.ndim != 2 or (self.embed_positions is not None and seen + ids.shape[1] > self.config.context):
            what = f"ids must have shape (batch, length); learned positions allow length + in_cache up to {self.config.context}"
            raise ShapeError(message("CausalLM", what, shape=ids.shape, in_cache=seen))
        x = self.embed_tokens(ids)
        if self.config.embedding_scale != 1:
            x = ag.mul(x, self.config.embedding_scale)
        if positions is not None and self.rope_stretch(1) != self.rope_stretch(self.config.context):  # the highest one decides
            seen = int(positions.to_host().max()) + 1 - ids.shape[1]
        if positions is None and cache is not None:
            positions = cache.positions(ids.shape[0], ids.shape[1], ids.queue)
        if self.embed_positions is not None:
            table = self.embed_positions.weight
            x = ag.add(x, ag.narrow(table, 0, 0, ids.shape[1]) if positions is None else self.embed_positions(positions))
        span = make_span(self.config, ids.queue, ids.shape[1], seen, positions, self._tables, cache is not None, documents)
        if cache is not None and not ag.is_grad_enabled() and not self.is_split:
            decoded = decode_whole(list(self.layers), x, span, cache)
            if decoded is not None:
                return decoded
        again = self.checkpointing and self.training
        if again and not x.requires_grad:
            x = x.detach().requires_grad_()  # a checkpoint without such an input has no gradient
        for layer in self.layers:
            if self.is_split and (queue := layer.queue) is not x.queue:
                x = x.to(queue)
                places, apart = (None if t is None else t.to(queue) for t in (positions, documents))
                span = make_span(self.config, queue, ids.shape[1], seen, places, self._tables, cache is not None, apart)
            x = ag.checkpoint(layer, x, span) if again else layer(x, span, cache)
        return x.to(ids.queue) if self.is_split else x

    def merge_projections(self) -> CausalLM:
        """Compute queries, keys and values with one matrix product per layer, where weights allow it; return the model.

        This saves launches per token. Where CPUs have kernels for it, weights of float32 that are all float16 numbers are packed as F16,
        which halves their memory. A merged model is for inference only: it cannot be saved, and adapters cannot be added.
        """
        self.merged = True in [layer.self_attn.merge() for layer in self.layers] or self.merged
        self.merged = pack_halves(self) or self.merged
        self.__dict__.pop("_decoding", None)  # compiled steps
        return self

    def split(self, device_map: Sequence[Any], device: Any = None) -> CausalLM:
        """Put each layer on a device, and the rest on ``device`` (by default the device of the first layer); return the model.

        Steps of a model on several devices are not compiled, and only one device works at a time.
        """
        queues = [queue_of(place) for place in device_map]
        if len(queues) != len(self.layers):
            what = f"device_map must name a device for each of the {len(self.layers)} layers"
            raise ValueError(message("load", what, "for instance ['gpu'] * 20 + ['cpu'] * 12", devices=len(queues)))
        main = queues[0] if device is None else queue_of(device)
        for part in (self.embed_tokens, self.embed_positions, self.norm, self.lm_head):
            if part is not None:
                part.to(main)
        for layer, queue in zip(self.layers, queues, strict=True):
            layer.to(queue)
        self.__dict__.pop("_decoding", None)  # compiled steps
        self.is_split = any(queue is not main for queue in queues)
        return self

    def head(self, states: Tensor) -> Tensor:
        """Compute the logits from the result of :meth:`states`, soft-capped if the architecture caps them."""
        return self._capped(self.lm_head(states))

    def _capped(self, logits: Tensor) -> Tensor:
        cap = self.config.final_cap
        return logits if cap is None else ag.mul(ag.tanh(ag.div(logits, cap)), cap)

    # ---- writing

    def generate(self, prompt: Any, max_new_tokens: int = 64, temperature: float = 0.0, top_k: int | None = None,
                 top_p: float | None = None, seed: int | None = None, stop: str | Sequence[str] = (),
                 stream: bool = False, draft: CausalLM | None = None, draft_tokens: int = 4,
                 prompt_cache: Any = None, min_p: float | None = None, repetition_penalty: float = 1.0, presence_penalty: float = 0.0,
                 frequency_penalty: float = 0.0) -> Any:  # fmt: skip
        """Continue a prompt; returns only the new text or ids.

        - **prompt**: a text, token ids ``(length,)``, or several prompts. A text returns a text, ids return a list of ids, and several
          prompts return a list of results.
        - **max_new_tokens**: the most tokens to add. Generation also ends at an end token, at a stop string, and where the context is
          full.
        - **temperature**: the divisor of the logits; 0 always chooses the most likely token. **top_k**: choose among this many of the most
          likely tokens. **top_p**: among the fewest that have this total probability. **min_p**: among those with at least this fraction
          of the highest probability.
        - **repetition_penalty**: above 1, tokens of the prompt and the new text get less likely, as in transformers. **presence_penalty**,
          **frequency_penalty**: subtracted from the logits of tokens in the new text, once or once per occurrence, as in OpenAI's API.
        - **seed**: makes random choices repeatable; without one they follow ``netcl.manual_seed``.
        - **stop**: strings that end the text. A returned text ends before them; returned ids include them.
        - **stream**: return an iterator over pieces of the text (or single ids) as they are generated; for one prompt.
        - **draft**: a smaller model with the same vocabulary that proposes ``draft_tokens`` tokens at a time; this model judges them in one
          pass. The distribution of texts stays that of this model. For one prompt, without penalties.
        - **prompt_cache**: a file that keeps the keys and values of the prompt for later calls, also of other processes. It is written if
          it does not exist or the prompt continues the stored one. A file of other weights raises an error. For one prompt.
        """
        sampling = Sampling(temperature, top_k, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty).check(max_new_tokens)
        if draft is not None and sampling.penalizes:
            raise ValueError(message("generate", "draft cannot be combined with penalties", "leave draft or the penalties out"))
        prompt = prompt.to_host() if isinstance(prompt, Tensor) else prompt
        write = partial(self._tokens, most=max_new_tokens, sampling=sampling, seed=seed, draft=draft, draft_tokens=draft_tokens,
                        prompt_cache=prompt_cache)  # fmt: skip
        several = not isinstance(prompt, str) and len(prompt) and not isinstance(prompt[0], int | np.integer)
        whole = [_Continuation(self, one, (stop,) if isinstance(stop, str) else stop) for one in (prompt if several else [prompt])]
        alone = "stream=True requires" if stream else "draft and prompt_cache require"
        if several and (stream or draft is not None or prompt_cache is not None):
            raise ValueError(message("generate", f"{alone} one prompt", "loop over the prompts", prompts=len(prompt)))
        if stream:
            return whole[0].written(write)
        batches: dict[int, list[_Continuation]] = {}
        for one in whole:  # prompts of unlike lengths are one batch if each has room, with the same rotary frequencies for all lengths
            last = len(one.ids) + max_new_tokens - 1
            free = last <= self.context and self.rope_stretch(last) == self.rope_stretch(1)
            batches.setdefault(0 if free else len(one.ids), []).append(one)
        for batch in batches.values():
            for tokens in write([one.ids for one in batch]):
                for one, token in zip(batch, tokens, strict=True):
                    one.parts += one.add(int(token)) if one.going else []
                if not any(one.going for one in batch):
                    break
        found = ["".join([*one.parts, *one.rest()]) if one.text else one.parts for one in whole]
        return found if several else found[0]

    def _tokens(self, prompts: Sequence[list[int]], most: int, sampling: Sampling, seed: int | None, draft: CausalLM | None,
                draft_tokens: int, prompt_cache: Any) -> Iterator[np.ndarray]:  # fmt: skip
        for ids in prompts:
            if not 1 <= len(ids) <= self.context:
                raise ShapeError(message("generate", f"a prompt must have 1 to {self.context} tokens", tokens=len(ids)))
            if min(ids) < 0 or max(ids) >= self.config.vocab_size:
                what = f"token ids must be from 0 to {self.config.vocab_size - 1}"
                raise ShapeError(message("generate", what, lowest=min(ids), highest=max(ids)))
        draw = random_draws(seed, self.queue)
        most, file = min(most, self.context - max(map(len, prompts)) + 1), None if prompt_cache is None else PromptFile(prompt_cache, self)
        if draft is None or most < 1:
            return continued(self, prompts, most, sampling, draw, file)
        if draft.config.vocab_size != self.config.vocab_size or draft.context < len(prompts[0]) + most - 1 or draft_tokens < 1:
            least = len(prompts[0]) + most - 1
            what = f"draft must have the model's vocabulary size and a context of at least {least}, and draft_tokens must be at least 1"
            own = {"vocab_sizes": (self.config.vocab_size, draft.config.vocab_size), "context": draft.context, "draft_tokens": draft_tokens}
            raise ValueError(message("generate", what, "choose another draft, lower max_new_tokens, or raise draft_tokens", **own))
        return Speculator(self, draft, sampling, draw, draft_tokens).tokens(prompts[0], most, file)

    def end_tokens(self) -> set[int]:
        """Return the end tokens of the configuration and the generation settings; the tokenizer may have more."""
        return end_ids(self.config.source) | end_ids(self.generation)


class _Continuation:
    """A prompt and what is generated after it: pieces of text after a text, decoded by a :class:`TextStream`, and ids after ids.

    It ends at an end token, which is left out, or with a stop string. Only ids include a stop string.
    """

    def __init__(self, model: CausalLM, prompt: Any, stops: Sequence[str]):
        self.text, self.going, self.parts = isinstance(prompt, str), True, list[Any]()
        self.ids = model.tokenizer.encode(prompt) if self.text else [int(i) for i in prompt]
        self._stream = TextStream(model.tokenizer, self.ids, stops) if self.text or any(stops) else None
        self._ends = {*model.end_tokens(), *(model.tokenizer.end_tokens if self.text else ())}

    def add(self, token: int) -> list[Any]:
        """Add a token; returns the piece of text that can no longer change, if there is one, or the id."""
        if token in self._ends:
            self.going = False
            return []
        piece = "" if self._stream is None else self._stream.add(token)
        self.going = self._stream is None or not self._stream.stopped
        return [token] if not self.text else [piece] if piece else []

    def rest(self) -> list[str]:
        """Return the text that was held back, once generation has ended."""
        rest = self._stream.rest() if self.text and self._stream is not None else ""
        return [rest] if rest else []

    def written(self, write: Callable[..., Iterator[np.ndarray]]) -> Iterator[Any]:
        """Yield what ``write`` generates for this prompt alone."""
        for tokens in write([self.ids]):
            yield from self.add(int(tokens[0]))
            if not self.going:
                break
        yield from self.rest()


class TextStream:
    """Decodes the tokens after a prompt piece by piece; holds back incomplete characters and beginnings of stop strings."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stops: Sequence[str] = ()):
        self.stopped = False
        self._tokenizer, self._stops = tokenizer, tuple(word for word in stops if word)
        self._begin(prompt)

    def _begin(self, before: Sequence[int]) -> None:
        self._made, self._given = list[int](), 0
        self._context, self._skipped = _context_of(self._tokenizer, before)

    def _text(self) -> str:
        return self._tokenizer.decode([*self._context, *self._made])[self._skipped :] if self._made else ""

    def add(self, token: int) -> str:
        """Add a token; returns the text that can no longer change."""
        self._made.append(token)
        text = self._text()
        found = [at for at in (text.find(word) for word in self._stops) if at >= 0]
        self.stopped = bool(found)
        safe = max(self._given, min(found) if found else len(text) - _held_back(text, self._stops))
        piece, self._given = text[self._given : safe], safe
        if len(self._made) >= _DECODED_TOGETHER and safe == len(text):
            self._begin(self._made)  # nothing is held back, so what follows needs the last tokens only
        return piece

    def rest(self) -> str:
        """Return the text that was held back, once generation has ended; empty after a stop string."""
        return "" if self.stopped else self._text()[self._given :]


def _context_of(tokenizer: Tokenizer, before: Sequence[int]) -> tuple[list[int], int]:
    """Return the last tokens before a text, and how many characters of them precede it.

    They begin with a whole character: decoders that replace all bytes beside an incomplete one would replace the text's. A character
    that ends in the text belongs to the text.
    """
    ids, ends, begins = list(before), range(_CHARACTER_BYTES), range(4 * _CHARACTER_BYTES)  # tokens may hold parts of two characters
    for behind, more in ((behind, more) for behind in ends for more in begins):  # tokens of a character that ends, and of those that begin
        begin = max(0, len(ids) - behind - more - _CONTEXT_TOKENS)
        text = tokenizer.decode(ids[begin : len(ids) - behind])
        if (text or not begin) and not text.startswith(_REPLACED) and not text.endswith(_REPLACED):
            return ids[begin:], len(text)
    return ids[-_CONTEXT_TOKENS:], len(tokenizer.decode(ids[-_CONTEXT_TOKENS:]))


def _held_back(text: str, stops: Sequence[str]) -> int:
    """Return how many characters at the end of ``text`` to hold back: incomplete characters, and the beginning of a stop string before."""
    whole = text.rstrip(_REPLACED)  # of a character whose bytes are not all there
    beginnings = (n for word in stops for n in range(1, len(word)) if whole.endswith(word[:n]))
    return len(text) - len(whole) + max(beginnings, default=0)
