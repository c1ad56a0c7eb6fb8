"""Models through files: what is saved loads again to the same logits, in both formats; what does not fit is refused."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

import netcl
from netcl import models, nn
from netcl.autograd import no_grad
from netcl.core.tensor import Tensor
from netcl.io import FileError
from netcl.models.gguf import GGUFFile, NewTensor, write_gguf
from netcl.models.gguf_config import config_from_gguf
from netcl.ops.quantized.formats import kind_of

GGUF_CASES = ["gpt2", "llama", "llama-linear", "llama-yarn", "qwen3", "phi3-long", "mixtral", "qwen3_moe"]


def logits(model, ids=((3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5),)) -> np.ndarray:
    with no_grad():
        return model(Tensor.from_host(model.queue, np.array(ids, np.int64))).to_host()


_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize("case", GGUF_CASES)
def test_a_model_is_the_same_through_gguf(case, folder_of, tmp_path):
    model = models.load(folder_of(case), "cpu")
    models.save(model, tmp_path / "model.gguf", "gguf")
    again = models.load(tmp_path / "model.gguf", "cpu")
    np.testing.assert_allclose(logits(again), logits(model), atol=2e-5)
    assert again.config.architecture == model.config.architecture
    models.save(again, tmp_path / "folder")  # and from there back to a folder
    np.testing.assert_allclose(logits(models.load(tmp_path / "folder", "cpu")), logits(model), atol=2e-5)


@pytest.mark.parametrize(
    "config", [{}, {"model_type": "phi3"}, {"model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 1}]
)
@pytest.mark.parametrize("kind", ["Q6_K", "Q4_K", "Q4_0"])
def test_packed_weights_are_written_as_they_are(kind, config, device, tmp_path):
    """A file of K-quants that is loaded and saved keeps its blocks: rounding them again would change most weights a little."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1, "vocab_size": 32}
    one, two, three = (tmp_path / f"{i}.gguf" for i in range(3))
    models.save(random_model(**{**sizes, **config}), one, "gguf", kind=kind)
    loaded = models.load(one, device)
    models.save(loaded, two, "gguf")
    models.save(loaded, three, "gguf", kind=kind)
    first, *others = (GGUFFile(path) for path in (one, two, three))
    assert sum(first.kinds[name] == kind for name in first.shapes) >= 6
    for other in others:
        assert other.kinds == first.kinds
        for name in first.shapes:
            np.testing.assert_array_equal(other.packed(name), first.packed(name), err_msg=name)
    models.save(loaded, tmp_path / "other.gguf", "gguf", kind="Q8_0")
    assert set(GGUFFile(tmp_path / "other.gguf").kinds.values()) == {"F32", "Q8_0"}


_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
_EXPERTS = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 16}
_MIXED = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 3}
_ROPES = {"full_attention": {"rope_theta": 1e5}, "sliding_attention": {"rope_theta": 1e3, "rope_type": "linear", "factor": 4.0}}


def random_model(**config):
    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    netcl.manual_seed(1)
    return models.CausalLM(models.read_config({"model_type": "llama", "max_position_embeddings": 64, **sizes, **config})).eval()


@pytest.mark.parametrize(
    "config",
    [
        {"rope_scaling": {**_YARN, "attention_factor": 2.0}},
        {"rope_scaling": {**_YARN, "mscale": 2.0, "mscale_all_dim": 1.0}},
        {"rope_scaling": {"rope_type": "longrope", "short_factor": [2.0] * 4, "long_factor": [2.0] * 4, "factor": 4.0}},
        {"model_type": "qwen2_moe", "qkv_bias": False, **_EXPERTS},
        {"model_type": "gpt2", "activation_function": "gelu_fast"},
        {"model_type": "gemma2", "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 3},
        {"model_type": "gemma3_text", "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 3, "num_hidden_layers": 7},
        {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4,
                          "original_max_position_embeddings": 8}},
    ],
)  # fmt: skip
def test_settings_that_gguf_has_are_kept(config, tmp_path):
    model = random_model(**config)
    models.save(model, tmp_path / "model.gguf", "gguf")
    np.testing.assert_allclose(logits(models.load(tmp_path / "model.gguf", "cpu")), logits(model), atol=2e-5)


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("activation", {"hidden_act": "gelu"}), ("activation", {"model_type": "gpt2", "activation_function": "relu"}),
        ("windows", {"model_type": "gemma2", **_MIXED}),
        ("windows", {"model_type": "qwen3_moe", "norm_topk_prob": True, "use_sliding_window": True, "sliding_window": 3, **_EXPERTS}),
        ("experts", {"model_type": "qwen3_moe", "norm_topk_prob": False, **_EXPERTS}),
        ("experts", {"model_type": "qwen2_moe", "norm_topk_prob": True, **_EXPERTS}),
        ("ropes", {"model_type": "gemma3_text", "rope_parameters": _ROPES, **_MIXED}),
        ("ropes", {"head_dim": 64, "rope_scaling": {**_YARN, "original_max_position_embeddings": 4096, "beta_fast": 4.0}}),
    ],
)  # fmt: skip
def test_settings_that_gguf_lacks_are_refused(name, config, tmp_path):
    with pytest.raises(FileError, match=rf"\[save\] GGUF must be able to describe the settings of the model; {name}=.*format='hf'"):
        models.save(random_model(**config), tmp_path / "model.gguf", "gguf")
    assert not (tmp_path / "model.gguf").exists()


