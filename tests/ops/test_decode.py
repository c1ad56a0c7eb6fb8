"""Linear layers of decoding steps: one launch against the ops one by one, alone and in whole models."""

from __future__ import annotations

import importlib
import math
import re
import sys

import numpy as np
import pytest

import netcl
from netcl import models, nn, ops
from netcl.autograd import no_grad
from netcl.core.device import CPUQueue, profile_of, queue_of
from netcl.core.errors import ShapeError
from netcl.core.kernel_selector import KernelConfig, KernelVariant, get_kernel_selector
from netcl.core.tensor import Tensor
from netcl.engine import launch
from netcl.ops.matmul import nvidia
from netcl.ops.quantized import chain, plans
from netcl.ops.quantized.formats import BLOCK_TYPES, dequantize, quantize
from netcl.ops.quantized.layout import pack_strips

decode = importlib.import_module("netcl.ops.decode")
PACKED = [name for name in BLOCK_TYPES if name != "F32"]
TIERS = {"quantized": {"tier": "strips", "SLICES": 4}, "matmul": {"tier": "gemv"}}


@pytest.fixture
def gpu(cl_device, unoptimized, monkeypatch):
    """The queue of a device that uses the kernels of GPUs, and the products that took one launch."""
    selector, queue = get_kernel_selector(), cl_device.queue
    if cl_device.profile.device_type == "cpu":
        monkeypatch.setattr(launch, "on_cpu_device", lambda queue: False)
        for op, extra in TIERS.items():
            selector.register(op, lambda shapes, profile: shapes[0][0] <= 8, KernelConfig(KernelVariant.MATMUL_REGISTER_TILED, extra=extra))
    taken, inside = [], decode._in_one_launch

    def noted(parts, x, *more):
        made = inside(parts, x, *more)
        if x.array is None:  # checks of kernels compute their reference on the NumPy backend
            taken.append(made)
        return made

    monkeypatch.setattr(decode, "_in_one_launch", noted)
    yield queue, taken
    if cl_device.profile.device_type == "cpu":
        for op in TIERS:
            selector._registered[op].pop(0)
        selector.clear_cache()


@pytest.fixture
def gpu_model(gpu, cl_device, monkeypatch):
    """``gpu``, for models with attention over a cache. CPUs use its work-groups only in these tests, small ones, which compile faster."""
    if cl_device.profile.device_type == "cpu":
        monkeypatch.setattr(sys.modules["netcl.ops.attention.cached"], "GROUP_ITEMS", (32, 32))
    if cl_device.profile.brand == "pocl" and int(re.findall(r"\d+", cl_device.profile.driver_version)[0]) >= 4:
        pytest.skip("PoCL 5.0 compiles the work-groups of cached_attention wrongly")
    return gpu


ACTIVATIONS = {
    "": np.asarray,
    "silu": lambda y: y / (1 + np.exp(-y)),
    "gelu": lambda y: 0.5 * y * (1 + np.vectorize(math.erf)(y / math.sqrt(2))),
    "gelu_tanh": lambda y: y / (1 + np.exp(-1.5957691216 * (y + 0.044715 * y**3))),
}


def reference(*arrays, norm, activation, eps=1e-5):
    x, weight, bias, gate, gate_bias, residual, norm_weight, norm_bias = (None if a is None else a.astype(np.float64) for a in arrays)
    if norm:
        x = x - (x.mean(-1, keepdims=True) if norm == "layer" else 0)
        x = x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * norm_weight + (0 if norm_bias is None else norm_bias)
    y = x @ weight.T + (0 if bias is None else bias)
    out = ACTIVATIONS[activation](y if gate is None else x @ gate.T + (0 if gate_bias is None else gate_bias))
    return out * (1 if gate is None else y) + (0 if residual is None else residual)


