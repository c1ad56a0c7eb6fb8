"""Adapters: identity at the start, frozen bases, equality with peft, merging, packed bases."""

from __future__ import annotations

import json

import numpy as np
import pytest

import netcl
from netcl import models, nn, optim
from netcl.io import FileError
from netcl.models.adapters import adapters_of
from tests.models.conftest import GOLDEN, cases

safetensors = pytest.importorskip("safetensors.numpy")
ROWS = json.loads((GOLDEN / "adapters.json").read_text(encoding="utf-8"))
CONFIG = {"model_type": "llama", "vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
          "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}  # fmt: skip


@pytest.fixture(scope="module")
def expected():
    with np.load(GOLDEN / "adapters.npz") as file:
        return dict(file)


def small(seed=1, **changed):
    netcl.manual_seed(seed)
    return models.CausalLM(models.read_config({**CONFIG, **changed})).eval()


def written(case, folder):
    """The adapter of a golden case, as peft saved it."""
    row = ROWS[case]
    start = {key: row["lengths"].get(key, np.zeros(shape)) for key, shape in row["shapes"].items()}
    safetensors.save_file(cases.adapter_weights(start, 7), folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(row["config"]), encoding="utf-8")
    return folder


@pytest.mark.parametrize("case", ROWS)
def test_logits_are_those_of_peft(case, folder_of, expected, tmp_path):
    ids, model = expected["ids"], models.load(folder_of(ROWS[case]["model"]))
    plain = model(ids).to_host()
    models.load_adapter(model, written(case, tmp_path))
    np.testing.assert_allclose(model(ids).to_host(), expected[case], atol=1e-4)
    assert np.abs(plain - expected[case]).max() > 0.1
    again = tmp_path / "again"
    models.save_adapter(model, again)
    other = models.load_adapter(models.load(folder_of(ROWS[case]["model"])), again)
    np.testing.assert_allclose(other(ids).to_host(), expected[case], atol=1e-4)
    models.merge(model)
    assert not any(isinstance(layer, models.LoRALinear) for layer in model.modules())
    np.testing.assert_allclose(model(ids).to_host(), other(ids).to_host(), atol=1e-4)


@pytest.mark.parametrize("case", ["llama-lora", "llama-dora"])
def test_files_are_those_of_peft(case, folder_of, tmp_path):
    model = models.load_adapter(models.load(folder_of(ROWS[case]["model"])), written(case, tmp_path))
    models.save_adapter(model, tmp_path / "again")
    before, now = (safetensors.load_file(folder / "adapter_model.safetensors") for folder in (tmp_path, tmp_path / "again"))
    assert before.keys() == now.keys() and all((before[key] == now[key]).all() for key in before)
    config = json.loads((tmp_path / "again" / "adapter_config.json").read_text(encoding="utf-8"))
    same = (
        "peft_type",
        "task_type",
        "r",
        "lora_alpha",
        "use_dora",
        "use_rslora",
        "bias",
        "fan_in_fan_out",
        "rank_pattern",
        "alpha_pattern",
    )
    assert {name: config[name] for name in same} == {name: ROWS[case]["config"][name] for name in same}
    assert sorted(config["target_modules"]) == sorted(ROWS[case]["config"]["target_modules"])


def test_fused_layers_get_one_adapter_of_higher_rank(folder_of, tmp_path):
    model = models.lora(models.load(folder_of("phi3")), rank=2, targets=["q_proj", "v_proj", "o_proj"])
    models.save_adapter(model, tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text(encoding="utf-8"))
    tensors = safetensors.load_file(tmp_path / "adapter_model.safetensors")
    a, b = (tensors[f"base_model.model.model.layers.0.self_attn.qkv_proj.lora_{kind}.weight"] for kind in "AB")
    assert a.shape == (4, 32) and b.shape == (64, 4) and config["target_modules"] == ["o_proj", "qkv_proj"]
    ranks = {**dict.fromkeys([f"model.layers.{i}.self_attn.{name}" for i in (0, 1) for name in ("qkv_proj", "o_proj")], config["r"]),
             **config["rank_pattern"]}  # fmt: skip
    assert ranks == {f"model.layers.{i}.self_attn.{name}": rank for i in (0, 1) for name, rank in (("qkv_proj", 4), ("o_proj", 2))}


@pytest.mark.parametrize("dora", [False, True])
def test_adapters_begin_as_identity_and_only_they_change(device, dora):
    with netcl.device(device):
        model, ids = small(), np.arange(12).reshape(1, 12)
        before = model(ids).to_host()
        models.lora(model, rank=2, dora=dora)
        np.testing.assert_allclose(model(ids).to_host(), before, atol=1e-4 if dora else 0)
        frozen = {name: p.to_host().copy() for name, p in model.named_parameters() if not p.requires_grad}
        learned = [p for p in model.parameters() if p.requires_grad]
        assert all("lora_" not in name for name in frozen) and len(learned) == 2 * 7 * (3 if dora else 2)
        optimizer, kept = optim.AdamW(learned, lr=0.01), [p.to_host().copy() for p in learned]
        for _ in range(2):  # the first step leaves A as it is: B is zero
            optimizer.zero_grad()
            netcl.autograd.cross_entropy(model.train()(ids)[0], netcl.tensor(np.arange(12) * 7 % 96)).backward()
            optimizer.step()
        assert all((p.to_host() == frozen[name]).all() for name, p in model.named_parameters() if name in frozen)
        assert all((p.to_host() != old).any() for p, old in zip(learned, kept, strict=True))
        changed = model.eval()(ids).to_host()
        assert np.abs(changed - before).max() > 1e-3
        np.testing.assert_allclose(models.merge(model)(ids).to_host(), changed, atol=1e-4)
        assert all(p.requires_grad for p in model.parameters())


def test_checkpointing_gives_the_same_gradients():
    found = []
    for checkpointing in (False, True):
        model = models.lora(small(), rank=2, dropout=0.1)
        model.train().checkpointing = checkpointing
        netcl.manual_seed(5)
        netcl.autograd.cross_entropy(model(np.arange(12).reshape(1, 12))[0], netcl.tensor(np.arange(12))).backward()
        found.append({name: p.grad.to_host() for name, p in model.named_parameters() if p.requires_grad})
        assert all(p.grad is None for p in model.parameters() if not p.requires_grad)
    for name, gradient in found[0].items():
        np.testing.assert_allclose(found[1][name], gradient, atol=1e-6, err_msg=name)
    assert any(np.abs(gradient).max() > 1e-4 for gradient in found[0].values())


@pytest.mark.parametrize("extra", [{}, {"model_type": "mistral", "sliding_window": 3}, {
    "max_position_embeddings": 8, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}}, {
    "model_type": "gemma2", "sliding_window": 4, "head_dim": 8, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 5.0}])  # fmt: skip