@pytest.mark.parametrize(
    ("what", "config"),
    [
        (r"fixes settings of gemma2 .*\['attention_scale'\]", {"model_type": "gemma2", "head_dim": 16, "query_pre_attn_scalar": 8}),
        (r"fixes settings of gemma2 .*\['untied_head'\]", {"model_type": "gemma2", "tie_word_embeddings": False}),
        (r"fixes settings of qwen3 .*\['output_bias'\]", {"model_type": "qwen3", "attention_bias": True}),
        (r"fixes settings of qwen2moe .*\['tied_head'\]", {"model_type": "qwen2_moe", "tie_word_embeddings": True, **_EXPERTS}),
        (r"does not support this rotary scaling of qwen2", {"model_type": "qwen2", "rope_scaling": {**_LLAMA3, "low_freq_factor": 1.0,
                                                                                                  "high_freq_factor": 4.0}}),
    ],
)  # fmt: skip
def test_models_that_llama_cpp_would_compute_otherwise_are_refused(what, config, tmp_path):
    with pytest.raises(FileError, match=rf"\[save\] GGUF {what}"):
        models.save(random_model(**config), tmp_path / "model.gguf", "gguf")


def test_tokens_are_padded_to_the_rows_of_the_embedding(tmp_path):
    """llama.cpp takes the size of the embedding from the list of tokens."""
    tokenizers = pytest.importorskip("tokenizers")
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({chr(97 + i): i for i in range(20)}, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model = random_model()
    model.make_tokenizer = lambda: models.Tokenizer(backend)
    models.save(model, tmp_path / "model.gguf", "gguf")
    again = models.load(tmp_path / "model.gguf", "cpu")
    assert len(again.tokenizer.metadata["tokenizer.ggml.tokens"]) == 96 and again.tokenizer.encode("cab") == [2, 0, 1]
    backend.add_tokens([f"<{i}>" for i in range(80)])
    with pytest.raises(FileError, match=r"\[save\] GGUF requires an embedding for every token of the tokenizer; tokens=100, rows=96"):
        models.save(model, tmp_path / "other.gguf", "gguf")


def test_all_end_tokens_are_kept(tmp_path):
    model = random_model(eos_token_id=[7, 5])
    model.generation = {"eos_token_id": [5, 9]}
    models.save(model, tmp_path / "model.gguf", "gguf")
    again = models.load(tmp_path / "model.gguf", "cpu")
    assert again.end_tokens() == {5, 7, 9}
    models.save(again, tmp_path / "folder")
    assert models.load(tmp_path / "folder", "cpu").end_tokens() == {5, 7, 9}
    model.generation = {"eos_token_id": [1, 2]}
    with pytest.raises(FileError, match=r"\[save\] a GGUF file must have at most 3 end tokens.*end_tokens=\[1, 2, 5, 7\]"):
        models.save(model, tmp_path / "more.gguf", "gguf")


@pytest.mark.parametrize("case", ["gpt2", "gemma3", "phi3", "mixtral", "qwen2_moe", "bert", "clip"])
def test_a_saved_folder_has_the_tensors_it_was_read_from(case, folder_of, tmp_path):
    from netcl.io import load_safetensors

    models.save(models.load(folder_of(case), "cpu"), tmp_path)
    ours, theirs = (load_safetensors(folder / "model.safetensors") for folder in (tmp_path, folder_of(case)))
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        np.testing.assert_allclose(ours[name], value, atol=2e-7, err_msg=name)
        assert ours[name].shape == value.shape  # NumPy compares a scalar with a vector


def test_shards_are_read_by_their_index(folder_of, tmp_path, monkeypatch):
    from netcl.models.folder import read_object, write_tensors
    from netcl.models.weights import push

    model = models.load(folder_of("llama"), "cpu")
    shutil.copy(folder_of("llama") / "config.json", tmp_path)
    row = models.ARCHITECTURES["llama"]
    write_tensors(tmp_path, {name: one.array for name, one in push(model, row.names).items()}, shard_bytes=20_000)
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    np.testing.assert_array_equal(logits(models.load(tmp_path, "cpu")), logits(model))
    shards = {name: one.array for name, one in push(model, row.names).items()}
    index = read_object(tmp_path / "model.safetensors.index.json")
    with no_grad():
        model.norm.weight.mul_(2.0)
    model.generation = {"eos_token_id": [3]}
    models.save(model, tmp_path)  # one file over the shards of another model
    model.generation = {}
    found = models.load(tmp_path, "cpu")
    np.testing.assert_array_equal(logits(found), logits(model))
    assert found.generation == {"eos_token_id": [3]}
    with no_grad():
        model.norm.weight.mul_(2.0)
    write_tensors(tmp_path, shards, shard_bytes=20_000)  # and shards over one file
    np.testing.assert_array_equal(logits(models.load(tmp_path, "cpu")), logits(model))
    left = sorted(path.name for path in tmp_path.iterdir())
    replaced = []

    def killed(path, name):
        os.rename(path, name)
        if "-of-" in name.name and replaced.append(name) is None and len(replaced) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr("netcl.models.folder.os.replace", killed)
    with no_grad(), pytest.raises(KeyboardInterrupt):
        write_tensors(tmp_path, {name: lambda x=one.array: x() * 2 for name, one in push(model, row.names).items()}, shard_bytes=20_000)
    monkeypatch.undo()
    with pytest.raises(FileError, match=r"the folder must have model.safetensors or its index"):  # not shards of two models
        models.load(tmp_path, "cpu")
    assert {path.name for path in tmp_path.iterdir()} == {*left} - {"model.safetensors.index.json"}
    models.save(model, tmp_path)
    assert models.load(tmp_path, "cpu").generation == {}
    before = (tmp_path / "config.json").read_bytes()
    model.config.source["note"] = 1
    monkeypatch.setattr("netcl.models.folder.save_safetensors", killed)
    with pytest.raises(TypeError):
        models.save(model, tmp_path)
    assert (tmp_path / "config.json").read_bytes() == before  # the weights are still those of the model before
    (tmp_path / "model.safetensors").unlink()
    index["weight_map"]["model.norm.weight"] = "../outside.safetensors"
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(FileError, match=r"\[models\] weight_map must name safetensors files of the folder"):
        models.load(tmp_path, "cpu")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"model_type": "nonsense"}, r"\[models\] unknown model_type"),
        ({"hidden_size": 10**12}, r"\[config\] hidden_size must be a whole number"),
        ({"num_attention_heads": 5}, r"\[config\] heads must divide hidden_size"),
        ({"num_hidden_layers": 3}, r"the file must have exactly the tensors of its configuration.*missing=\[model\.layers\.2"),
        ({"num_hidden_layers": 1}, r"unexpected=\[model\.layers\.1"),
        ({"intermediate_size": 40}, r"a tensor must have the shape that the configuration gives it"),
        ({"hidden_act": "nonsense"}, r"\[config\] the activation must be one of silu"),
        ({"rope_parameters": {"rope_type": "nonsense"}}, r"\[config\] rope_type must be one of default"),
        ({"rope_parameters": {"rope_type": "longrope"}}, r"\[config\] settings of rope_type 'longrope' must be complete and valid"),
        ({"eos_token_id": ["2"]}, r"\[config\] eos_token_id must be an integer or a list of integers; given=\['2'\]"),
        ({"rms_norm_eps": -1.0}, r"\[config\] the epsilon of norms must be above 0"),
        ({"rope_scaling": [1], "rope_parameters": None}, r"\[config\] rope_scaling must be an object or null"),
        ({"rope_parameters": {"rope_type": "linear"}}, r"\[config\] rope_type 'linear' must have factor"),
        (
            {"rope_parameters": {**_LLAMA3, "low_freq_factor": 4.0, "high_freq_factor": 4.0}},
            r"\[config\] low_freq_factor must be below high",
        ),
        ({"rope_parameters": {"rope_type": "linear", "factor": -2.0}}, r"\[config\] factor must be above 0"),
        ({"tie_word_embeddings": True}, r"\[models\] a head tied to the embedding must equal it; .*tie_word_embeddings"),
        ({"rms_norm_eps": "a"}, r"\[config\] rms_norm_eps must be a finite number"),
    ],
)
@pytest.mark.fault("configuration of a language model that does not fit", "`config.json` with other sizes and kinds", "refused by name")
def test_a_configuration_that_does_not_fit_is_refused(change, expected, folder_of, tmp_path):
    shutil.copytree(folder_of("llama"), tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(FileError, match=expected) as caught:
        models.load(tmp_path, "cpu")
    assert str(tmp_path) in str(caught.value)


_LONG = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}