def compare(gpu, rng, tokens, rows, columns, kind="", dtype="float32", norm="", gated=False, biased=False, activation=""):
    queue, taken = gpu

    def made(*shape):
        return rng.standard_normal(shape, np.float32).astype(np.float16 if dtype == "float16" else np.float32)

    x, residual = made(tokens, columns), None if gated or activation else made(tokens, rows)
    stored, values = [], []
    for _ in range(1 + gated):
        w = made(rows, columns) * np.float16(columns**-0.5)
        blocks = quantize(w.astype(np.float32), kind) if kind else w
        stored.append(pack_strips(blocks, kind, w.shape) if kind else w)
        values.append(dequantize(blocks, kind, w.shape) if kind else w)
    biases = [made(rows) if biased else None for _ in range(1 + gated)]
    norms = [made(columns) if norm else None, made(columns) if norm == "layer" else None]
    weight, gate = (*stored, None)[:2]
    arrays = (x, weight, biases[0], gate, biases[1] if gated else None, residual, *norms)
    more = {"norm": norm, "activation": activation, "eps": 1e-5}
    options = {**more, **({"kind": kind, "rows": rows, "activations": "float"} if kind else {})}
    got = ops.decode_linear(*(None if a is None else Tensor.from_host(queue, a) for a in arrays), **options).to_host()
    exact = reference(x, values[0], biases[0], values[1] if gated else None, *arrays[4:], **more)
    assert np.abs(got - exact).max() <= (4e-3 if dtype == "float16" else 2e-5) * np.abs(exact).max()
    assert taken[-1] is not None


@pytest.mark.parametrize("kind", PACKED)
def test_every_kind_in_one_launch(kind, gpu, rng):
    compare(gpu, rng, 1, 37, 512, kind, norm="rms", gated=True, activation="silu")


@pytest.mark.parametrize("kind", ["", "Q8_0"])
def test_norms_gates_and_residuals(kind, gpu, rng):
    compare(gpu, rng, 1, 70, 96, kind, "float32", "rms", True, False, "silu")
    compare(gpu, rng, 8, 70, 96, kind, "float32", "layer", True, True, "gelu_tanh")
    compare(gpu, rng, 3, 67, 160, kind, "float32", "rms", biased=True)
    compare(gpu, rng, 4, 65, 96, kind, "float16", "layer", biased=True, activation="gelu")
    compare(gpu, rng, 1, 66, 96, kind, "float16", "rms", True, False, "silu")
    compare(gpu, rng, 2, 66, 96, kind, "float16")


def test_large_layers(gpu, rng):
    """More work-groups and deeper rows than a step of any loop."""
    compare(gpu, rng, 1, 2100, 1056, "Q4_0", norm="rms")
    compare(gpu, rng, 2, 1000, 2080, "Q8_0", norm="rms", gated=True, activation="silu")
    compare(gpu, rng, 1, 2304, 768, norm="layer", biased=True)
    compare(gpu, rng, 1, 300, 3072, biased=True)


def test_ops_one_by_one_where_no_kernel_takes_all(device, rng):
    """Many rows, and results with both an activation and a residual."""
    for tokens, norm in ((9, "rms"), (2, "layer")):
        arrays = [rng.standard_normal(shape, np.float32) for shape in ((tokens, 8), (3, 8), (3,), (3, 8), (3,), (tokens, 3), (8,), (8,))]
        arrays[-1] = arrays[-1] if norm == "layer" else None
        got = ops.decode_linear(*(None if a is None else Tensor.from_host(device.queue, a) for a in arrays), norm=norm, activation="silu")
        exact = reference(*arrays, norm=norm, activation="silu")
        np.testing.assert_allclose(got.to_host(), exact, rtol=1e-4, atol=1e-4)


