"""The configuration of a transformer, read from a ``config.json`` of Hugging Face."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from netcl.io.archive import FileError, refusal

MOST_ELEMENTS = 1 << 31  # of any size in a configuration


def whole_number(config: Mapping[str, Any], *keys: str, default: int | None = None, least: int = 1) -> int:
    """Return the value of the first of ``keys`` in a configuration, or ``default``; raises unless ``least <= value < 2**31``."""
    name, found = next(((key, config[key]) for key in keys if config.get(key) is not None), (keys[0], default))
    if not isinstance(found, int) or isinstance(found, bool) or not least <= found < MOST_ELEMENTS:
        raise refusal("config", f"{name} must be a whole number from {least} to {MOST_ELEMENTS - 1}", given=repr(found))
    return found


def real_number(config: Mapping[str, Any], *keys: str, default: float | None = None) -> float:
    """Return the value of the first of ``keys`` that a configuration has, or ``default``; raises unless it is a finite number."""
    name, found = next(((key, config[key]) for key in keys if config.get(key) is not None), (keys[0], default))
    if not isinstance(found, int | float) or isinstance(found, bool) or not math.isfinite(found):
        raise refusal("config", f"{name} must be a finite number", given=repr(found))
    return float(found)


@dataclass(frozen=True)
class Rope:
    """Settings of rotary positions: ``size`` elements of a head rotate; ``kind`` and ``options`` define how the context is extended."""

    base: float
    size: int
    context: int
    kind: str = "default"
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def original(self) -> float:
        """The context length of the original training."""
        return real_number(self.options, "original_max_position_embeddings", default=self.context)

    @property
    def factor(self) -> float:
        """The factor by which the context was extended."""
        return real_number(self.options, "factor", default=self.context / self.original)

    @property
    def attention_factor(self) -> float:
        """The factor that multiplies rotated queries and keys."""
        if self.kind not in ("yarn", "longrope"):
            return 1.0
        if self.options.get("attention_factor") is not None:
            return real_number(self.options, "attention_factor")
        if self.kind == "longrope":
            return math.sqrt(1 + math.log(self.factor) / math.log(self.original)) if self.factor > 1 else 1.0
        parts = [real_number(self.options, key, default=0.0) for key in ("mscale", "mscale_all_dim")]
        one, all_dim = parts if all(parts) else (1.0, 0.0)
        return (0.1 * one * math.log(self.factor) + 1) / (0.1 * all_dim * math.log(self.factor) + 1) if self.factor > 1 else 1.0

    def stretch(self, length: int) -> int:
        """Return a cache key for the frequencies of a text of ``length``: equal keys mean equal frequencies."""
        limit = {"dynamic": self.context, "longrope": self.original}.get(self.kind, math.inf)
        return 0 if length <= limit else length if self.kind == "dynamic" else 1

    def frequencies(self, length: int) -> np.ndarray:
        """Return the rotary frequency of each pair in radians per position, for a text of ``length`` positions."""
        exponents = np.arange(0, self.size, 2, dtype=np.float64) / self.size
        plain = self.base**-exponents
        if self.kind == "linear":
            return plain / self.factor
        if self.kind == "dynamic":
            longest = max(length, self.context)
            grown = self.base * (self.factor * longest / self.context - (self.factor - 1)) ** (self.size / (self.size - 2))
            return grown**-exponents
        if self.kind == "llama3":
            low, high = (real_number(self.options, f"{name}_freq_factor") for name in ("low", "high"))
            if low >= high:
                raise refusal("config", "low_freq_factor must be below high_freq_factor", low_freq_factor=low, high_freq_factor=high)
            turns = self.original * plain / (2 * math.pi)  # within the original context
            smooth = np.clip((turns - low) / (high - low), 0, 1)
            return plain * (smooth + (1 - smooth) / self.factor)
        if self.kind == "yarn":
            rounds = [real_number(self.options, name, default=count) for name, count in (("beta_fast", 32.0), ("beta_slow", 1.0))]
            ends = [self.size * math.log(self.original / (2 * math.pi * turn)) / (2 * math.log(self.base)) for turn in rounds]
            if self.options.get("truncate", True):
                ends = [math.floor(ends[0]), math.ceil(ends[1])]
            low, high = max(ends[0], 0), min(ends[1], self.size - 1)
            ramp = np.clip((np.arange(self.size // 2) - low) / (high - low if high != low else 0.001), 0, 1)
            return plain / self.factor * ramp + plain * (1 - ramp)  # slow pairs, fast pairs, and a ramp between (Peng et al. 2023)
        if self.kind == "longrope":
            return plain / np.asarray(self.options["long_factor" if self.stretch(length) else "short_factor"], np.float64)
        return plain


def rope_of(config: Mapping[str, Any], head: int, layer_type: str) -> Rope:
    """Return the rotary positions of layers of one type, from either form of a configuration: ``rope_parameters`` or ``rope_theta``."""
    local = layer_type == "sliding_attention" and config.get("rope_local_base_freq") is not None
    whole = config.get("rope_parameters")
    apart = isinstance(whole, Mapping) and not whole.keys().isdisjoint(("full_attention", "sliding_attention"))  # by type of layers
    inside = whole.get(layer_type) if isinstance(whole, Mapping) and apart else whole
    forms = {"rope_parameters": inside, "rope_scaling": None if local else config.get("rope_scaling")}
    if wrong := {name: f"{value!r:.80}" for name, value in forms.items() if value is not None and not isinstance(value, Mapping)}:
        raise refusal("config", f"{' and '.join(wrong)} must be an object or null", **wrong)
    given, scaling = (value or {} for value in forms.values())
    theta = config.get("rope_local_base_freq" if local else "rope_theta")
    given = {"rope_theta": theta, **({} if scaling and not apart else given), **scaling}
    kind = given.get("rope_type") or given.get("type") or "default"
    kind = "longrope" if kind == "su" else kind
    known = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
    if kind not in known:
        raise refusal("config", f"rope_type must be one of {', '.join(known)}", given=repr(kind))
    needed = {"linear": ("factor",), "dynamic": ("factor",), "llama3": ("factor", "original_max_position_embeddings")}.get(kind, ())
    if missing := [name for name in needed if given.get(name, config.get(name) if name != "factor" else None) is None]:
        raise refusal("config", f"rope_type {kind!r} must have {' and '.join(missing)}")
    if given.get("factor") is not None and real_number(given, "factor") <= 0:
        raise refusal("config", "factor must be above 0", rope_type=kind, factor=given["factor"])
    share = real_number(given, "partial_rotary_factor", default=real_number(config, "partial_rotary_factor", default=1.0))
    if share != 1 and config.get("model_type") != "phi3":  # transformers ignores it, or fails
        raise refusal("config", "partial_rotary_factor must be 1 except in phi3", model_type=config.get("model_type"), given=share)
    context = whole_number(config, "max_position_embeddings", default=2048)
    original = None if apart else config.get("original_max_position_embeddings")
    options = given if original is None else {**given, "original_max_position_embeddings": original}
    found = Rope(real_number(given, "rope_theta", default=10000.0), int(head * share), context, kind, options)
    if found.size < 2 or found.size % 2 or found.size > head or found.base <= 1 or (kind == "dynamic" and found.size < 4):
        least = 4 if kind == "dynamic" else 2
        what = f"the rotary size (head_dim * partial_rotary_factor) must be even and from {least} to {head}, and the base above 1"
        raise refusal("config", what, size=found.size, base=found.base)
    try:
        tables = [found.frequencies(length) * found.attention_factor for length in (1, MOST_ELEMENTS)]
    except (ArithmeticError, KeyError, TypeError, ValueError) as fault:
        if isinstance(fault, FileError):
            raise
        raise refusal("config", f"settings of rope_type {kind!r} must be complete and valid: {type(fault).__name__}: {fault}") from fault
    if any(table.shape != (found.size // 2,) or not np.isfinite(table).all() for table in tables):
        raise refusal("config", "there must be one finite rotary frequency per pair", rope_type=kind, pairs=found.size // 2)
    return found


@dataclass(frozen=True)
class Experts:
    """A mixture of ``count`` networks of width ``width``. Each token uses ``chosen`` of them, and one of width ``shared`` if > 0."""

    count: int
    chosen: int
    width: int
    normalized: bool
    shared: int = 0
    layers: tuple[int, ...] = ()


@dataclass(frozen=True)
class ModelConfig:
    """The sizes and options of a transformer; ``source`` is the ``config.json`` it was read from."""

    architecture: str
    source: dict[str, Any] = field(repr=False, compare=False)
    vocab_size: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    inner: int
    context: int
    eps: float
    activation: str = "silu"
    norm: str = "rms"
    norm_first: bool = True
    gated: bool = True
    query_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    tied: bool = False
    qk_norm: bool = False
    post_norms: bool = False
    learned_positions: bool = False
    ropes: tuple[Rope | None, ...] = ()
    windows: tuple[int | None, ...] = ()
    scale: float | None = None
    attention_cap: float | None = None
    final_cap: float | None = None
    embedding_scale: float = 1.0
    experts: Experts | None = None
    # encoders only
    causal: bool = True
    token_types: int = 0
    position_offset: int = 0
    image: tuple[int, int, int] | None = None  # size, patch, channels
    embedding_norm: bool = False
    final_norm: bool = True
    pooling: str = "none"
    projection: int = 0

    def __str__(self) -> str:
        return f"{self.architecture}, layers={self.layers}, width={self.width}, vocab_size={self.vocab_size}"


def end_ids(settings: Mapping[str, Any]) -> set[int]:
    """Return the ``eos_token_id`` of ``config.json`` or ``generation_config.json`` as a set, which may be empty."""
    found = settings.get("eos_token_id")
    tokens = [] if found is None else found if isinstance(found, list) else [found]
    if any(not isinstance(token, int) or isinstance(token, bool) for token in tokens):
        raise refusal("config", "eos_token_id must be an integer or a list of integers", given=repr(found))
    return set(tokens)