@pytest.mark.parametrize(
    ("config", "change", "expected"),
    [
        ({"model_type": "gpt2"}, {"scale_attn_by_inverse_layer_idx": True}, r"the model must have scale_attn_by_inverse_layer_idx=False"),
        ({"model_type": "gemma3_text"}, {"use_bidirectional_attention": True}, r"the model must have use_bidirectional_attention=False"),
        ({"model_type": "gemma2"}, {"use_bidirectional_attention": True}, r"the model must have use_bidirectional_attention=False"),
        ({"model_type": "gemma2"}, {"query_pre_attn_scalar": 0}, r"query_pre_attn_scalar must be above 0"),
        ({}, {"hidden_act": ["silu"]}, r"the activation must be one of"),
        ({}, {"rope_parameters": "linear"}, r"rope_parameters must be an object or null"),
        ({}, {"rope_parameters": {"full_attention": 4}}, r"rope_parameters must be an object or null"),
        ({"model_type": "qwen3_moe", **_EXPERTS}, {"mlp_only_layers": "0"}, r"mlp_only_layers must be a list"),
        ({}, {"is_causal": False}, r"the model must have is_causal=True"),
        ({}, {"partial_rotary_factor": 0.5}, r"partial_rotary_factor must be 1 except in phi3"),
        ({"model_type": "phi3"}, {"sliding_window": 0}, r"sliding_window must be a whole number from 1"),
        ({"model_type": "phi3", "rope_scaling": _LONG}, {"original_max_position_embeddings": 1}, r".* must be complete and valid"),
        ({"model_type": "mistral"}, _MIXED, r"all layer_types of MistralForCausalLM must be 'sliding_attention'"),
    ],
)  # fmt: skip
def test_configurations_that_are_not_supported_are_refused(config, change, expected):
    random_model(**config)
    with pytest.raises(ValueError, match=rf"\[config\] {expected}"):
        random_model(**config, **change)