CONFIGS = {
    "llama": {}, "qwen2": {}, "qwen3": {"head_dim": 32}, "gemma3_text": {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 16},
    "gpt2": {"n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 64, "activation_function": "gelu_new"},
}  # fmt: skip
COMMON = {"num_hidden_layers": 2, "vocab_size": 96, "max_position_embeddings": 64, "hidden_size": 128, "intermediate_size": 160,
          "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip


@pytest.mark.parametrize(("name", "kind"), [("llama", "Q4_0"), ("qwen2", "Q4_0"), ("qwen3", "Q4_0"), ("gemma3_text", ""), ("gpt2", "")])
def test_models_decode_the_same_with_few_launches(name, kind, gpu_model, rng):
    queue, taken = gpu_model
    config = models.read_config({"model_type": name, **(COMMON if name != "gpt2" else {"vocab_size": 96}), **CONFIGS[name]})
    model = models.CausalLM(config).eval()
    for parameter in model.parameters():
        scale = (0.1, 1.0) if parameter.ndim == 1 else (parameter.shape[-1] ** -0.5, 0.0)
        parameter.write(rng.standard_normal(parameter.shape, np.float32) * scale[0] + scale[1])
    if kind:
        with pytest.warns(UserWarning, match="kept unpacked") if config.tied else no_grad():
            netcl.quantize(model, kind=kind, activations="float")
    plain = model.to("cpu").generate([5, 17], 12)  # two tokens: the prompt and a step of two sequences share their programs
    merged = model.to(queue).merge_projections()
    assert merged.generate([5, 17], 12) == plain
    assert None not in taken and (taken or nvidia.capable(profile_of(queue)))  # whose blocks are launched whole
    assert merged.generate([[5, 17], [7]], 8)[0] == plain[:8]


@pytest.mark.parametrize(("kind", "tokens", "rows"), [("Q8_0", 1, 50), ("Q8_0", 4, 300), ("Q6_K", 2, 64)])
def test_wide_products_after_a_norm_are_those_of_numpy(kind, tokens, rows, cl_device, rng, monkeypatch):
    """On NVIDIA GPUs they are chains of one product, as the heads of large models are; elsewhere the ops run one by one."""
    monkeypatch.setattr(chain, "WIDE_PRODUCT", 0)
    monkeypatch.setattr(chain, "_BULK_WIDTH", 0)
    blocks = quantize(rng.normal(0, 0.1, (rows, 1024)).astype(np.float32), kind)
    x, norm, bias = (rng.standard_normal(shape, np.float32) for shape in ((1, tokens, 1024), (1024,), (rows,)))
    exact = x / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-5) * norm @ dequantize(blocks, kind, (rows, 1024)).T + bias
    given = (Tensor.from_host(cl_device.queue, a) for a in (x, pack_strips(blocks, kind, (rows, 1024)), bias, norm))
    x, weight, bias, norm = given
    y = ops.decode_linear(x, weight, bias, norm_weight=norm, norm="rms", kind=kind, rows=rows, activations="float")
    assert np.abs(y.to_host() - exact).max() <= 1e-5 * np.abs(exact).max()


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "F16"])
def test_blocks_of_one_token_make_the_input_of_the_next_product(kind, cl_device, rng):
    queue, (width, attended, inner, following) = cl_device.queue, (64, 96, 160, 50)
    shapes = ((width, attended), (inner, width), (inner, width), (width, inner), (following, width))
    blocks = [quantize(rng.normal(0, shape[1] ** -0.5, shape).astype(np.float32), kind) for shape in shapes]
    out, gate, up, down, after = (pack_strips(block, kind, shape) for block, shape in zip(blocks, shapes, strict=True))
    values = [dequantize(block, kind, shape).astype(np.float64) for block, shape in zip(blocks, shapes, strict=True)]
    inside, x = (rng.standard_normal((1, 1, n), np.float32) for n in (attended, width))
    norm, next_norm, bias = (rng.standard_normal(n, np.float32) for n in (width, width, following))
    operands = [Tensor.from_host(queue, a) for a in (inside, x, out, norm, gate, up, down, next_norm, after, bias)]
    few = decode.decodes_in_blocks(operands[1], kind, "auto")
    ops.decode_block(*operands, kind=kind, inner=inner, next_rows=following)  # the kernels are checked at their first use
    with netcl.profiling.profile() as seen:
        y, z = ops.decode_block(*operands, kind=kind, inner=inner, next_rows=following)
    rounds = plans.has_dots(queue, BLOCK_TYPES[kind]) and kind != "F16"
    taken = (lambda a: plans.round_activations(a.astype(np.float32))) if rounds else np.asarray

    def normed(a, weight):
        return a / np.sqrt((a * a).mean(-1, keepdims=True) + 1e-5) * weight

    h = x + taken(inside) @ values[0].T
    n = taken(normed(h, norm))
    exact = h + taken(ACTIVATIONS["silu"](n @ values[1].T) * (n @ values[2].T)) @ values[3].T
    np.testing.assert_allclose(y.to_host(), exact, rtol=2e-3, atol=2e-3)  # an activation between two codes may be rounded to either
    np.testing.assert_allclose(z.to_host(), taken(normed(exact, next_norm)) @ values[4].T + bias, rtol=2e-2, atol=2e-2)
    assert not (few and launch.on_cpu_device(queue)) or len(seen.events) == 1