def test_documents_in_a_block_do_not_see_each_other(extra):
    model, ids = small(**extra), np.random.default_rng(2).integers(0, 96, (1, 12))
    alone = np.concatenate([model(ids[:, :7]).to_host(), model(ids[:, 7:]).to_host()], axis=1)
    numbers, positions = np.array([[1] * 7 + [2] * 5]), np.array([[*range(7), *range(5)]])
    together = model(netcl.tensor(ids), positions=netcl.tensor(positions), documents=netcl.tensor(numbers)).to_host()
    np.testing.assert_allclose(together, alone, atol=2e-5)


def test_packed_base():
    model, ids = netcl.quantize(small(), bits=8, activations="float"), np.arange(12).reshape(1, 12)
    before = model(ids).to_host()
    models.lora(model, rank=2, dora=True)
    adapted = [layer for layer in model.modules() if isinstance(layer, models.LoRALinear)]
    assert all(isinstance(layer.base, nn.QuantizedLinear) for layer in adapted) and len(adapted) == 14
    np.testing.assert_allclose(model(ids).to_host(), before, atol=1e-4)
    for layer in adapted:
        layer.lora_B.write(np.full(layer.lora_B.shape, 0.01, np.float32))
    changed = model(ids).to_host()
    assert np.abs(changed - before).max() > 1e-3
    np.testing.assert_allclose(models.merge(model)(ids).to_host(), changed, atol=1e-4)


def test_patterns_of_alpha_are_regular_expressions(tmp_path):
    written("llama-lora", tmp_path)
    file = tmp_path / "adapter_config.json"
    config = {**ROWS["llama-lora"]["config"], "alpha_pattern": {r"^model\.layers\.1\..*": 64, "v_proj": 2}}
    file.write_text(json.dumps(config), encoding="utf-8")
    layers = adapters_of(models.load_adapter(small(), tmp_path))
    found = {path: layer.scale * layer.rank for path, layer in layers.items()}
    assert found == {path: 64 if "layers.1" in path else 2 if "v_proj" in path else config["lora_alpha"] for path in found}
    assert len(set(found.values())) == 3