def read(**config):
    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    return models.read_config({**sizes, **config})


@pytest.mark.parametrize(
    ("config", "defaults"),
    [
        ({"model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 1}, {"rope_theta": 1e6, "rms_norm_eps": 1e-5,
                                                                                      "max_position_embeddings": 131072}),
        ({"model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 1, "rope_parameters": {"rope_type": "default"}},
         {"rope_theta": 1e6}),
        ({"model_type": "gemma2"}, {"sliding_window": 4096, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
                                    "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 8192}),
        ({"model_type": "gemma2", "hidden_act": "relu"}, {"hidden_activation": "gelu_pytorch_tanh"}),
        ({"model_type": "gemma3_text"}, {"sliding_window": 4096, "rope_theta": 1e6, "rope_local_base_freq": 1e4, "head_dim": 256}),
        ({"model_type": "gemma3_text", "num_hidden_layers": 6, "rope_parameters": {"full_attention": {}, "sliding_attention": {}}},
         {"rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}}),
        ({"model_type": "gemma3_text"}, {"attn_logit_softcapping": 2.0}),  # unused, also there
        ({"model_type": "gpt2"}, {"layer_norm_eps": 0.5}),  # the same
        ({"model_type": "t5", "feed_forward_proj": "gated-relu", "d_model": 32, "num_layers": 2, "num_heads": 4},
         {"feed_forward_proj": "silu", "dense_act_fn": "relu", "is_gated_act": True}),
        ({"model_type": "mistral"}, {"sliding_window": 4096, "max_position_embeddings": 131072}),
        ({"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 1}, {"sliding_window": 4096}),
        ({"model_type": "qwen3"}, {"head_dim": 128, "max_position_embeddings": 32768}),
        ({"model_type": "phi3"}, {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096}),
        ({"model_type": "phi3", "max_position_embeddings": 8192, "rope_scaling": _LONG}, {"original_max_position_embeddings": 4096}),
        ({"model_type": "gpt2"}, {"activation_function": "gelu_new", "n_positions": 1024}),
        ({"model_type": "bert"}, {"hidden_act": "gelu", "max_position_embeddings": 512}),
        ({"model_type": "roberta"}, {"hidden_act": "gelu"}),
        ({"model_type": "vit"}, {"hidden_act": "gelu", "image_size": 224, "patch_size": 16, "pooler_act": "tanh"}),
        ({"model_type": "clip_vision_model"}, {"hidden_act": "quick_gelu", "image_size": 224, "patch_size": 32}),
        ({"model_type": "clip_text_model"}, {"hidden_act": "quick_gelu", "max_position_embeddings": 77}),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0}, "rope_theta": 3e5, "model_type": "llama"},
         {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 3e5}}),
    ],
)  # fmt: skip
def test_settings_left_out_are_those_of_transformers(config, defaults):
    short, whole = read(**config), read(**{**config, **defaults})
    assert whole == short
    for one, two in zip(short.ropes, whole.ropes, strict=True):
        if one is not None:
            lengths = (1, one.context + 1)
            assert all((one.frequencies(n) == two.frequencies(n)).all() for n in lengths) and one.attention_factor == two.attention_factor


def test_settings_of_rotary_positions_count_in_the_order_of_transformers():
    linear = {"rope_type": "linear", "factor": 4.0}
    both = read(model_type="llama", rope_parameters={"rope_theta": 5e4}, rope_scaling=linear, rope_theta=1e4).ropes[0]
    assert (both.kind, both.base) == ("linear", 1e4)
    inside, outside = ({"original_max_position_embeddings": n} for n in (64, 512))
    found = read(model_type="phi3", max_position_embeddings=2048, rope_scaling={**_LONG, **inside}, **outside)
    assert found.ropes[0].original == 512


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"model_type": "qwen2_moe", "max_window_layers": 3}, (3, None, 3, None)),
        ({"model_type": "qwen3_moe"}, (3, 3, 3, 3)),
        ({"model_type": "qwen3", "max_window_layers": 3}, (None, None, None, 3)),
        ({"model_type": "qwen3_moe", "use_sliding_window": False}, (None,) * 4),
    ],
)
def test_layers_with_windows_are_those_of_transformers(config, expected):
    assert read(**{"num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": 3, **_EXPERTS, **config}).windows == expected


