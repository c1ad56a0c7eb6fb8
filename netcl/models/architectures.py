"""The table of architectures. An entry maps the configuration keys and weight names of an architecture's files to those of netcl.

The weight of a file is written as ``name`` or ``name op op``; ops are applied to the weight in order. ``T`` transposes, ``q k v`` and
``gate up`` take parts of fused rows, ``e`` takes one expert, ``rq rk`` undo llama.cpp's order of rotary pairs, ``+1`` adds one to the
weight of a norm. :mod:`netcl.models.weights` applies the ops, and inverts them for saving.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from netcl.io.archive import refusal
from netcl.models.config import Experts, ModelConfig, end_ids, real_number, rope_of, whole_number
from netcl.models.layers import check_activation

_Names = dict[str, str]


def _layered(prefix: str, pairs: Mapping[str, str]) -> _Names:
    return {f"layers.{{i}}.{ours}": prefix + theirs for ours, theirs in pairs.items()}


_SAME_NAMES = [
    *(f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")),
    *(f"mlp.{own}{part}_proj" for own in ("", "experts.{e}.", "shared_expert.") for part in ("gate", "up", "down")),
    "mlp.gate", "mlp.shared_expert_gate",
]  # fmt: skip
_LLAMA_NORMS = {"input_layernorm": "input_layernorm", "pre_feedforward_layernorm": "post_attention_layernorm"}
LLAMA: _Names = {
    "embed_tokens": "model.embed_tokens", "norm": "model.norm", "lm_head": "lm_head",
    **_layered("model.layers.{i}.", {**_LLAMA_NORMS, **{name: name for name in _SAME_NAMES}}),
}  # fmt: skip
_GEMMA_NORMS = {"input_layernorm": "input_layernorm +1", "pre_feedforward_layernorm": "pre_feedforward_layernorm +1",
                "post_attention_norm": "post_attention_layernorm +1", "post_feedforward_norm": "post_feedforward_layernorm +1",
                "self_attn.q_norm": "self_attn.q_norm +1", "self_attn.k_norm": "self_attn.k_norm +1"}  # fmt: skip
GEMMA: _Names = {**LLAMA, "norm": "model.norm +1", **_layered("model.layers.{i}.", _GEMMA_NORMS)}
_FUSED = {
    **{f"self_attn.{part}_proj": f"self_attn.qkv_proj {part}" for part in "qkv"},
    **{f"mlp.{part}_proj": f"mlp.gate_up_proj {part}" for part in ("gate", "up")},
}
PHI3: _Names = {**LLAMA, **_layered("model.layers.{i}.", _FUSED)}
_SPARSE = {f"mlp.experts.{{e}}.{n}_proj": f"block_sparse_moe.experts.{{e}}.{w}" for n, w in (("gate", "w1"), ("up", "w3"), ("down", "w2"))}
MIXTRAL: _Names = {**LLAMA, **_layered("model.layers.{i}.", {"mlp.gate": "block_sparse_moe.gate", **_SPARSE})}
GPT2: _Names = {
    "embed_tokens": "transformer.wte", "embed_positions": "transformer.wpe", "norm": "transformer.ln_f", "lm_head": "lm_head",
    **_layered("transformer.h.{i}.", {
        "input_layernorm": "ln_1", "pre_feedforward_layernorm": "ln_2", "self_attn.o_proj": "attn.c_proj T", "mlp.up_proj": "mlp.c_fc T",
        "mlp.down_proj": "mlp.c_proj T", **{f"self_attn.{part}_proj": f"attn.c_attn T {part}" for part in "qkv"},
    }),
}  # fmt: skip
_GGUF_NETWORKS = (("mlp.", ""), ("mlp.experts.{e}.", "_exps e"), ("mlp.shared_expert.", "_shexp"))
GGUF: _Names = {
    "embed_tokens": "token_embd", "embed_positions": "position_embd", "norm": "output_norm", "lm_head": "output",
    **_layered("blk.{i}.", {
        **{f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"}, "self_attn.o_proj": "attn_output",
        "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "input_layernorm": "attn_norm",
        "pre_feedforward_layernorm": "ffn_norm", "post_attention_norm": "post_attention_norm", "post_feedforward_norm": "post_ffw_norm",
        **{f"{ours}{part}_proj": f"ffn_{part}{theirs}" for ours, theirs in _GGUF_NETWORKS for part in ("gate", "up", "down")},
        "mlp.gate": "ffn_gate_inp", "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    }),
}  # fmt: skip
_TURNED = {f"self_attn.{part}_proj": f"attn_{part} r{part}" for part in "qk"}
_GGUF_QKV = {f"self_attn.{part}_proj": f"attn_qkv {part}" for part in "qkv"}
_GGUF_LLAMA = {**GGUF, **_layered("blk.{i}.", _TURNED)}
_GGUF_FUSED = {**GGUF, **_layered("blk.{i}.", _GGUF_QKV)}
_GGUF_PHI3 = {**_GGUF_FUSED, **_layered("blk.{i}.", {f"mlp.{part}_proj": f"ffn_up {part}" for part in ("gate", "up")})}

# ---- encoders
_BERT_LAYER = {
    **{f"self_attn.{ours}_proj": f"attention.self.{theirs}" for ours, theirs in (("q", "query"), ("k", "key"), ("v", "value"))},
    "self_attn.o_proj": "attention.output.dense", "input_layernorm": "attention.output.LayerNorm", "mlp.up_proj": "intermediate.dense",
    "mlp.down_proj": "output.dense", "pre_feedforward_layernorm": "output.LayerNorm",
}  # fmt: skip
BERT: _Names = {
    "embed_tokens": "embeddings.word_embeddings", "embed_positions": "embeddings.position_embeddings",
    "embed_types": "embeddings.token_type_embeddings", "embedding_norm": "embeddings.LayerNorm", "pooler": "pooler.dense",
    **_layered("encoder.layer.{i}.", _BERT_LAYER),
}  # fmt: skip
_VIT_LAYER = {ours: theirs.replace("attention.self", "attention.attention") for ours, theirs in _BERT_LAYER.items()}
_VIT_LAYER |= {"input_layernorm": "layernorm_before", "pre_feedforward_layernorm": "layernorm_after"}
VIT: _Names = {
    "class_token": "embeddings.cls_token", "patches": "embeddings.patch_embeddings.projection",
    "embed_positions.weight": "embeddings.position_embeddings", "norm": "layernorm", "pooler": "pooler.dense",
    **_layered("encoder.layer.{i}.", _VIT_LAYER),
}  # fmt: skip
_CLIP_LAYER = {
    **{f"self_attn.{part}_proj": f"self_attn.{part}_proj" for part in "qkv"}, "self_attn.o_proj": "self_attn.out_proj",
    "input_layernorm": "layer_norm1", "pre_feedforward_layernorm": "layer_norm2", "mlp.up_proj": "mlp.fc1", "mlp.down_proj": "mlp.fc2",
}  # fmt: skip
CLIP_TEXT: _Names = {
    "embed_tokens": "text_model.embeddings.token_embedding", "embed_positions": "text_model.embeddings.position_embedding",
    "norm": "text_model.final_layer_norm", "projection": "text_projection", **_layered("text_model.encoder.layers.{i}.", _CLIP_LAYER),
}  # fmt: skip
CLIP_VISION: _Names = {
    "class_token": "vision_model.embeddings.class_embedding", "patches": "vision_model.embeddings.patch_embedding",
    "embed_positions": "vision_model.embeddings.position_embedding", "embedding_norm": "vision_model.pre_layrnorm",
    "norm": "vision_model.post_layernorm", "projection": "visual_projection",
    **_layered("vision_model.encoder.layers.{i}.", _CLIP_LAYER),
}  # fmt: skip
CLIP: _Names = {"logit_scale": "logit_scale"} | {
    f"{part}.{ours}": theirs for part, names in (("text", CLIP_TEXT), ("vision", CLIP_VISION)) for ours, theirs in names.items()
}


def _t5_side(side: str) -> _Names:
    last, pairs = 2 if side == "decoder" else 1, (("self_attn", "0.SelfAttention"), ("cross_attn", "1.EncDecAttention"))
    parts = {f"{ours}.{part}_proj": f"{theirs}.{part}" for ours, theirs in pairs for part in "qkvo"}
    parts |= {"input_layernorm": "0.layer_norm", "cross_norm": "1.layer_norm", "pre_feedforward_layernorm": f"{last}.layer_norm"}
    parts |= {f"mlp.{o}_proj": f"{last}.DenseReluDense.{t}" for o, t in (("gate", "wi_0"), ("up", "wi_1"), ("down", "wo"))}
    layers = {f"{side}.{ours}": theirs for ours, theirs in _layered(f"{side}.block.{{i}}.layer.", parts).items()}
    bias = f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias"
    return {f"{side}.norm": f"{side}.final_layer_norm", f"{side}.relative_bias": bias, **layers}


T5: _Names = {"shared": "shared", "lm_head": "lm_head", **_t5_side("encoder"), **_t5_side("decoder")}


@dataclass(frozen=True)
class Architecture:
    """A model type: names, default sliding-window layers (``windows``), config keys by common name (``keys``), other ``settings``.

    ``defaults`` are the values of keys that ``config.json`` leaves out, where they are not those of most architectures.
    ``fixed`` has keys of ``config.json`` that change what is computed, with the only value that is supported.
    """

    hf_class: str
    names: _Names
    gguf: str = ""
    gguf_names: _Names = field(default_factory=dict)
    kind: str = "decoder"
    windows: str = "none"
    keys: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    defaults: Mapping[str, object] = field(default_factory=dict)
    fixed: Mapping[str, object] = field(default_factory=dict)


_ALL_BIASES = {"query_bias": True, "output_bias": True, "mlp_bias": True}
_CLASSIC = {"norm": "layer", "gated": False, "learned_positions": True, **_ALL_BIASES}
_ENCODER = {**_CLASSIC, "causal": False, "activation": "gelu"}
_BERT = {**_ENCODER, "norm_first": False, "embedding_norm": True, "final_norm": False, "pooling": "tanh"}
_BERT_FIXED = {"is_decoder": False, "position_embedding_type": "absolute"}
_BERT_DEFAULTS = {"max_position_embeddings": 512}
_GPT2_KEYS = {"hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head",
              "max_position_embeddings": "n_positions", "intermediate_size": "n_inner", "hidden_act": "activation_function"}  # fmt: skip
_ORIGINAL = "original_max_position_embeddings"
_CAUSAL = {"use_bidirectional_attention": False}
_QWEN = {"sliding_window": 4096, "max_position_embeddings": 32768}
ARCHITECTURES: dict[str, Architecture] = {
    "gpt2": Architecture("GPT2LMHeadModel", GPT2, "gpt2", _GGUF_FUSED, keys=_GPT2_KEYS, settings={**_CLASSIC, "activation": "gelu_new"},
                         ignored=(".attn.bias", ".attn.masked_bias"), defaults={"max_position_embeddings": 1024},
                         fixed={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False}),
    "llama": Architecture("LlamaForCausalLM", LLAMA, "llama", _GGUF_LLAMA),
    "mistral": Architecture("MistralForCausalLM", LLAMA, "llama", _GGUF_LLAMA, windows="all",
                         defaults={"sliding_window": 4096, "max_position_embeddings": 131072}),
    "mixtral": Architecture("MixtralForCausalLM", MIXTRAL, "llama", _GGUF_LLAMA, windows="all", keys={"num_experts": "num_local_experts"},
                         defaults={"rope_theta": 1e6, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072}),
    "qwen2": Architecture("Qwen2ForCausalLM", LLAMA, "qwen2", GGUF, windows="upper", settings={"query_bias": True}, defaults=_QWEN),
    "qwen2_moe": Architecture("Qwen2MoeForCausalLM", LLAMA, "qwen2moe", GGUF, windows="lower", settings={"query_bias": True},
                              defaults=_QWEN),
    "qwen3": Architecture("Qwen3ForCausalLM", LLAMA, "qwen3", GGUF, windows="upper", settings={"qk_norm": True},
                          defaults={**_QWEN, "head_dim": 128}),
    "qwen3_moe": Architecture("Qwen3MoeForCausalLM", LLAMA, "qwen3moe", GGUF, windows="used", settings={"qk_norm": True}, defaults=_QWEN),
    "gemma2": Architecture("Gemma2ForCausalLM", GEMMA, "gemma2", GGUF, windows="even", keys={"hidden_act": "hidden_activation"},
                           settings={"post_norms": True, "activation": "gelu_pytorch_tanh", "tied": True}, fixed=_CAUSAL,
                           defaults={"sliding_window": 4096, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
                                     "head_dim": 256, "max_position_embeddings": 8192}),
    "gemma3_text": Architecture("Gemma3ForCausalLM", GEMMA, "gemma3", GGUF, windows="most", keys={"hidden_act": "hidden_activation"},
                                settings={"post_norms": True, "qk_norm": True, "activation": "gelu_pytorch_tanh", "tied": True},
                                fixed=_CAUSAL, defaults={"sliding_window": 4096, "rope_theta": 1e6, "rope_local_base_freq": 10000.0,
                                                         "head_dim": 256, "max_position_embeddings": 131072}),
    "phi3": Architecture("Phi3ForCausalLM", PHI3, "phi3", _GGUF_PHI3, windows="all",
                         defaults={"rms_norm_eps": 1e-5, **dict.fromkeys(("max_position_embeddings", _ORIGINAL), 4096)}),
    "bert": Architecture("BertModel", BERT, kind="encoder", settings=_BERT, ignored=("cls.", "position_ids"), fixed=_BERT_FIXED,
                         defaults=_BERT_DEFAULTS),
    "roberta": Architecture("RobertaModel", BERT, kind="encoder", settings=_BERT, ignored=("lm_head.", "position_ids"), fixed=_BERT_FIXED,
                            defaults=_BERT_DEFAULTS),
    "vit": Architecture("ViTModel", VIT, kind="encoder", settings={**_ENCODER, "pooling": "tanh"}, ignored=("classifier.",),
                        defaults={"image_size": 224, "patch_size": 16}, fixed={"pooler_act": "tanh"}),
    "clip_text_model": Architecture("CLIPTextModel", CLIP_TEXT, kind="encoder", settings={**_CLASSIC, "activation": "quick_gelu",
                                    "pooling": "end"}, ignored=("position_ids",), defaults={"max_position_embeddings": 77}),
    "clip_vision_model": Architecture("CLIPVisionModel", CLIP_VISION, kind="encoder", settings={**_ENCODER, "activation": "quick_gelu",
                                      "embedding_norm": True, "final_norm": False, "pooling": "norm"}, ignored=("position_ids",),
                                      defaults={"image_size": 224, "patch_size": 32}),
    "clip": Architecture("CLIPModel", CLIP, kind="pair", ignored=("position_ids",)),
    "t5": Architecture("T5ForConditionalGeneration", T5, kind="seq2seq", keys={"hidden_size": "d_model", "num_hidden_layers": "num_layers",
                       "num_attention_heads": "num_heads", "intermediate_size": "d_ff", "head_dim": "d_kv"},
                       ignored=("embed_tokens.", "EncDecAttention.relative_attention_bias")),
}  # fmt: skip


def architecture_of(config: Mapping[str, Any]) -> tuple[str, Architecture]:
    """Return the ``model_type`` of a configuration and its entry in the table; raises if it is unknown."""
    name = config.get("model_type")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise refusal("models", "unknown model_type", f"known are {', '.join(ARCHITECTURES)}", given=repr(name))
    return name, ARCHITECTURES[name]


def hub_names(row: Architecture, config: ModelConfig) -> _Names:
    """Return the Hugging Face name of each parameter; T5 without gates names the first matrix of a feed-forward network ``wi``."""
    return row.names if config.gated else {ours: theirs.replace(".wi_1", ".wi") for ours, theirs in row.names.items()}


def read_config(config: Mapping[str, Any]) -> ModelConfig:
    """Convert a ``config.json`` to a :class:`ModelConfig`."""
    name, row = architecture_of(config)
    common = {ours: config.get(theirs, config.get(ours)) for ours, theirs in row.keys.items()}
    given = {**row.defaults, **config, **{key: value for key, value in common.items() if value is not None}}
    width, heads = whole_number(given, "hidden_size"), whole_number(given, "num_attention_heads")
    layers = whole_number(given, "num_hidden_layers", least=0)
    kv_heads = whole_number(given, "num_key_value_heads", default=heads)
    if layers > 10_000 or heads % kv_heads or (given.get("head_dim") is None and width % heads):
        what = "heads must divide hidden_size (unless head_dim is given), kv_heads must divide heads, and layers must be at most 10,000"
        raise refusal("config", what, hidden_size=width, heads=heads, kv_heads=kv_heads, layers=layers)
    end_ids(config)  # raises if they are malformed
    fixed = {**row.fixed, **({"is_causal": True} if row.kind == "decoder" else {})}
    if wrong := {key: config[key] for key, value in fixed.items() if config.get(key, value) not in (None, value)}:
        raise refusal("config", f"the model must have {', '.join(f'{key}={fixed[key]!r}' for key in wrong)}", **wrong)
    settings, rms = dict(row.settings), row.kind == "decoder" and "norm" not in row.settings
    found = ModelConfig(
        architecture=name, source=dict(config), vocab_size=whole_number(given, "vocab_size", default=1), width=width, layers=layers,
        heads=heads, kv_heads=kv_heads, head_size=whole_number(given, "head_dim", default=width // heads),
        inner=whole_number(given, "intermediate_size", default=4 * width),
        context=whole_number(given, "max_position_embeddings", default=2048),
        eps=real_number(given, "rms_norm_eps" if rms else "layer_norm_epsilon", default=1e-5 if row.settings.get("norm") else 1e-6),
        activation=check_activation(given.get(row.keys.get("hidden_act", "hidden_act")) or settings.pop("activation", "silu")),
        **{key: value for key, value in settings.items() if key != "activation"},
    )  # fmt: skip
    if found.eps <= 0:
        raise refusal("config", "the epsilon of norms must be above 0", given=found.eps)
    if row.kind == "seq2seq":
        gate, _, act = str(given.get("feed_forward_proj", "relu")).rpartition("-")
        act = check_activation(given.get("dense_act_fn", "gelu_new" if (gate, act) == ("gated", "gelu") else act))
        details: dict[str, Any] = {"gated": bool(given.get("is_gated_act", gate == "gated")), "activation": act, "scale": 1.0}
    else:
        details = _decoder_details(given, row, found) if row.kind == "decoder" else _encoder_details(given, name, found)
    return ModelConfig(**{**vars(found), **details})


def _decoder_details(given: Mapping[str, Any], row: Architecture, found: ModelConfig) -> dict[str, Any]:
    query = row.settings.get("query_bias", given.get("attention_bias", False))
    if row.gguf == "qwen2moe":
        query = given.get("qkv_bias", True)
    types = _layer_types(given, row, found.layers)
    gemma = row.gguf.startswith("gemma")
    ropes = {kind: None if found.learned_positions else rope_of(given, found.head_size, kind) for kind in dict.fromkeys(types)}
    window = whole_number(given, "sliding_window") if "sliding_attention" in types else None
    caps: dict[str, Any] = {
        name: None if given.get(key) is None or not capped else real_number(given, key)
        for name, key, capped in (("attention_cap", "attn_logit_softcapping", row.gguf == "gemma2"),  # Gemma 3 has the key, unused
                                  ("final_cap", "final_logit_softcapping", gemma))
    }  # fmt: skip
    divisor = real_number(given, "query_pre_attn_scalar", default=256.0) if gemma else 1.0
    if divisor <= 0:
        raise refusal("config", "query_pre_attn_scalar must be above 0", given=divisor)
    if any(cap is not None and cap <= 0 for cap in caps.values()):
        raise refusal("config", "attn_logit_softcapping and final_logit_softcapping must be above 0 or null", **caps)
    stretched = max((rope.factor for rope in ropes.values() if rope is not None and rope.kind == "dynamic"), default=1.0)
    return {
        "context": int(found.context * stretched), "query_bias": bool(query),
        "output_bias": row.settings.get("output_bias", "query_bias" not in row.settings and bool(query)),
        "mlp_bias": row.settings.get("mlp_bias", bool(given.get("mlp_bias", False))),
        "tied": bool(given.get("tie_word_embeddings", row.settings.get("tied", row.gguf == "gpt2"))),
        "ropes": tuple(ropes[kind] for kind in types), "windows": tuple(window if kind == "sliding_attention" else None for kind in types),
        "scale": divisor**-0.5 if gemma else None,
        "embedding_scale": math.sqrt(found.width) if gemma else 1.0, "experts": _experts(given, row, found), **caps,
    }  # fmt: skip


def _layer_types(given: Mapping[str, Any], row: Architecture, layers: int) -> list[str]:
    window, pattern = given.get("sliding_window"), whole_number(given, "sliding_window_pattern", default=6)
    used, most = bool(given.get("use_sliding_window")), whole_number(given, "max_window_layers", default=28, least=0)
    slides = {"all": lambda i: True, "even": lambda i: i % 2 == 0, "most": lambda i: (i + 1) % pattern != 0, "used": lambda i: used,
              "upper": lambda i: used and i >= most, "lower": lambda i: used and i % 2 == 0 and i < most,
              "none": lambda i: False}[row.windows]  # fmt: skip
    usual = ["sliding_attention" if window is not None and slides(i) else "full_attention" for i in range(layers)]
    types = usual if given.get("layer_types") is None else given["layer_types"]
    if not isinstance(types, list) or len(types) != layers or not set(types) <= {"full_attention", "sliding_attention"}:
        raise refusal("config", "layer_types must list full_attention or sliding_attention per layer", layers=layers, given=types)
    if types != usual and row.windows in ("all", "used", "none"):  # transformers ignores the key there
        raise refusal("config", f"all layer_types of {row.hf_class} must be {usual[0]!r}", given=types)
    return types


def _experts(given: Mapping[str, Any], row: Architecture, found: ModelConfig) -> Experts | None:
    mixtral = row.names is MIXTRAL
    if row.gguf not in ("qwen2moe", "qwen3moe") and not mixtral:
        return None
    count = whole_number(given, "num_experts", "num_local_experts")
    chosen = whole_number(given, "num_experts_per_tok")
    step, dense = whole_number(given, "decoder_sparse_step", default=1), given.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise refusal("config", "mlp_only_layers must be a list of numbers of layers", given=repr(dense))
    if chosen > count:
        raise refusal("config", "num_experts_per_tok must be at most the number of experts", given=chosen, experts=count)
    return Experts(
        count, chosen, found.inner if mixtral else whole_number(given, "moe_intermediate_size"),
        mixtral or bool(given.get("norm_topk_prob", False)),
        whole_number(given, "shared_expert_intermediate_size") if row.gguf == "qwen2moe" else 0,
        tuple(i for i in range(found.layers) if i not in dense and (i + 1) % step == 0),
    )  # fmt: skip


def _encoder_details(given: Mapping[str, Any], name: str, found: ModelConfig) -> dict[str, Any]:
    image = None
    if name in ("vit", "clip_vision_model"):
        image = (whole_number(given, "image_size"), whole_number(given, "patch_size"), whole_number(given, "num_channels", default=3))
        if image[0] % image[1]:
            raise refusal("config", "patch_size must divide image_size", image_size=image[0], patch_size=image[1])
    offset = whole_number(given, "pad_token_id", default=1, least=0) + 1 if name == "roberta" else 0
    return {
        "image": image, "position_offset": offset, "windows": (None,) * found.layers,
        "token_types": whole_number(given, "type_vocab_size", default=2) if name in ("bert", "roberta") else 0,
        "query_bias": bool(given.get("qkv_bias", True)), "projection": given.get("_projection") or 0,
        "eps": real_number(given, "layer_norm_eps", default=1e-5 if name.startswith("clip") else 1e-12),
    }  # fmt: skip
