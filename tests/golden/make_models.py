"""Makes models.json and models.npz: what transformers gives for tiny models of every architecture that netcl.models loads.

Run with an interpreter that has transformers 5.22 and torch 2.13: ``python tests/golden/make_models.py``. Weights come from
model_cases.py, so the files hold configurations, names, shapes and results only. No test needs transformers.
"""

from __future__ import annotations

import copy
import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.numpy import load_file, save_file

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
import model_cases as cases  # noqa: E402

TOKENS, NEW = 11, 64
SMALL = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 128,
         "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}  # fmt: skip
LONG = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.5, 2.0, 3.0, 4.0],
        "original_max_position_embeddings": 96}  # fmt: skip
DECODERS = {
    "gpt2": ("GPT2", {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128,
                      "bos_token_id": None, "eos_token_id": None}),
    "llama": ("Llama", {**SMALL, "rope_parameters": LLAMA3}),
    "llama-linear": ("Llama", {**SMALL, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True,
                               "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}}),
    "llama-dynamic": ("Llama", {**SMALL, "max_position_embeddings": 32, "num_key_value_heads": 4,
                                "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}}),
    "llama-yarn": ("Llama", {**SMALL, "rope_parameters": YARN}),
    "mistral": ("Mistral", {**SMALL, "sliding_window": 9, "head_dim": 16}),
    "qwen2": ("Qwen2", {**SMALL, "tie_word_embeddings": True, "use_sliding_window": True, "sliding_window": 10, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {**SMALL, "head_dim": 16}),
    "gemma2": ("Gemma2", {**SMALL, "head_dim": 16, "query_pre_attn_scalar": 12, "sliding_window": 8, "attn_logit_softcapping": 5.0,
                          "final_logit_softcapping": 4.0}),
    "gemma3": ("Gemma3", {**SMALL, "num_hidden_layers": 4, "head_dim": 16, "query_pre_attn_scalar": 20, "sliding_window": 8,
                          "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
                          "rope_parameters": {"full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
                                              "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}}),
    "phi3": ("Phi3", {**SMALL, "sliding_window": 12}),
    "phi3-long": ("Phi3", {**SMALL, "original_max_position_embeddings": 96, "rope_parameters": LONG}),
    "phi3-partial": ("Phi3", {**SMALL, "head_dim": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0,
                                                                           "partial_rotary_factor": 0.75}}),
    "mixtral": ("Mixtral", {**SMALL, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2_moe": ("Qwen2Moe", {**SMALL, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
                               "shared_expert_intermediate_size": 40, "decoder_sparse_step": 2}),
    "qwen3_moe": ("Qwen3Moe", {**SMALL, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 16,
                               "norm_topk_prob": True}),
}  # fmt: skip
TEXT = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "max_position_embeddings": 40}  # fmt: skip
IMAGE = {"image_size": 16, "patch_size": 8, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
CLIP = {
    "projection_dim": 24,
    "text_config": {**TEXT, "eos_token_id": 95, "projection_dim": 24},
    "vision_config": {**IMAGE, "projection_dim": 24},
}
ENCODERS = {
    "bert": ("BertModel", "BertConfig", TEXT),
    "roberta": ("RobertaModel", "RobertaConfig", {**TEXT, "type_vocab_size": 1, "layer_norm_eps": 1e-5, "pad_token_id": 1}),
    "vit": ("ViTModel", "ViTConfig", IMAGE),
    "clip": ("CLIPModel", "CLIPConfig", CLIP),
}


def config_of(name, options):
    kind = getattr(transformers, {"Gemma3": "Gemma3TextConfig"}.get(name, name if name.endswith("Config") else f"{name}Config"))
    return kind(**options)


def seeded(model, kind, seed, folder):
    """The model with the weights of model_cases, through its folder, and the names and shapes there."""
    model.save_pretrained(folder)
    path = Path(folder, "model.safetensors")
    shapes = {name: list(value.shape) for name, value in load_file(path).items()}
    save_file(cases.weights(shapes, seed), path, metadata={"format": "pt"})
    loaded = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    return loaded, json.loads(Path(folder, "config.json").read_text()), shapes


def decoded(model, ids):
    """Logits of the prompt and of the whole text without a cache, greedy tokens with one, and the least lead of the likeliest token."""
    fresh = copy.deepcopy(model)  # dynamic rotary frequencies stay grown
    with torch.no_grad():
        out = model(torch.tensor(ids), use_cache=True)
        prompt, cache, tokens, leads, steps = out.logits, out.past_key_values, [], [], []
        logits = prompt[:, -1]
        for _ in range(NEW):
            best = logits.topk(2).values[0]
            leads.append(float(best[0] - best[1]))
            steps.append(logits[0].numpy())
            tokens.append(int(logits.argmax()))
            out = model(torch.tensor([[tokens[-1]]]), past_key_values=cache, use_cache=True)
            logits = out.logits[:, -1]
        whole = fresh(torch.tensor([[*ids[0], *tokens[:24]]]), use_cache=False).logits
    return {"prompt": prompt.numpy(), "whole": whole.numpy(), "last_step": steps[-1]}, tokens, min(leads)


def make_decoder(case, name, options):
    config = config_of(name, options)
    config._attn_implementation = "eager"
    kind = getattr(transformers, f"{name}LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM")
    best = None
    for seed in range(6):
        ids = np.random.default_rng(seed).integers(0, 96, (1, TOKENS)).tolist()
        with tempfile.TemporaryDirectory() as folder:
            model, written, shapes = seeded(kind(config), kind, seed, folder)
        results, tokens, lead = decoded(model, ids)
        lead *= min(1.0, len(set(tokens)) / 12)
        if best is None or lead > best[0]:
            best = (lead, {"seed": seed, "config": written, "shapes": shapes, "ids": ids, "tokens": tokens}, results)
    print(case, "lead", best[0], "tokens", len(set(best[1]["tokens"])), "std", best[2]["prompt"].std())
    return best[1:]


def make_encoder(case, name, config_name, options):
    kind = getattr(transformers, name)
    rng = np.random.default_rng(7)
    ids, mask = rng.integers(2, 95, (2, 9)), np.ones((2, 9), np.int64)
    ids[:, -1], mask[1, 6:] = 95, 0
    ids[1, 6:] = 1 if case == "roberta" else 0
    ids[1, 5] = 95
    image = rng.standard_normal((2, 3, 16, 16)).astype(np.float32)
    with tempfile.TemporaryDirectory() as folder:
        model, written, shapes = seeded(kind(getattr(transformers, config_name)(**options)), kind, 0, folder)
    given = {} if case == "vit" else {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}
    if case in ("vit", "clip"):
        given["pixel_values"] = torch.tensor(image)
    with torch.no_grad():
        out = model(**given)
    if case == "clip":
        text, vision = out.text_model_output, out.vision_model_output
        results = {"text": text.last_hidden_state, "text_pooled": out.text_embeds, "vision": vision.last_hidden_state,
                   "vision_pooled": out.image_embeds, "logits": out.logits_per_image}  # fmt: skip
    else:
        results = {"states": out.last_hidden_state, "pooled": out.pooler_output}
    print(case, {key: float(value.std()) for key, value in results.items()})
    return {"seed": 0, "config": written, "shapes": shapes, "ids": ids.tolist(), "mask": mask.tolist()}, {
        key: v.numpy() for key, v in results.items()
    }


def main():
    described, arrays = {}, {}
    for case, row in {**DECODERS, **ENCODERS}.items():
        described[case], results = (make_decoder if case in DECODERS else make_encoder)(case, *row)
        arrays |= {f"{case}/{key}": value.astype(np.float32) for key, value in results.items()}
    lines = [f"{json.dumps(case)}: {json.dumps(value, sort_keys=True)}" for case, value in described.items()]
    (HERE / "models.json").write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    np.savez_compressed(HERE / "models.npz", **arrays)


if __name__ == "__main__":
    main()
