"""GPT: what it sees, the cache, how it chooses."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import netcl.autograd as ag
from netcl import nn, optim
from netcl.core.errors import DtypeError, ShapeError
from netcl.core.tensor import Tensor
from netcl.nn.decoding import Sampling
from netcl.ops import random

SMALL = {"vocab_size": 19, "block_size": 12, "n_layer": 2, "n_head": 2, "n_embd": 16}
KINDS = {
    "gpt2": {},
    "llama": {"position": "rotary", "norm": "rms", "mlp": "swiglu", "bias": False, "n_kv_head": 1, "tie_weights": False},
}


def make(kind: str = "gpt2", **changes) -> nn.GPT:
    random.manual_seed(11)
    model = nn.GPT(**{**SMALL, **KINDS[kind], **changes})
    for p in model.parameters():
        if p.ndim == 2:
            nn.init.normal_(p, std=0.4)  # far from ties
    return model


def tokens(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, SMALL["vocab_size"], shape)


@pytest.mark.parametrize("kind", KINDS)
def test_positions_do_not_see_what_follows(device, kind):
    model, x = make(kind).eval(), tokens(2, 8)
    changed = x.copy()
    changed[:, 5:] = (changed[:, 5:] + 1) % SMALL["vocab_size"]
    a, b = model(x).to_host(), model(changed).to_host()
    np.testing.assert_allclose(a[:, :5], b[:, :5], atol=1e-5)
    assert np.abs(a[:, 5:] - b[:, 5:]).max() > 1e-2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pieces", [(8,), (1,) * 8, (3, 1, 4), (5, 3)])
def test_a_cache_changes_nothing(device, kind, pieces):
    model, x = make(kind).eval(), tokens(2, 8)
    with ag.no_grad():
        whole = model(x).to_host()
        cache, found, start = model.new_cache(), [], 0
        for count in pieces:
            found.append(model(Tensor.from_host(device.queue, x[:, start : start + count]), cache).to_host())
            start += count
            assert cache.length == start
    np.testing.assert_allclose(np.concatenate(found, axis=1), whole, atol=2e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{"temperature": 0}, {"temperature": 0.8}, {"top_k": 3}, {"top_p": 0.7, "temperature": 1.3}])
def test_generation_is_the_same_with_and_without_a_cache(device, kind, options):
    model = make(kind)
    written = []
    for use_cache in (True, False):
        random.manual_seed(5)
        written.append(model.generate(tokens(2, 3), 20, use_cache=use_cache, **options).to_host())  # beyond block_size
    np.testing.assert_array_equal(*written)
    assert written[0].shape == (2, 23) and written[0].max() < SMALL["vocab_size"]
    np.testing.assert_array_equal(written[0][:, :3], tokens(2, 3))
    assert model.training


@pytest.mark.slow
def test_a_million_parameters_write_the_same_with_and_without_a_cache(device):
    random.manual_seed(2)
    model = nn.GPT(vocab_size=256, block_size=64, n_layer=5, n_head=4, n_embd=128)
    assert 0.9e6 < sum(p.size for p in model.parameters()) < 1.1e6
    start = np.frombuffer(b"To be, or not to be", np.uint8).astype(np.int64)
    written = []
    for use_cache in (True, False):
        random.manual_seed(7)
        written.append(model.generate(start, 50, temperature=0.9, top_k=40, top_p=0.95, use_cache=use_cache).to_host())  # beyond block_size
    np.testing.assert_array_equal(*written)


def test_generation_is_repeated_by_the_seed_and_ends_at_the_end(device):
    model = make()
    random.manual_seed(1)
    first = model.generate([3, 1], 8).to_host()
    random.manual_seed(1)
    np.testing.assert_array_equal(model.generate([3, 1], 8).to_host(), first)
    end = int(first[0, 4])
    random.manual_seed(1)
    ended = model.generate([3, 1], 8, eos_token=end).to_host()[0]
    assert ended[-1] == end and len(ended) <= 5
    with pytest.raises(ValueError, match=r"\[generate\] temperature must be at least 0"):
        model.generate([1], 1, temperature=-1)
    with pytest.raises(ShapeError, match=r"\[generate\] tokens must not be empty"):
        model.generate([[]], 1)


def test_choosing(queue):
    logits = np.log(np.array([[0.5, 0.05, 0.3, 0.15]], np.float32))

    def pick(drawn, rows=1, **options):
        given = Tensor.from_host(queue, np.repeat(logits, rows, 0)), Tensor.from_host(queue, np.full(rows, drawn, np.float32))
        return int(Sampling(**options).choose(*given).to_host()[0, 0])

    assert [pick(u) for u in (0.0, 0.49, 0.51, 0.79, 0.81, 0.94, 0.96)] == [0, 0, 2, 2, 3, 3, 1]
    assert [pick(0.999, top_k=k) for k in (1, 2, 3, 4, 9)] == [0, 2, 3, 1, 1]
    assert [pick(0.999, top_p=p) for p in (0.4, 0.6, 0.81, 0.99)] == [0, 2, 3, 1]
    assert pick(0.5, temperature=0) == 0 and pick(0.9, temperature=0.01) == 0
    assert pick(1 - 2**-24, top_k=2) == 2
    drawn = np.random.default_rng(0).random(4000, np.float32)
    many = Sampling().choose(Tensor.from_host(queue, np.repeat(logits, 4000, 0)), Tensor.from_host(queue, drawn)).to_host()[:, 0]
    np.testing.assert_allclose(np.bincount(many) / 4000, np.exp(logits[0]), atol=0.03)


def test_weights_are_tied(device):
    model = make()
    assert model.lm_head.weight is model.transformer["wte"].weight
    assert [n for n in model.state_dict() if "wte" in n or "lm_head" in n] == ["transformer.wte.weight", "lm_head.weight"]
    loss = model.loss(tokens(2, 4), tokens(2, 4))
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())
    assert loss.shape == ()


@pytest.mark.parametrize(("parts", "dtype"), [((20,), None), ((20,), "int8"), ((4,), None), ((10, 10), None)])
def test_gradients_through_a_cache_are_right_or_refused(parts, dtype, device):
    x = Tensor.from_host(device.queue, np.random.default_rng(0).standard_normal((1, 2, 20, 4), np.float32)).requires_grad_()
    cache, begin, plain = nn.KVCache(1, dtype=dtype), 0, x.detach().requires_grad_()
    for count in parts:
        out = cache(0, *[ag.narrow(x, 2, begin, count)] * 3)
        begin += count
    if (parts, dtype) != ((20,), None):
        with pytest.raises(RuntimeError, match=r"\[KVCache\] attention over a cache has no gradient; train without a cache"):
            ag.sum(out).backward()
        return
    ag.sum(ag.mul(out, out)).backward()
    whole = ag.scaled_dot_product_attention(plain, plain, plain, is_causal=True)
    ag.sum(ag.mul(whole, whole)).backward()
    np.testing.assert_allclose(x.grad.to_host(), plain.grad.to_host(), rtol=1e-4, atol=1e-5)


def test_the_cache(device):
    """Growing, forgetting, and sequences of unlike lengths: the attention is that over each sequence by itself."""
    rng = np.random.default_rng(0)
    q, k, v = (Tensor.from_host(device.queue, rng.standard_normal((2, n, 90, 4), np.float32)) for n in (4, 2, 2))
    want = ag.scaled_dot_product_attention(q, k, v, is_causal=True).to_host()

    def attended(cache, begin, end, layers=(0, 1)):
        parts = [ag.narrow(x, 2, begin, end - begin) for x in (q, k, v)]
        return [cache(layer, *parts).to_host() for layer in layers]

    cache = nn.KVCache(2)
    assert cache.length == 0
    for begin, end in ((0, 20), (20, 21), (21, 80), (80, 83)):
        for got in attended(cache, begin, end):
            np.testing.assert_allclose(got, want[:, :, begin:end], rtol=2e-5, atol=2e-6)
        assert cache.length == end
    cache.truncate(30)
    np.testing.assert_allclose(attended(cache, 30, 31)[1], want[:, :, 30:31], rtol=2e-5, atol=2e-6)
    cache.reset()
    attended(cache, 0, 12)
    cache.set_lengths([12, 7])
    got = [attended(cache, at, at + 1)[0] for at in (12, 7)]  # the second call writes behind the first
    np.testing.assert_allclose(got[0][0], want[0, :, 12:13], rtol=2e-5, atol=2e-6)
    cache.set_lengths([12, 7])
    part = [ag.cat([ag.narrow(ag.narrow(x, 0, row, 1), 2, at, 10) for row, at in ((0, 12), (1, 7))], axis=0) for x in (q, k, v)]
    got = cache(0, *part).to_host()  # ten positions, from another place in each sequence
    for row, at in ((0, 12), (1, 7)):
        np.testing.assert_allclose(got[row], want[row, :, at : at + 10], rtol=2e-5, atol=2e-6)
    cache.truncate(0)
    with pytest.raises(ShapeError, match=r"\[KVCache\] the batch size (and number of heads )?must be th(at|ose) of the cache"):
        cache(0, *(ag.narrow(ag.narrow(x, 0, 0, 1), 2, 0, 3) for x in (q, k, v)))
    small = nn.KVCache(2, capacity=5)
    with pytest.raises(ShapeError, match=r"\[KVCache\] positions must not exceed the capacity; capacity=5, length=0, new=6"):
        attended(small, 0, 6)


def test_a_cache_of_int8(device):
    """Within the rounding of int8, and the same whether positions come one by one or together."""
    rng = np.random.default_rng(1)
    q, k, v = (Tensor.from_host(device.queue, rng.standard_normal((2, n, 40, 6), np.float32)) for n in (4, 2, 2))
    want = ag.scaled_dot_product_attention(q, k, v, is_causal=True).to_host()

    def attended(cache, *ends):
        begins, found = (0, *ends[:-1]), []
        for begin, end in zip(begins, ends, strict=True):
            found.append(cache(0, *(ag.narrow(x, 2, begin, end - begin) for x in (q, k, v))).to_host())
        return np.concatenate(found, axis=2)

    caches = [nn.KVCache(1, dtype="int8") for _ in range(2)]
    pieces = attended(caches[0], 12, 13, 30, 33, 40), attended(caches[1], *range(1, 41))
    for got in pieces:
        np.testing.assert_allclose(got, want, atol=0.03)
        assert np.abs(got - want).max() > 1e-5  # it is rounded
    for name, memory in caches[0].named_buffers():
        other = getattr(caches[1], name)
        assert memory.dtype == other.dtype == ("int32" if name == "lengths" else "float32" if "scales" in name else "int8")
        np.testing.assert_allclose(memory.to_host().astype(float), other.to_host(), rtol=1e-6, atol=1.0 if memory.dtype == "int8" else 0)
    with pytest.raises(DtypeError, match=r'\[KVCache\] dtype must be "int8", or None for the dtype of the model; dtype=int4'):
        nn.KVCache(1, dtype="int4")


def test_a_cache_of_int8_keeps_nan(device):
    cache, x = nn.KVCache(1, 8, dtype="int8"), Tensor.from_host(device.queue, np.ones((1, 2, 1, 8), np.float32))
    bad = np.ones((1, 2, 1, 8), np.float32)
    bad[0, 0, 0, 3] = np.nan
    cache(0, x, x, Tensor.from_host(device.queue, bad))
    found = np.isnan(cache(0, x, x, x).to_host())
    assert found[0, 0].all() and not found[0, 1].any()


@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_of_int8_in_a_model(device, kind):
    model, x = make(kind).eval(), tokens(2, 11)
    with ag.no_grad():
        whole, results = model(x).to_host(), []
        for ends in ((9, 10, 11), (11,), (1, 4, 11)):
            cache, calls = model.new_cache(dtype="int8"), zip((0, *ends), ends, strict=False)
            got = [model(Tensor.from_host(device.queue, x[:, a:b]), cache).to_host() for a, b in calls]
            results.append(np.concatenate(got, axis=1))
    np.testing.assert_allclose(results[0], whole, atol=0.06 * np.abs(whole).max())  # every position is rounded, also for its own call
    for other in results[1:]:
        np.testing.assert_allclose(other, results[0], rtol=1e-3, atol=1e-4)


def test_what_is_too_long_is_told(device):
    with pytest.raises(
        ShapeError, match=r"\[GPT\] tokens must be \(batch, positions\) with at most 12 positions, .*; shape=\(1, 13\), in_cache=0"
    ):
        make()(tokens(1, 13))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_million_parameters_learn_a_text(device):
    random.manual_seed(3)
    text = np.frombuffer((Path(__file__).parent.parent.parent / "LICENSE").read_bytes(), np.uint8).astype(np.int64)  # which stays
    model = nn.GPT(vocab_size=256, block_size=64, n_layer=5, n_head=4, n_embd=128)
    steps = optim.AdamW(model.parameters(), lr=2e-3)
    rng, losses = np.random.default_rng(0), []
    for _ in range(25):
        starts = rng.integers(0, len(text) - 33, 4)
        windows = np.stack([text[start : start + 33] for start in starts])
        steps.zero_grad()
        loss = model.loss(windows[:, :-1], windows[:, 1:])
        loss.backward()
        steps.step(max_norm=1.0)
        losses.append(loss.item())
    assert losses[0] > 5 and np.mean(losses[-5:]) < 3.8