@pytest.mark.parametrize(
    ("metadata", "windows", "rope"),
    [
        ({"phi3.attention.sliding_window": 0}, (None, None), ("default", 1.0)),
        ({"llama.rope.scale_linear": 4.0}, (None, None), ("linear", 4.0)),
        ({"llama.rope.scaling.factor": 2.0}, (None, None), ("linear", 2.0)),
        ({"gemma3.attention.sliding_window_pattern": 2, "gemma3.attention.sliding_window": 3}, (3, None), ("default", 1.0)),
    ],
)
def test_metadata_means_what_it_does_in_llama_cpp(metadata, windows, rope):
    arch = next(iter(metadata)).partition(".")[0]
    sizes = {"embedding_length": 32, "block_count": 2, "feed_forward_length": 48, "attention.head_count": 4, "context_length": 64}
    whole = {"general.architecture": arch, **{f"{arch}.{key}": size for key, size in sizes.items()}, **metadata}
    found = models.read_config(config_from_gguf(whole, {}, None))
    assert (found.windows, found.ropes[0].kind, found.ropes[0].factor) == (windows, *rope)
    with pytest.raises(FileError, match=r"\[config\] the model must have is_causal=True"):
        models.read_config(config_from_gguf({**whole, f"{arch}.attention.causal": False}, {}, None))


@pytest.mark.parametrize(
    ("scaling", "divisors"), [({}, [1.0, 2.0]), ({"type": "linear", "factor": 4.0}, [4.0, 8.0]), ({"type": "yarn"}, None)]
)
def test_factors_of_frequencies_multiply_the_scaling(scaling, divisors):
    sizes = {"embedding_length": 16, "block_count": 1, "feed_forward_length": 48, "attention.head_count": 4, "context_length": 64}
    whole = {"general.architecture": "llama", **{f"llama.{key}": size for key, size in sizes.items()}}
    whole |= {f"llama.rope.scaling.{key}": value for key, value in scaling.items()}
    given = whole, {"rope_freqs.weight": (2,)}, lambda _: np.array([1.0, 2.0], np.float32)
    if divisors is None:
        with pytest.raises(FileError, match=r"\[gguf\] rope_freqs.weight cannot be combined with .* 'yarn'"):
            config_from_gguf(*given)
        return
    (rope,) = models.read_config(config_from_gguf(*given)).ropes
    np.testing.assert_allclose(rope.frequencies(9), np.array([1.0, 0.01]) / divisors)
    assert rope.attention_factor == 1