def test_blocks_are_the_same_however_work_is_divided(cl_device, rng):
    """Work-items take parts of a product in turn: which one takes what differs from launch to launch."""
    queue, (width, attended, inner, following) = cl_device.queue, (256, 128, 512, 96)
    shapes = ((width, attended), (inner, width), (inner, width), (width, inner), (following, width))
    out, gate, up, down, after = (
        pack_strips(quantize(rng.normal(0, 0.1, shape).astype(np.float32), "Q8_0"), "Q8_0", shape) for shape in shapes
    )
    floats = [rng.standard_normal((1, n), np.float32) for n in (attended, width)] + [np.ones(width, np.float32)] * 2
    inside, x, norm, next_norm = (Tensor.from_host(queue, a) for a in floats)
    operands = (
        inside,
        x,
        *(Tensor.from_host(queue, a) for a in (out, norm.to_host(), gate, up, down)),
        next_norm,
        Tensor.from_host(queue, after),
    )
    results = [ops.decode_block(*operands, kind="Q8_0", inner=inner, next_rows=following) for _ in range(100)]
    first = [t.to_host() for t in results[0]]
    for later in results[1:]:
        for a, b in zip(first, later, strict=True):
            np.testing.assert_array_equal(a, b.to_host())


@pytest.mark.parametrize(
    ("kind", "lengths", "positions", "heads", "groups", "depth", "more"),
    [
        ("Q8_0", [600], 700, 4, 2, 64, {}),  # several ranges of a cache
        ("Q4_0", [0, 31, 1500], 1600, 12, 4, 32, {"window": 700}),
        ("Q4_K", [5, 200, 255], 256, 8, 8, 128, {"normed": True}),
        ("Q6_K", [3000], 3100, 16, 2, 64, {"biased": True, "rotary": 32}),
        ("Q5_1", [40], 64, 2, 2, 256, {"rotary": 0}),
        ("Q8_0", [70, 70, 9, 0, 1, 2, 3], 128, 8, 2, 64, {"dtype": "float16"}),
        ("Q8_0", [64], 64, 4, 4, 64, {}),  # a full cache: the new position is neither written nor seen
    ],
)
def test_layers_of_one_token_are_those_of_numpy(kind, lengths, positions, heads, groups, depth, more, cl_device, rng):
    dtype, rotary, batch, width, inner = more.get("dtype", "float32"), more.get("rotary", depth), len(lengths), 256, 512
    biased, normed, rows = more.get("biased", False), more.get("normed", False), (heads + 2 * groups) * depth
    shapes = ((rows, width), (width, heads * depth), (inner, width), (inner, width), (width, inner))
    layers = []
    for _ in range(2):
        projection, *products = (
            pack_strips(quantize(rng.normal(0, shape[1] ** -0.5, shape).astype(np.float32), kind), kind, shape) for shape in shapes
        )
        norms = [rng.normal(1, 0.1, n).astype(np.float32) for n in (width, width, *([depth, depth] if normed else []))]
        cache = [rng.standard_normal((batch, groups, positions, depth), np.float32) for _ in range(2)]
        bias = [rng.standard_normal(rows, np.float32)] if biased else []
        layers += [norms[0], projection, *bias, products[0], norms[1], *products[1:], *cache, *norms[2:]]
    x = rng.standard_normal((batch, 1, width), np.float32)
    frequencies = (100.0 ** -(np.arange(rotary // 2) / max(1, rotary // 2))).astype(np.float32)
    options = {"kind": kind, "inner": inner, "heads": heads, "count": 2, "activations": "float"}
    options["window"] = more.get("window", 0)

    def computed(queue, dtype):
        def made(a):
            return Tensor.from_host(queue, a, dtype if a.dtype == np.float32 else None)

        tensors = [made(a) for a in layers]
        turned = Tensor.from_host(queue, frequencies) if rotary else None
        seen = Tensor.from_host(queue, np.array(lengths, np.int32))
        y = ops.decode_layers(made(x), seen, turned, tensors, **options)
        return [t.to_host().astype(np.float64) for t in (y, *(t for t in tensors if t.ndim == 4))]

    if lengths == [positions]:
        with pytest.raises(ShapeError, match="must fit into the 64 positions of the cache"):
            computed(queue_of("cpu"), "float32")
        caches = [a for a in layers if a.ndim == 4]
        for got, before in zip(computed(cl_device.queue, dtype)[1:], caches, strict=True):
            np.testing.assert_array_equal(got, before)
        return
    bound = 2e-2 if dtype == "float16" else 2e-4
    for got, exact in zip(computed(cl_device.queue, dtype), computed(queue_of("cpu"), "float32"), strict=True):
        assert np.abs(got - exact).max() <= bound * np.abs(exact).max()


@pytest.mark.parametrize("kind", ["Q8_0", "F16"])
def test_merged_models_decode_the_same_on_every_device(kind, device, rng):
    model = models.CausalLM(models.read_config({"model_type": "llama", **COMMON})).eval()
    for parameter in model.parameters():
        scale = (0.1, 1.0) if parameter.ndim == 1 else (parameter.shape[-1] ** -0.5, 0.0)
        values = rng.standard_normal(parameter.shape, np.float32) * scale[0] + scale[1]
        parameter.write(values.astype(np.float16).astype(np.float32))
    if kind == "Q8_0":
        netcl.quantize(model, kind=kind)
    ids = rng.integers(0, 96, 12).tolist()
    model.to(device.queue)
    with no_grad():
        whole = model(Tensor.from_host(device.queue, np.array([ids]))).to_host()[0]
        model.merge_projections()
        cache = model.new_cache(16)
        steps = [model(Tensor.from_host(device.queue, np.array([[token]])), cache).to_host()[0, 0] for token in ids]
    row = model.norm.weight.reshape(1, -1)
    rounded = not isinstance(device.queue, CPUQueue) and plans.uses_tiles(row, plans.Packed(BLOCK_TYPES["F16"], 32, 64, 1, "float32"))
    assert np.abs(np.array(steps) - whole).max() < (0.1 if kind == "Q8_0" else 0.01 if rounded else 1e-4) * whole.std()
    packed = [layer for layer in model.modules() if isinstance(layer, nn.QuantizedLinear)]
    assert bool(packed) == (kind == "Q8_0" or decode.multiplies_halves(row))


@pytest.mark.parametrize(
    ("part", "shape", "error"),
    [
        (0, (63,), r"\[\w+\] .*weight"), (7, (2, 2, 71, 32), "keys"), (8, (1, 2, 70, 32), "values"),
        ("lengths", (3,), r"lengths must be one integer"), ("heads", 3, "weight must be 15232 bytes"),
    ],
)  # fmt: skip
def test_layers_of_wrong_shapes_raise(part, shape, error, device):
    sample = decode._decode_layers_sample(2, "Q8_0")
    x, lengths, frequencies, layers = sample.arrays()
    options = {**sample.kwargs, **({"heads": shape} if part == "heads" else {})}
    if part == "lengths":
        lengths = np.zeros(shape, np.int32)
    elif part != "heads":
        layers[9 + part] = np.ones(shape, np.float32)
    given = [Tensor.from_host(device.queue, a) for a in (x, lengths, frequencies)]
    with pytest.raises((ShapeError, ValueError), match=error):
        ops.decode_layers(*given, [Tensor.from_host(device.queue, a) for a in layers], **options)


@pytest.mark.parametrize("second", [{"kind": "Q4_0"}, {"kind": "Q8_0", "activations": "float"}])
def test_layers_of_a_model_may_have_different_kinds(second, device, rng):
    """A launch that computes parts of two layers takes one kind of weights."""
    model = models.CausalLM(models.read_config({"model_type": "llama", **COMMON})).eval()
    for parameter in model.parameters():
        scale = (0.1, 1.0) if parameter.ndim == 1 else (parameter.shape[-1] ** -0.5, 0.0)
        parameter.write(rng.standard_normal(parameter.shape, np.float32) * scale[0] + scale[1])
    netcl.quantize(model.layers[0], kind="Q8_0")
    netcl.quantize(model.layers[1], **second)
    plain = model.to(device.queue).generate([5, 17], 12)
    assert model.merge_projections().generate([5, 17], 12) == plain


def test_a_gpt_decodes_the_same(gpu_model, rng):
    queue, taken = gpu_model
    for options in ({}, {"norm": "rms", "mlp": "swiglu", "position": "rotary"}):
        model = nn.GPT(96, 64, 2, 4, 128, **options)
        plain = model.to("cpu").generate([[5, 17]], 12, temperature=0).to_host()
        assert np.array_equal(model.to(queue).generate([[5, 17]], 12, temperature=0).to_host(), plain)
        assert taken and None not in taken
        if not options:
            seen = []
            model.transformer["h"][0].mlp.register_forward_hook(lambda module, args, out, seen=seen: seen.append(out.shape))
            model.generate([[5, 17]], 12, temperature=0)  # as long as before: another length would build other programs
            assert len(seen) == 12  # hooks are called for the prompt and for every token


def test_hooks_inside_packed_models_are_called(gpu_model):
    model = netcl.quantize(models.CausalLM(models.read_config({"model_type": "llama", **COMMON})), kind="Q4_0", activations="float")
    model, seen = model.to(gpu_model[0]).eval().merge_projections(), []
    model.layers[1].mlp.down_proj.register_forward_hook(lambda module, args, out: seen.append(out.shape))
    model.generate([5, 17], 12)
    assert len(seen) == 12


class DoubledFeedForward(nn.FeedForward):
    """A layer of the user's."""

    def forward(self, x):
        return super().forward(x) * 2


class TripledAttention(nn.CausalSelfAttention):
    def forward(self, x, cache=None, layer=0):
        return super().forward(x, cache, layer) * 3


def test_layers_of_the_user_are_called(gpu_model, rng):
    """A derived class may compute something else than the layer it derives from."""
    queue, _ = gpu_model
    block = nn.TransformerBlock(128, 4).eval()
    block.attn, block.mlp = TripledAttention(128, 4), DoubledFeedForward(128)
    x, block = rng.standard_normal((1, 3, 128), np.float32), block.to("cpu").eval()
    with no_grad():
        whole, cache = block(Tensor.from_host(block.queue, x)).to_host(), nn.KVCache(1)
        block = block.to(queue)
        parts = [block(Tensor.from_host(queue, part), cache).to_host() for part in (x[:, :2], x[:, 2:])]
    np.testing.assert_allclose(np.concatenate(parts, 1), whole, rtol=1e-4, atol=1e-4)


def test_norms_of_heads_have_one_dtype(device):
    """The kernel reads both as values of one type."""
    q, keys, values = (Tensor.zeros(shape, queue=device.queue) for shape in ((1, 1, 16), (1, 1, 8, 4), (1, 1, 8, 4)))
    lengths = Tensor.zeros((1,), "int32", queue=device.queue)
    norms = [Tensor.ones((4,), dtype, queue=device.queue) for dtype in ("float32", "float16")]
    with pytest.raises(ShapeError, match=r"query_norm with key_norm \(shape \(4,\), one dtype\)"):
        ops.cached_attention(q, None, None, keys, values, lengths, None, None, None, *norms)