@pytest.mark.parametrize("pattern", ["(.*)*x", "(a+)+b", r"(\\w|\\w)*!", ".*.*.*.*.*x"])
@pytest.mark.fault("adapter whose pattern takes hours to match", "repeated groups, many repetitions", "`FileError`")
def test_patterns_that_take_hours_are_refused(pattern, tmp_path):
    written("llama-lora", tmp_path)
    config = {**ROWS["llama-lora"]["config"], "alpha_pattern": {pattern: 2}}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(FileError, match="a pattern may repeat at most 3 times, and no group"):
        models.load_adapter(small(), tmp_path)


def test_adapted_heads_keep_a_copy_of_their_weights(tmp_path):
    model = models.lora(small(), rank=2, targets=["lm_head"])
    model.lm_head.lora_B.write(np.ones(model.lm_head.lora_B.shape, np.float32))
    models.save_adapter(model, tmp_path)
    path, name = tmp_path / "adapter_model.safetensors", "base_model.model.lm_head.base_layer.weight"
    tensors, weight = safetensors.load_file(path), small().lm_head.weight.to_host()
    safetensors.save_file({**tensors, name: weight}, path)  # as PEFT writes it
    again = models.load_adapter(small(), tmp_path)
    np.testing.assert_array_equal(again([[1, 2]]).to_host(), model([[1, 2]]).to_host())
    safetensors.save_file({**tensors, name: weight + 1}, path)
    with pytest.raises(FileError, match=r"\[load_adapter\] base_layer.weight must be the weight of the model's head"):
        models.load_adapter(small(), tmp_path)


def test_adapters_of_other_layers_and_missing_ones_are_refused(tmp_path):
    path = written("llama-lora", tmp_path) / "adapter_model.safetensors"
    tensors = safetensors.load_file(path)
    extra = {f"base_model.model.model.embed_tokens.lora_embedding_{key}": np.ones((2, 2), np.float32) for key in "AB"}
    for changed, named in ({**tensors, **extra}, "embed_tokens"), ({k: v for k, v in tensors.items() if "layers.1" not in k}, r"layers\.1"):
        safetensors.save_file(changed, path)
        with pytest.raises(FileError, match=rf"\[load_adapter\] the file must have an adapter for each target, .*{named}"):
            models.load_adapter(small(), tmp_path)


def test_refusals(tmp_path):
    with pytest.raises(ValueError, match=r"\[lora\] targets must be one or more of .*q_proj.*; targets="):
        models.lora(small(), targets=["query"])
    with pytest.raises(ValueError, match=r"targets=\['lm_head'\]"):
        models.lora(small(tie_word_embeddings=True), targets=["lm_head"])  # merging would change the embedding
    with pytest.raises(ValueError, match="documents cannot be given with a cache"):
        small()([[1, 2]], small().new_cache(), documents=netcl.tensor([[1, 2]]))
    with pytest.raises(ValueError, match="rank must be at least 1"):
        models.lora(small(), rank=0)
    with pytest.raises(ValueError, match="must not have adapters"):
        models.lora(models.lora(small()))
    with pytest.raises(ValueError, match="must have adapters"):
        models.save_adapter(small(), tmp_path)
    with pytest.raises(ValueError, match=r"\[save\] .*adapters.*merge"):
        models.save(models.lora(small()), tmp_path / "model")
    written("llama-lora", tmp_path)
    with pytest.raises(FileError, match=r"\[load_adapter\].*(each adapter must have A, B|must have the shapes)"):
        models.load_adapter(small(hidden_size=16), tmp_path)
    config = ROWS["llama-lora"]["config"]
    for name, value in {"peft_type": "IA3", "bias": "all", "modules_to_save": ["lm_head"], "lora_alpha": "x", "use_qalora": True,
                        "init_lora_weights": "pissa_niter_4", "alpha_pattern": {"(": 2}}.items():  # fmt: skip
        (tmp_path / "adapter_config.json").write_text(json.dumps({**config, name: value}), encoding="utf-8")
        with pytest.raises(FileError, match=name):
            models.load_adapter(small(), tmp_path)