def test_pooling_of_images_is_checked():
    with pytest.raises(FileError, match=r"\[config\] the model must have pooler_act='tanh'"):
        read(model_type="vit", pooler_act="relu")


def test_older_settings_of_clip_count(folder_of, tmp_path):
    shutil.copytree(folder_of("clip"), tmp_path / "clip")
    config = json.loads((tmp_path / "clip" / "config.json").read_text())
    config["text_config_dict"] = {"hidden_act": "relu"}
    (tmp_path / "clip" / "config.json").write_text(json.dumps(config))
    found = models.load(tmp_path / "clip", "cpu")
    assert (found.text.config.activation, found.vision.config.activation) == ("relu", "quick_gelu")


def test_the_original_context_of_phi3_survives_gguf(folder_of, tmp_path):
    """transformers reads it beside the settings of rotary positions, and takes 4096 if it is not there."""
    models.save(models.load(folder_of("phi3-long"), "cpu"), tmp_path / "phi3.gguf", "gguf")
    assert models.load(tmp_path / "phi3.gguf", "cpu").config.source["original_max_position_embeddings"] == 96


@pytest.mark.parametrize(
    ("config", "name", "change", "expected"),
    [
        (
            {"model_type": "phi3"},
            "model.layers.0.self_attn.qkv_proj.weight",
            lambda w: np.concatenate([w, w[:8]]),
            r"must have the rows.*104",
        ),
        ({"model_type": "gpt2"}, "transformer.h.1.attn.c_attn.weight", lambda w: w[:, :-1], r"must have the rows .* expected=96"),
        ({}, "model.layers.0.mlp.up_proj.weight", lambda w: w.astype(np.int8), r"weights must be floating-point numbers .*'I8'"),
    ],
)
def test_tensors_that_contradict_the_configuration_are_refused(config, name, change, expected, tmp_path):
    from netcl.io import load_safetensors
    from netcl.io.state import save_safetensors

    models.save(random_model(**config), tmp_path)
    tensors = load_safetensors(tmp_path / "model.safetensors")
    save_safetensors({**tensors, name: np.ascontiguousarray(change(tensors[name]))}, tmp_path / "model.safetensors")
    with pytest.raises(FileError, match=rf"\[models\] .*{expected}"):
        models.load(tmp_path, "cpu")


def test_weights_of_8_bits_are_refused_by_name(tmp_path):
    models.save(random_model(), tmp_path)
    path = tmp_path / "model.safetensors"
    size = int.from_bytes(path.read_bytes()[:8], "little")
    header, data = json.loads(path.read_bytes()[8 : size + 8]), path.read_bytes()[size + 8 :]
    header["model.norm.weight"] |= {"dtype": "F8_E4M3", "shape": [128]}  # the same bytes
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    with pytest.raises(FileError, match=r"weights must be floating-point numbers of 16 bits or more; .*'model.norm.weight': 'F8_E4M3'"):
        models.load(tmp_path, "cpu")


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_the_number_of_experts_is_that_of_the_configuration(kind, tmp_path):
    options = {"model_type": "mixtral", "intermediate_size": 32, "num_experts_per_tok": 1}
    for count in (1, 3):
        path = tmp_path / f"{count}.gguf"
        models.save(random_model(num_local_experts=count, **options), path, "gguf", kind=kind)
        models.load(path, "cpu")
    file = GGUFFile(path)
    tensors = {name: NewTensor(shape, kind_of(file.kinds[name]), lambda name=name: file.read(name)) for name, shape in file.shapes.items()}
    for layer in range(2):
        name = f"blk.{layer}.ffn_gate_inp.weight"
        tensors[name] = NewTensor((2, 32), kind_of("F32"), lambda name=name: file.read(name)[:2])
    write_gguf(path.with_name("2.gguf"), {**file.metadata, "llama.expert_count": 2}, tensors)
    with pytest.raises(FileError, match=r"\[models\] a tensor must have the experts that the configuration gives it; .*expected=2"):
        models.load(path.with_name("2.gguf"), "cpu")


