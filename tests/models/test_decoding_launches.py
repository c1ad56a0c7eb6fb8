"""Decoding steps on GPUs join products; here the same code runs on the test device, as if its launches were what costs time."""

from __future__ import annotations

import numpy as np
import pytest

import netcl
from netcl import models
from netcl.autograd import packed
from netcl.core.tensor import Tensor
from netcl.ops import decode

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
         "vocab_size": 50, "max_position_embeddings": 64, "tie_word_embeddings": False}  # fmt: skip


@pytest.fixture
def launches_cost(monkeypatch):
    """Call it to make decoding steps join products."""

    def join() -> None:
        monkeypatch.setattr(decode, "launches_dominate", lambda queue: True)
        monkeypatch.setattr(packed, "launches_dominate", lambda queue: True)

    return join


def packed_model(family: str, queue) -> models.CausalLM:
    netcl.manual_seed(3)
    with netcl.device(queue):
        model = models.CausalLM(models.read_config({"model_type": family, **SIZES}))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.write(np.linspace(-1, 1, parameter.size, dtype=np.float32))
    return netcl.quantize(model, kind="Q8_0", activations="float").eval()


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_joined_products_give_the_same_logits(family, cl_device, launches_cost, monkeypatch):
    ids = np.random.default_rng(0).integers(0, 50, (1, 9))
    model = packed_model(family, cl_device)
    with netcl.no_grad():
        exact = model(Tensor.from_host(cl_device.queue, ids)).to_host()[0]
    launches_cost()
    model.merge_projections()
    called = []
    block = decode.decode_block
    monkeypatch.setattr(netcl.autograd, "decode_block", lambda *args, **options: called.append(options) or block(*args, **options))
    cache, found = model.new_cache(16), []
    with netcl.no_grad():
        found.append(model(Tensor.from_host(cl_device.queue, ids[:, :4]), cache).to_host()[0])
        found += [model(Tensor.from_host(cl_device.queue, ids[:, i : i + 1]), cache).to_host()[0] for i in range(4, 9)]
    np.testing.assert_allclose(np.concatenate(found), exact, rtol=0, atol=1e-4)
    assert len(called) >= 5 * SIZES["num_hidden_layers"] and called[-1]["next_rows"] == 0 < called[-2]["next_rows"]


def test_a_hook_of_a_layer_is_called_in_every_decoding_step(cl_device, launches_cost):
    model = packed_model("llama", cl_device)
    launches_cost()
    model.merge_projections()
    seen = []
    model.layers[1].mlp.down_proj.register_forward_hook(lambda module, inputs, output: seen.append(output.shape))
    assert len(model.generate([1, 2, 3], 4)) == 4
    assert len(seen) >= 4
