"""Attention against its definition in NumPy: masks of every kind, with and without weights, shapes and layouts."""

from __future__ import annotations

import numpy as np
import pytest

import netcl.autograd as ag
from netcl import nn
from netcl.core.tensor import Tensor

N, L, S, E, H = 2, 5, 7, 12, 3


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def by_definition(layer: nn.MultiheadAttention, q, k, v, added=0.0) -> tuple[np.ndarray, np.ndarray]:
    """Batch-first; ``added`` broadcasts to (batch, heads, queries, keys)."""
    w, b = np.split(layer.in_proj_weight.to_host(), 3), np.split(layer.in_proj_bias.to_host(), 3)
    q, k, v = (x @ wi.T + bi for x, wi, bi in zip((q, k, v), w, b, strict=True))
    q, k, v = (x.reshape(*x.shape[:2], H, E // H).transpose(0, 2, 1, 3) for x in (q, k, v))
    weights = softmax(q @ k.transpose(0, 1, 3, 2) / np.sqrt(E // H) + added)
    out = (weights @ v).transpose(0, 2, 1, 3).reshape(len(q), -1, E)
    return out @ layer.out_proj.weight.to_host().T + layer.out_proj.bias.to_host(), weights


@pytest.fixture
def inputs(rng):
    return [rng.standard_normal((N, n, E)).astype(np.float32) for n in (L, S, S)]


def masks(rng, need_weights: bool) -> dict[str, tuple[dict, np.ndarray | float]]:
    """Arguments, and what they add to the scores."""
    bad = rng.random((L, S)) < 0.4
    bad[:, 0] = False
    padding = np.arange(S) >= np.array([[S], [4]])
    numbers = rng.standard_normal((L, S)).astype(np.float32)
    per_head = rng.standard_normal((N * H, L, S)).astype(np.float32)
    later = ~np.tril(np.ones((L, S), bool))
    minus = lambda mask: np.where(mask, -np.inf, 0.0)  # noqa: E731
    return {
        "none": ({}, 0.0),
        "bool": ({"attn_mask": bad}, minus(bad)),
        "numbers": ({"attn_mask": numbers}, numbers),
        "per_head": ({"attn_mask": per_head}, per_head.reshape(N, H, L, S)),
        "padding": ({"key_padding_mask": padding}, minus(padding)[:, None, None]),
        "both": ({"attn_mask": bad, "key_padding_mask": padding}, minus(bad) + minus(padding)[:, None, None]),
        "causal": ({"is_causal": True}, minus(later)),
        "causal_padding": ({"is_causal": True, "key_padding_mask": padding}, minus(later) + minus(padding)[:, None, None]),
        "causal_numbers": ({"is_causal": True, "attn_mask": numbers}, numbers if need_weights else minus(later)),  # as in torch
        "causal_all": (
            {"is_causal": True, "attn_mask": numbers, "key_padding_mask": padding},
            numbers + minus(padding)[:, None, None],
        ),
        "causal_twice": ({"is_causal": True, "attn_mask": later}, minus(later)),
    }


KINDS = "none bool numbers per_head padding both causal causal_padding causal_numbers causal_all causal_twice".split()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("need_weights", [True, False])
def test_masks(device, inputs, rng, kind, need_weights):
    layer = nn.MultiheadAttention(E, H, batch_first=True)
    arguments, added = masks(rng, need_weights)[kind]
    want, weights = by_definition(layer, *inputs, added)
    tensors = [Tensor.from_host(device.queue, x) for x in inputs]
    out, got = layer(*tensors, need_weights=need_weights, average_attn_weights=False, **arguments)
    np.testing.assert_allclose(out.to_host(), want, atol=2e-5)
    if need_weights:
        np.testing.assert_allclose(got.to_host(), weights, atol=1e-5)
    else:
        assert got is None


def test_layouts_agree(device, inputs):
    first, last = nn.MultiheadAttention(E, H, batch_first=True), nn.MultiheadAttention(E, H)
    last.load_state_dict(first.state_dict())
    a, weights = first(*inputs)
    b, same = last(*[x.swapaxes(0, 1).copy() for x in inputs])
    np.testing.assert_allclose(a.to_host(), b.to_host().swapaxes(0, 1), atol=1e-6)
    np.testing.assert_allclose(weights.to_host(), same.to_host(), atol=1e-6)
    np.testing.assert_allclose(weights.to_host().sum(-1), 1, atol=1e-5)
    single, averaged = first(*[x[0] for x in inputs])
    np.testing.assert_allclose(single.to_host(), a.to_host()[0], atol=1e-5)
    assert averaged.shape == (L, S)


def test_self_attention_by_one_projection_is_the_same(device, inputs):
    layer = nn.MultiheadAttention(E, H, batch_first=True)
    x = Tensor.from_host(device.queue, inputs[1])
    together, _ = layer(x, x, x, need_weights=False)
    apart, _ = layer(x, x.clone(), x.clone(), need_weights=False)
    np.testing.assert_allclose(together.to_host(), apart.to_host(), atol=1e-5)


def test_attention_dropout_only_in_training(device, inputs):
    layer = nn.MultiheadAttention(E, H, dropout=0.5, batch_first=True)
    runs = [layer(*inputs, need_weights=flag)[0].to_host() for flag in (True, True, False, False)]
    assert (runs[0] != runs[1]).any() and (runs[2] != runs[3]).any()
    assert (layer(*inputs)[1] == 0).any().item()  # the weights are those after dropout
    layer.eval()
    np.testing.assert_allclose(layer(*inputs, need_weights=False)[0].to_host(), by_definition(layer, *inputs)[0], atol=2e-5)


def test_rotary_attention_depends_on_distances_only(device, rng):
    layer = nn.RotaryAttention(16, 2, n_kv_head=1).eval()
    x = rng.standard_normal((1, 6, 16)).astype(np.float32)
    q, k = (nn.attention.split_heads(p(x), h) for p, h in ((layer.q_proj, 2), (layer.k_proj, 1)))
    scores = [ag.matmul(ag.rope(q, offset=n), ag.rope(k, offset=n), transpose_b=True).to_host() for n in (0, 11)]
    np.testing.assert_allclose(scores[0], scores[1], atol=1e-4)
    assert layer(x).shape == (1, 6, 16)


def test_stacks_copy_the_weights_of_a_layer():
    layer = nn.TransformerEncoderLayer(4, 2, 8)
    layer.linear1.bias.data.fill_(3.0)
    stack = nn.TransformerEncoder(layer, 2)
    assert all(copied.linear1.bias.tolist() == [3.0] * 8 and copied.linear1.bias is not layer.linear1.bias for copied in stack.layers)


def test_the_encoder_is_causal_when_told(device, rng):
    layer = nn.TransformerEncoderLayer(E, H, 16, dropout=0.0, batch_first=True).eval()
    x = rng.standard_normal((N, L, E)).astype(np.float32)
    changed = x.copy()
    changed[:, -1] += 1
    for arguments in ({"is_causal": True}, {"src_mask": ~np.tril(np.ones((L, L), bool))}):
        a, b = layer(x, **arguments).to_host(), layer(changed, **arguments).to_host()
        np.testing.assert_allclose(a[:, :-1], b[:, :-1], atol=1e-5)
        assert np.abs(a[:, -1] - b[:, -1]).max() > 1e-3