@pytest.mark.fault("configuration that claims gigabytes", "2^30 tokens over a small file", "`MemoryError`, nothing is allocated")
def test_a_configuration_takes_no_more_memory_than_its_tensors(folder_of, tmp_path):
    shutil.copytree(folder_of("llama"), tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": 2**30}))
    with pytest.raises(MemoryError, match="the model must not be larger than max_bytes"):
        models.load(tmp_path, "cpu")


def test_older_spellings_of_a_configuration_mean_the_same(folder_of, tmp_path):
    shutil.copytree(folder_of("gemma3"), tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    rope = config.pop("rope_parameters")
    del config["layer_types"]
    older = {"rope_theta": rope["full_attention"]["rope_theta"], "rope_scaling": {"type": "linear", "factor": 8.0},
             "rope_local_base_freq": 10000.0, "sliding_window_pattern": 3}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps({**config, **older}))
    np.testing.assert_array_equal(logits(models.load(tmp_path, "cpu")), logits(models.load(folder_of("gemma3"), "cpu")))


def test_published_gpt2_files_have_no_prefix(folder_of, tmp_path):
    from netcl.io import load_safetensors, save_safetensors

    shutil.copy(folder_of("gpt2") / "config.json", tmp_path)
    tensors = load_safetensors(folder_of("gpt2") / "model.safetensors")
    causal = np.tril(np.ones((1, 1, 128, 128), np.float32))  # a buffer that older files carry
    short = {name.removeprefix("transformer."): value for name, value in tensors.items()}
    save_safetensors({**short, "h.0.attn.bias": causal}, tmp_path / "model.safetensors")
    np.testing.assert_array_equal(logits(models.load(tmp_path, "cpu")), logits(models.load(folder_of("gpt2"), "cpu")))


def test_older_llama_files_have_rotary_frequencies(folder_of, tmp_path):
    from netcl.io import load_safetensors, save_safetensors

    shutil.copy(folder_of("llama") / "config.json", tmp_path)
    more = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}
    save_safetensors({**load_safetensors(folder_of("llama") / "model.safetensors"), **more}, tmp_path / "model.safetensors")
    np.testing.assert_array_equal(logits(models.load(tmp_path, "cpu")), logits(models.load(folder_of("llama"), "cpu")))


def test_half_weights_and_the_limit_of_the_context(folder_of):
    model = models.load(folder_of("llama"), "cpu", dtype="float16", context=20)
    assert {parameter.dtype for parameter in model.parameters()} == {"float16"}
    np.testing.assert_allclose(logits(model), logits(models.load(folder_of("llama"), "cpu")), atol=0.05)
    assert len(model.generate([1] * 18, 64)) == 3
    with pytest.raises(ValueError, match="a prompt must have 1 to 20 tokens; tokens=21"):
        model.generate([1] * 21)


def test_what_a_file_holds_is_told(folder_of):
    told = models.describe_model(folder_of("mixtral"))
    assert told["architecture"] == "mixtral (MixtralForCausalLM)" and told["experts"] == "2 of 4 per token, width 48"
    assert told["layers"] == "2, width 32, 4 heads of 8, 2 for keys" and told["types"].startswith("F32 ")


def test_bfloat16_weights_of_folders_and_gguf_files(folder_of, tmp_path):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    from netcl.io import load_safetensors, save_safetensors

    config = json.loads((folder_of("gemma2") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "query_pre_attn_scalar": config["head_dim"]}))  # which GGUF fixes
    tensors = load_safetensors(folder_of("gemma2") / "model.safetensors")
    save_safetensors({name: value.astype(ml_dtypes.bfloat16) for name, value in tensors.items()}, tmp_path / "model.safetensors")
    model = models.load(tmp_path, "cpu")
    models.save(model, tmp_path / "a.gguf", "gguf", kind="BF16")
    np.testing.assert_allclose(logits(models.load(tmp_path / "a.gguf", "cpu")), logits(model), atol=1e-5)
    half = models.load(tmp_path, "cpu", dtype="bfloat16")
    np.testing.assert_allclose(logits(half), logits(model), atol=0.3)
    models.save(half, tmp_path / "again")
    assert load_safetensors(tmp_path / "again" / "model.safetensors")["model.norm.weight"].dtype == ml_dtypes.bfloat16


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q5_1"])
def test_quantized_files_hold_the_rounded_weights(kind, folder_of, tmp_path):
    from netcl.ops.quantized.formats import dequantize, quantize

    model = models.load(folder_of("gpt2"), "cpu")
    models.save(model, tmp_path / "a.gguf", "gguf", kind=kind)
    assert f"{kind} " in models.describe_model(tmp_path / "a.gguf")["types"]
    for (name, loaded), original in zip(
        models.load(tmp_path / "a.gguf", "cpu", "float32").named_parameters(), model.parameters(), strict=True
    ):
        expected = original.to_host()
        if expected.ndim == 2 and name != "embed_positions.weight":  # which stays F32, as vectors do
            expected = dequantize(quantize(expected, kind), kind, expected.shape)
        np.testing.assert_array_equal(loaded.to_host(), expected, err_msg=name)


