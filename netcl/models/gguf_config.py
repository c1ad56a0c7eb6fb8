"""Conversion between the metadata of a GGUF file and the ``config.json`` of the same model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import numpy as np

from netcl.io.archive import refusal
from netcl.models.architectures import ARCHITECTURES, architecture_of, read_config
from netcl.models.config import ModelConfig, Rope

#: Key of config.json: key of the metadata, behind the name of the architecture.
KEYS = {
    "vocab_size": "vocab_size", "max_position_embeddings": "context_length", "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count", "intermediate_size": "feed_forward_length", "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv", "head_dim": "attention.key_length", "is_causal": "attention.causal",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon", "layer_norm_epsilon": "attention.layer_norm_epsilon",
    "sliding_window": "attention.sliding_window", "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping", "num_experts": "expert_count", "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length", "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
}  # fmt: skip
_TOKEN_IDS = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "pad_token_id": "padding_token_id"}
#: Keys of the tokens that end a text; more than these do not fit into a file.
END_KEYS = tuple(f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
_SAME_ACTIVATIONS = dict.fromkeys(("gelu_new", "gelu_fast"), "gelu_pytorch_tanh")
#: Layers of the models whose attention scale is that of width / heads, as llama.cpp has it: the largest Gemmas.
_WIDE_SCALE = {"gemma2": 46, "gemma3": 62}


def config_from_gguf(metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], factors: Any) -> dict[str, Any]:
    """Return the metadata of a GGUF file as a ``config.json``; ``factors(name)`` reads a tensor of rotary factors."""
    arch = metadata.get("general.architecture")
    types = [name for name, row in ARCHITECTURES.items() if row.gguf == arch]
    if arch == "llama":
        types = ["mixtral" if metadata.get("llama.expert_count") else "llama"]
    if not isinstance(arch, str) or not types:
        known = dict.fromkeys(row.gguf for row in ARCHITECTURES.values() if row.gguf)
        raise refusal("gguf", "unknown general.architecture", f"known are {', '.join(known)}", given=repr(arch))
    if metadata.get("split.count", 0) not in (0, 1):
        parts = metadata["split.count"]
        raise refusal("gguf", "the file must be complete, but is one of several parts", "merge them: llama-gguf-split --merge", parts=parts)
    found = {ours: metadata[f"{arch}.{theirs}"] for ours, theirs in KEYS.items() if f"{arch}.{theirs}" in metadata}
    found |= {"sliding_window": None} if found.get("sliding_window") == 0 else {}  # what llama.cpp writes for Phi-4
    rotary = {key: value for key, value in metadata.items() if ".rope." in key and not key.endswith(".type")}
    settings = {**found, **rotary, "attention.scale": metadata.get(f"{arch}.attention.scale", 0)}
    if wrong := [name for name, value in settings.items() if not isinstance(value, int | float | None)]:
        raise refusal("gguf", "settings must be numbers, the same for all layers", architecture=arch, settings=wrong)
    tokens = {ours: metadata.get(f"tokenizer.ggml.{theirs}") for ours, theirs in _TOKEN_IDS.items()}
    ends = [metadata[key] for key in END_KEYS if isinstance(metadata.get(key), int)]
    tokens["eos_token_id"] = ends if len(ends) > 1 else ends[0] if ends else None
    row, embedding = ARCHITECTURES[types[0]], shapes.get("token_embd.weight", (1, 1))
    found |= {
        "model_type": types[0], "architectures": [row.hf_class], **tokens, "vocab_size": embedding[0],
        "tie_word_embeddings": "output.weight" not in shapes,
    }  # fmt: skip
    if "query_bias" not in row.settings:
        found |= {"attention_bias": "blk.0.attn_q.bias" in shapes, "mlp_bias": "blk.0.ffn_up.bias" in shapes}
    if arch != "gpt2":
        found["rope_parameters"] = _rope_parameters(metadata, arch, shapes, factors)
    if arch.startswith("gemma"):
        heads, layers = found.get("num_attention_heads", 1), found.get("num_hidden_layers")
        scale = metadata.get(f"{arch}.attention.scale")
        wide = found.get("hidden_size", 0) // max(1, heads) if layers == _WIDE_SCALE[arch] else found.get("head_dim", 256)
        wide = scale**-2 if scale else wide  # transformers takes whole numbers only, and float32 rounds them
        found["query_pre_attn_scalar"] = round(wide) if abs(wide - round(wide)) < 1e-3 else wide
        if arch == "gemma3":
            local = {"rope_type": "default", "rope_theta": metadata.get("gemma3.rope.freq_base_swa", 10000.0)}
            found["rope_parameters"] = {"full_attention": found["rope_parameters"], "sliding_attention": local}
            pattern = metadata.get("gemma3.attention.sliding_window_pattern")
            if isinstance(pattern, int):
                found["sliding_window_pattern"] = pattern
            elif isinstance(pattern, np.ndarray):
                found["layer_types"] = ["sliding_attention" if slides else "full_attention" for slides in pattern]
    if arch == "phi3":
        original = metadata.get("phi3.rope.scaling.original_context_length")
        found["original_max_position_embeddings"] = found.get("max_position_embeddings") if original is None else original
    if arch == "qwen2moe":
        found["qkv_bias"] = "blk.0.attn_q.bias" in shapes
    if arch == "qwen3moe" or types[0] == "mixtral":
        found["norm_topk_prob"] = True
    return {row.keys.get(key, key): value for key, value in found.items()}


def _rope_parameters(metadata: Mapping[str, Any], arch: str, shapes: Mapping[str, Any], factors: Any) -> dict[str, Any]:
    given = {key: metadata.get(f"{arch}.rope.{theirs}") for key, theirs in (
        ("rope_theta", "freq_base"), ("rope_type", "scaling.type"), ("factor", "scaling.factor"),
        ("original_max_position_embeddings", "scaling.original_context_length"), ("attention_factor", "scaling.attn_factor"),
    )}  # fmt: skip
    found = {key: value for key, value in given.items() if value is not None}
    found.setdefault("rope_theta", 10000.0)
    if found.get("rope_type") == "yarn" and "attention_factor" in found:
        found["attention_factor"] *= _yarn_factor(found.get("factor", 1.0))
    factor = found.get("factor") or metadata.get(f"{arch}.rope.scale_linear") or 1.0
    if factor != 1 and "rope_type" not in found:  # of older files; llama.cpp reads them so
        found |= {"rope_type": "linear", "factor": factor}
    if found.setdefault("rope_type", "none") == "none":
        found |= {"rope_type": "default"}
    size, head = metadata.get(f"{arch}.rope.dimension_count"), metadata.get(f"{arch}.attention.key_length")
    width, heads = metadata.get(f"{arch}.embedding_length"), metadata.get(f"{arch}.attention.head_count")
    head = head or (width // heads if isinstance(width, int) and isinstance(heads, int) and heads else None)
    if size and head and size != head:
        found["partial_rotary_factor"] = size / head
    if "rope_freqs.weight" in shapes:
        if found["rope_type"] not in ("default", "linear"):
            what = f"rope_freqs.weight cannot be combined with {arch}.rope.scaling.type {found['rope_type']!r}"
            raise refusal("gguf", what, "remove one of them", architecture=arch)
        slower = factor if found["rope_type"] == "linear" else 1.0  # llama.cpp divides by both
        same = dict.fromkeys(("short_factor", "long_factor"), (factors("rope_freqs.weight") * slower).tolist())
        found |= {"rope_type": "longrope", **same, "attention_factor": found.get("attention_factor", 1.0), "factor": 1.0}
        found.setdefault("original_max_position_embeddings", metadata.get(f"{arch}.context_length"))
    if "rope_factors_long.weight" in shapes and "rope_factors_short.weight" in shapes:
        both = {f"{name}_factor": factors(f"rope_factors_{name}.weight").tolist() for name in ("long", "short")}
        found |= {"rope_type": "longrope", **both}
    return found


def _yarn_factor(factor: float) -> float:
    """Return the attention factor of YaRN, which llama.cpp multiplies with that of the file."""
    return 1 + 0.1 * math.log(factor) if factor > 1 else 1.0


def check_described(
    config: ModelConfig, metadata: Mapping[str, object], shapes: Mapping[str, tuple[int, ...]], extra: Mapping[str, np.ndarray]
) -> None:
    """Raise unless metadata and tensors of a GGUF file describe a configuration: the format fixes some settings of each architecture."""
    again = read_config(config_from_gguf(metadata, shapes, lambda name: extra[name]))
    pairs = {f.name: (getattr(config, f.name), getattr(again, f.name)) for f in fields(config) if f.compare and f.name != "architecture"}
    pairs["activation"] = tuple(_SAME_ACTIVATIONS.get(name, name) for name in pairs["activation"])
    lost = [name for name, (one, two) in pairs.items() if name != "ropes" and not _alike(one, two)]
    if not all(_same_angles(one, two, config.context) for one, two in zip(*pairs["ropes"], strict=True)):
        lost.append("ropes")
    if lost:
        given = {name: pairs[name][0] for name in lost}
        raise refusal("save", "GGUF must be able to describe the settings of the model", "use format='hf'", **given)


def _alike(one: object, two: object) -> bool:
    return math.isclose(one, two, rel_tol=1e-6) if isinstance(one, float) and isinstance(two, float) else one == two


def _same_angles(one: Rope | None, two: Rope | None, context: int) -> bool:
    """Whether rotary positions have the same frequencies and attention factor in texts of all lengths."""
    if one is None or two is None:
        return one is two
    lengths = (1, int(one.original), int(one.original) + 1, context)
    same = one.size == two.size and all(np.allclose(one.frequencies(n), two.frequencies(n), 1e-5, 0) for n in lengths)
    return same and math.isclose(one.attention_factor, two.attention_factor, rel_tol=1e-6)


def _check_fixed(config: ModelConfig, arch: str) -> None:
    """Raise if llama.cpp, which has no keys for some settings, would compute something else, or refuse the file."""
    wide = config.width // config.heads if config.layers == _WIDE_SCALE.get(arch) else config.head_size
    wrong = {
        "attention_scale": config.scale is not None and not math.isclose(config.scale**-2, wide, rel_tol=1e-6),
        "output_bias": config.output_bias and arch not in ("gpt2", "llama"),
        "tied_head": config.tied and arch == "qwen2moe",
        "untied_head": not config.tied and arch == "gemma2",
    }
    if lost := [name for name, is_wrong in wrong.items() if is_wrong]:
        raise refusal("save", f"GGUF fixes settings of {arch} that this model has otherwise", "use format='hf'", settings=lost)


def metadata_of(config: ModelConfig) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return the GGUF metadata of a configuration, and the tensors of rotary factors that belong to it."""
    source, (_, row) = config.source, architecture_of(config.source)
    arch = row.gguf
    if not arch:
        remedy = f"use format='hf'; GGUF supports {', '.join(name for name, other in ARCHITECTURES.items() if other.gguf)}"
        raise refusal("save", "this architecture cannot be saved as GGUF", remedy, model=config.architecture)
    values: dict[str, Any] = {}
    for ours, theirs in KEYS.items():
        value = source.get(row.keys.get(ours, ours), source.get(ours))
        if value is not None and not (ours == "sliding_window" and not any(config.windows)):
            values[f"{arch}.{theirs}"] = float(value) if "eps" in ours or "capping" in ours else value
    values |= {f"{arch}.feed_forward_length": config.inner, f"{arch}.attention.head_count_kv": config.kv_heads,
               f"{arch}.attention.key_length": config.head_size, f"{arch}.attention.value_length": config.head_size,
               f"{arch}.context_length": config.context}  # fmt: skip
    eps = "layer_norm_epsilon" if config.norm == "layer" else "layer_norm_rms_epsilon"
    values[f"{arch}.attention.{eps}"] = config.eps
    if config.experts is not None:
        if len(config.experts.layers) != config.layers:
            raise refusal("save", "GGUF requires experts in every layer", "use format='hf'", with_experts=config.experts.layers)
        values |= {f"{arch}.expert_count": config.experts.count, f"{arch}.expert_used_count": config.experts.chosen}
    tensors: dict[str, np.ndarray] = {}
    full = next((r for r, w in zip(config.ropes, config.windows, strict=True) if w is None), config.ropes[0] if config.ropes else None)
    if full is not None:
        one_factor = full.kind == "longrope" and full.options["short_factor"] == full.options["long_factor"]
        values |= {f"{arch}.rope.freq_base": full.base, f"{arch}.rope.dimension_count": full.size}
        if full.kind in ("linear", "yarn"):
            values |= {f"{arch}.rope.scaling.type": full.kind, f"{arch}.rope.scaling.factor": full.factor,
                       f"{arch}.rope.scaling.original_context_length": int(full.original)}  # fmt: skip
            if full.kind == "yarn" and not math.isclose(full.attention_factor, _yarn_factor(full.factor)):
                values[f"{arch}.rope.scaling.attn_factor"] = full.attention_factor / _yarn_factor(full.factor)
        elif arch == "llama" and full.attention_factor == 1 and (full.kind == "llama3" or one_factor):
            plain = full.base ** (-np.arange(0, full.size, 2) / full.size)
            tensors["rope_freqs.weight"] = (plain / full.frequencies(1)).astype(np.float32)
        elif full.kind == "longrope" and arch in ("llama", "phi3"):
            values |= {"llama.rope.scaling.type": "longrope"} if arch == "llama" else {}
            values |= {f"{arch}.rope.scaling.original_context_length": int(full.original),
                       f"{arch}.rope.scaling.attn_factor": full.attention_factor}  # fmt: skip
            tensors |= {f"rope_factors_{n}.weight": np.array(full.options[f"{n}_factor"], np.float32) for n in ("long", "short")}
        elif full.kind != "default":
            raise refusal("save", f"GGUF does not support this rotary scaling of {arch}", "use format='hf'", rope_type=full.kind)
    _check_fixed(config, arch)
    if arch == "gemma3":
        values["gemma3.attention.sliding_window_pattern"] = np.array([window is not None for window in config.windows])
        values["gemma3.rope.freq_base_swa"] = next((r.base for r, w in zip(config.ropes, config.windows, strict=True) if r and w), 10000.0)
    elif any(config.windows) and arch in ("llama", "qwen2", "qwen2moe", "qwen3"):
        raise refusal("save", "GGUF does not support sliding windows for this architecture", "use format='hf'", model=config.architecture)
    ids = {f"tokenizer.ggml.{key}": source.get(name) for name, key in _TOKEN_IDS.items()}
    ids = {key: value[0] if isinstance(value, list) else value for key, value in ids.items() if value or value == 0}
    return {"general.architecture": arch, **values, **ids}, tensors