@pytest.mark.fault("mutated language models", "seeded mutations of a GGUF file", "loaded, or refused in one line")
def test_mutated_model_files_load_or_are_refused(folder_of, rng, tmp_path, tried):
    """Bytes of a GGUF file changed at random: the model loads, or its file is refused in netcl's form."""
    models.save(models.load(folder_of("llama"), "cpu"), tmp_path / "a.gguf", "gguf")
    whole, path, refused = (tmp_path / "a.gguf").read_bytes(), tmp_path / "b.gguf", 0
    tried(60)
    for _ in range(60):
        content = bytearray(whole)
        for at in rng.integers(24, 1300, rng.integers(1, 4)):
            content[at] = rng.choice([0, 1, 0x7F, 0xFF, content[at] ^ (1 << int(rng.integers(0, 8)))])
        path.write_bytes(content)
        try:
            models.load(path, "cpu")
        except (FileError, MemoryError) as error:
            assert str(error).startswith("[")
            refused += 1
    assert refused > 20


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
@pytest.mark.parametrize("case", ["gpt2", "llama", "qwen3", "phi3-long"])
def test_quantized_matrices_stay_packed(case, kind, folder_of, tmp_path, device):
    """The logits are those of the dequantized file, within the rounding of int8 activations; saved again, nothing changes."""
    models.save(models.load(folder_of(case), "cpu"), tmp_path / "a.gguf", "gguf", kind=kind)
    packed, plain = (models.load(tmp_path / "a.gguf", device.queue, dtype) for dtype in (None, "float32"))
    layers = [layer for layer in packed.modules() if isinstance(layer, nn.QuantizedLinear)]
    assert len(layers) >= 4 and {layer.kind for layer in layers} <= {kind, "Q8_0", "Q6_K"}
    ids = Tensor.from_host(device.queue, np.array([[3, 14, 15, 9, 2, 6]], np.int64))
    with no_grad():
        got, want = (model(ids).to_host() for model in (packed, plain))
    assert np.abs(got - want).max() < 0.05 * np.abs(want).max()
    models.save(packed, tmp_path / "b.gguf", "gguf", kind=kind)
    again = models.load(tmp_path / "b.gguf", device.queue)
    with no_grad():
        np.testing.assert_allclose(again(ids).to_host(), got, rtol=1e-3, atol=1e-3)


@pytest.mark.filterwarnings("ignore:.*layers with shared weights.*stay unpacked")
def test_the_memory_table_counts_what_a_model_holds():
    spec = importlib.util.spec_from_file_location("docs_tables", Path(__file__).parents[2] / "tools" / "docs_tables.py")
    tables = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tables)
    for tied in (True, False):
        config = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
                  "num_key_value_heads": 2, "vocab_size": 32, "head_dim": 16, "max_position_embeddings": 32,
                  "tie_word_embeddings": tied}  # fmt: skip
        with netcl.device("cpu"):
            model = models.CausalLM(models.read_config(config)).half()
        for bits in (16, 8, 4):
            held = netcl.quantize(model, bits=bits) if bits < 16 else model
            tensors = {id(t): t.nbytes for t in (*held.parameters(), *held.buffers()) if t.ndim > 1 or t.dtype == "uint8"}
            assert sum(tensors.values()) == tables.model_bytes((64, 96, 2, 4, 2, 32, 16, tied), bits)[0]
            with netcl.device("cpu"):
                model = models.CausalLM(models.read_config(config)).half()
    cache = model.new_cache(32)
    with netcl.no_grad():
        model(np.zeros((1, 4), np.int64), cache)
    kept = sum(t.nbytes for name, t in cache.named_buffers() if name != "lengths")
    assert kept == 32 * tables.model_bytes((64, 96, 2, 4, 2, 32, 16, False), 16)[1]
