"""Products with packed weights: every kind on every device against float64, gradients, layers, and what is saved."""

import warnings

import numpy as np
import pytest

import netcl
import netcl.autograd as ag
from netcl import nn, ops
from netcl.core.device import manager
from netcl.core.errors import DeviceError, DtypeError, ShapeError
from netcl.core.kernels import program
from netcl.core.tensor import Tensor
from netcl.engine import algorithms
from netcl.io import load_model, save_model
from netcl.ops.matmul import nvidia
from netcl.ops.quantized import plans
from netcl.ops.quantized.formats import BLOCK_TYPES, dequantize, packed_shape, quantize
from netcl.ops.quantized.layout import device_bytes, pack_strips, unpack_strips

PACKED = [name for name in BLOCK_TYPES if name != "F32"]


def weights(rng, kind, rows, columns):
    """Packed weights as bytes, and their values in float64."""
    blocks = quantize(rng.standard_normal((rows, columns), np.float32), kind)
    return pack_strips(blocks, kind, (rows, columns)), dequantize(blocks, kind, (rows, columns)).astype(np.float64)


def far(got, exact):
    return np.abs(got - exact).max() / np.abs(exact).max()


def rounds_to_halves(handle, x):
    """Whether a device rounds x to float16 before it multiplies it by weights of F16."""
    row = plans.Packed(BLOCK_TYPES["F16"], 32, 64, len(x), "float32")
    return plans.uses_tiles(Tensor.from_host(handle.queue, x), row)


@pytest.mark.parametrize("kind", PACKED)
def test_strips_hold_every_bit(kind, rng):
    for rows in (5, 16, 35):
        blocks = rng.integers(0, 256, packed_shape((rows, 512), kind), dtype=np.uint8)
        packed = pack_strips(blocks, kind, (rows, 512))
        assert packed.size == device_bytes(BLOCK_TYPES[kind], (rows, 512))
        assert np.array_equal(unpack_strips(packed, kind, (rows, 512)), blocks)


@pytest.mark.parametrize("kind", PACKED)
def test_every_kind_on_every_device(kind, device, rng):
    packed, values = weights(rng, kind, 21, 256)
    weight = Tensor.from_host(device.queue, packed)
    x = rng.standard_normal((1, 256), np.float32)
    got = ops.quantized_linear(Tensor.from_host(device.queue, x), weight, kind=kind, rows=21, activations="float").to_host()
    assert far(got, x.astype(np.float64) @ values.T) < 2e-6
    for dtype in ("float32", "float16"):  # in float16, a work-item of NVIDIA GPUs unpacks two rows
        rows = ops.quantized_rows(weight, kind=kind, shape=(21, 256), dtype=dtype).to_host()
        assert np.array_equal(rows, values.astype(dtype))


@pytest.mark.parametrize(("kind", "tokens"), [("Q4_0", 2), ("Q4_0", 9), ("Q4_0", 33), ("Q8_0", 5), ("Q4_K", 3), ("F16", 7), ("Q6_K", 33)])
def test_batches_and_odd_rows(kind, tokens, device, rng):
    packed, values = weights(rng, kind, 37, 256)
    x, bias = rng.standard_normal((tokens, 256), np.float32), rng.standard_normal(37, np.float32)
    operands = (Tensor.from_host(device.queue, array) for array in (x, packed, bias))
    got = ops.quantized_linear(*operands, kind=kind, rows=37, activations="float").to_host()
    assert far(got, x.astype(np.float64) @ values.T + bias) < 2e-6


@pytest.mark.parametrize(("rows", "columns", "tokens"), [(650, 1024, 1), (641, 1280, 3), (1283, 256, 8)])
def test_warps_share_neighboring_strips(rows, columns, tokens, cl_device, rng, monkeypatch):
    if not nvidia.capable(cl_device.profile):
        pytest.skip("the device has no matrix units that netcl uses")
    monkeypatch.setattr(plans, "_MMA_RESIDENT", 8)  # few work-groups, as for large weights
    monkeypatch.setattr(plans, "_SEVERAL_FROM", -20)
    packed, values = weights(rng, "Q4_K", rows, columns)
    x, bias = (rng.standard_normal(shape, np.float32).astype(np.float16) for shape in ((tokens, columns), (rows,)))
    operands = (Tensor.from_host(cl_device.queue, array) for array in (x, packed, bias))
    got = ops.quantized_linear(*operands, kind="Q4_K", rows=rows).to_host()
    assert far(got.astype(np.float64), x.astype(np.float64) @ values.T + bias) < 1e-3


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "Q4_K", "Q6_K"])
def test_int8_activations_are_multiplied_exactly(kind, cl_device, rng):
    if not plans.has_dots(cl_device.queue, BLOCK_TYPES[kind]):
        pytest.skip("the device has no dot products of int8")
    packed, values = weights(rng, kind, 37, 512)
    for tokens in (1, 11):
        x = rng.standard_normal((tokens, 512), np.float32)
        x[0, :32] = 0
        operands = [Tensor.from_host(cl_device.queue, array) for array in (x, packed)]
        chosen, auto = (ops.quantized_linear(*operands, kind=kind, rows=37, activations=how).to_host() for how in ("int8", "auto"))
        assert far(chosen, plans.round_activations(x) @ values.T) < 2e-6
        assert np.array_equal(chosen, auto)
        assert far(chosen, x.astype(np.float64) @ values.T) < 2e-2


@pytest.mark.parametrize(("kind", "tokens", "columns"), [("Q4_0", 300, 64), ("Q8_0", 9, 2080), ("Q4_0", 1, 2080)])
def test_int8_activations_of_many_tokens_and_columns(kind, tokens, columns, cl_device, rng):
    if not plans.has_dots(cl_device.queue, BLOCK_TYPES[kind]):
        pytest.skip("the device has no dot products of int8")
    packed, values = weights(rng, kind, 50, columns)
    x, bias = rng.standard_normal((tokens, columns), np.float32), rng.standard_normal(50, np.float32)
    operands = (Tensor.from_host(cl_device.queue, array) for array in (x, packed, bias))
    got = ops.quantized_linear(*operands, kind=kind, rows=50, activations="int8").to_host()
    assert far(got, plans.round_activations(x) @ values.T + bias) < 2e-6


@pytest.mark.parametrize("tokens", [1, 3, 9])
def test_numbers_that_are_not_finite_are_not_lost(tokens, cl_device, rng):
    values = rng.standard_normal((32, 64), np.float32)
    values[3, 40], values[12, 5], values[30, 63] = np.inf, -np.inf, np.nan
    x = rng.uniform(1, 2, (tokens, 64)).astype(np.float32)
    packed = pack_strips(quantize(values, "F16"), "F16", values.shape)
    got = ops.quantized_linear(*(Tensor.from_host(cl_device.queue, a) for a in (x, packed)), kind="F16", rows=32).to_host()
    fine = [row for row in range(32) if row not in (3, 12, 30)]
    assert far(got[:, fine], x.astype(np.float64) @ values[fine].astype(np.float16).T) < (
        2**-10 if rounds_to_halves(cl_device, x) else 2e-6
    )
    if nvidia.capable(cl_device.profile):  # matrix units add infinities of both signs: x is the sum of two halves
        assert not np.isfinite(got[:, (3, 12, 30)]).any()
    else:
        assert (got[:, 3] == np.inf).all() and (got[:, 12] == -np.inf).all() and np.isnan(got[:, 30]).all()
    packed, _ = weights(rng, "Q8_0", 32, 64)
    for odd in (np.inf, np.nan):
        x[0, 7] = odd
        got = ops.quantized_linear(*(Tensor.from_host(cl_device.queue, a) for a in (x, packed)), kind="Q8_0", rows=32).to_host()
        assert not np.isfinite(got[0]).any() and np.isfinite(got[1:]).all()


@pytest.mark.parametrize("tokens", [1, 8])
def test_every_half_is_a_weight(tokens, cl_device):
    values = np.zeros((1 << 16, 32), np.uint16)
    values[:, 5] = np.arange(1 << 16)
    packed = Tensor.from_host(cl_device.queue, pack_strips(values.view(np.uint8), "F16", values.shape))
    x = np.zeros((tokens, 32), np.float32)
    x[:, 5] = 1
    got = ops.quantized_linear(Tensor.from_host(cl_device.queue, x), packed, kind="F16", rows=1 << 16, activations="float").to_host()
    with np.errstate(invalid="ignore"):  # signaling NaNs
        expected = values.view(np.float16)[:, 5].astype(np.float32)
    if nvidia.capable(cl_device.profile):  # x is the sum of two halves: 0 times infinity
        got, expected = (np.where(np.isfinite(array), array, np.nan) for array in (got, expected))
    np.testing.assert_array_equal(got, np.broadcast_to(expected, got.shape))
    rows = ops.quantized_rows(packed, kind="F16", shape=values.shape).to_host()
    np.testing.assert_array_equal(rows[:, 5], values.view(np.float16)[:, 5])


@pytest.mark.parametrize("size", [2.0**-100, 2.0**-20, 2.0**60, 2.0**110])
@pytest.mark.parametrize("activations", ["auto", "float"])
def test_halves_times_activations_of_every_size(size, activations, cl_device, rng):
    values = rng.standard_normal((32, 64), np.float32) * 2.0 ** rng.integers(-20, 2, (32, 1)).astype(np.float32)
    x = (rng.standard_normal((1, 64)) * size).astype(np.float32)
    packed = pack_strips(quantize(values, "F16"), "F16", values.shape)
    operands = (Tensor.from_host(cl_device.queue, a) for a in (x, packed))
    got = ops.quantized_linear(*operands, kind="F16", rows=32, activations=activations).to_host()
    exact = x.astype(np.float64) @ values.astype(np.float16).astype(np.float64).T
    relative, smallest = (2**-9, 2**-25) if activations == "auto" and rounds_to_halves(cl_device, x) else (2e-6, 0.0)
    most = np.abs(x.astype(np.float64)) @ np.abs(values.astype(np.float64)).T
    assert (np.abs(got - exact) <= relative * most + smallest * 64 * np.abs(x).max().astype(np.float64)).all()


def test_sums_of_halves_that_overflow_are_computed_with_floats(cl_device, rng):
    values = rng.uniform(3e4, 6e4, (40, 64)).astype(np.float32)
    values[::2] *= -1
    values[5] = 0.25
    x = rng.uniform(0.5, 2, (1, 64)).astype(np.float32)
    packed = pack_strips(quantize(values, "F16"), "F16", values.shape)
    got = ops.quantized_linear(*(Tensor.from_host(cl_device.queue, a) for a in (x, packed)), kind="F16", rows=40).to_host()
    exact = x.astype(np.float64) @ values.astype(np.float16).astype(np.float64).T
    np.testing.assert_allclose(got, exact, rtol=2**-10)


def test_int8_activations_on_numpy_are_those_of_devices(rng):
    packed, values = weights(rng, "Q4_0", 5, 64)
    x = rng.standard_normal((3, 64), np.float32)
    queue = manager.default("cpu").queue
    got = ops.quantized_linear(*(Tensor.from_host(queue, a) for a in (x, packed)), kind="Q4_0", rows=5, activations="int8").to_host()
    assert far(got, plans.round_activations(x) @ values.T) < 1e-6


def test_devices_do_not_round_float64_to_int8(cl_device, rng):
    if not cl_device.profile.has_fp64:
        pytest.skip("the device has no float64")
    packed, _ = weights(rng, "Q4_0", 5, 64)
    operands = [Tensor.from_host(cl_device.queue, rng.standard_normal((2, 64)), "float64"), Tensor.from_host(cl_device.queue, packed)]
    with pytest.raises(DtypeError, match=r"int8 activations require x of float32, .*; dtype=float64; use x\.float\(\) or activations="):
        ops.quantized_linear(*operands, kind="Q4_0", rows=5, activations="int8")
    plain, auto = (ops.quantized_linear(*operands, kind="Q4_0", rows=5, activations=how).to_host() for how in ("float", "auto"))
    assert plain.dtype == np.float64 and np.array_equal(plain, auto)


def test_devices_without_dot_products_refuse_int8(cl_device, rng, monkeypatch):
    monkeypatch.setattr(plans, "_cpu_instructions", lambda: 0)
    packed, _ = weights(rng, "Q4_0", 5, 96)
    operands = [Tensor.from_host(cl_device.queue, a) for a in (np.ones((2, 96), np.float32), packed)]
    with pytest.raises(DeviceError, match=r'int8 activations require a CPU with dot products of int8; device=.*; use activations="auto"'):
        ops.quantized_linear(*operands, kind="Q4_0", rows=5, activations="int8")


@pytest.mark.parametrize("algorithm", algorithms.ALGORITHMS["quantized"], ids=lambda a: a.name)
def test_samples_of_every_algorithm(algorithm, cl_device, rng):
    """The kernels of GPUs run on CPUs too, by their configurations."""
    packed, values = weights(rng, "Q4_0", 37, 512)
    x = rng.standard_normal((3, 512), np.float32)
    queue = cl_device.queue
    for config in algorithm.samples:
        out = Tensor.empty((3, 37), queue=queue)
        t = plans.PackedOperands(*(Tensor.from_host(queue, a) for a in (x, packed)), None, out)
        plans.run_packed(queue, plans.Packed(BLOCK_TYPES["Q4_0"], 37, 512, 3, "float32"), t, config)
        assert far(out.to_host(), x.astype(np.float64) @ values.T) < (2e-2 if algorithm.name == "dot" else 2e-6)


def test_a_wrong_result_of_matrix_units_is_reported(cl_device, monkeypatch):
    monkeypatch.setattr(plans, "_packed_product_right", lambda *asked: False)
    program.state(cl_device.queue).pop(("quantized", "mma", "Q5_1"), None)
    with pytest.warns(UserWarning, match=r"the kernels mma cannot be used for Q5_1: a wrong result, or .*portable kernels are used"):
        assert not plans._kernels_trusted(cl_device.queue, "mma", BLOCK_TYPES["Q5_1"])
    program.state(cl_device.queue).pop(("quantized", "mma", "Q5_1"))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_halves_in_and_out(dtype, device, rng):
    packed, values = weights(rng, "Q4_0", 20, 64)
    for tokens in (1, 33):
        x = Tensor.from_host(device.queue, rng.standard_normal((tokens, 64), np.float32), dtype)
        got = ops.quantized_linear(x, Tensor.from_host(device.queue, packed), kind="Q4_0", rows=20, activations="float")
        assert got.dtype == dtype
        exact = np.asarray(x.to_host(), np.float64) @ values.T
        assert far(np.asarray(got.to_host(), np.float64), exact) < (2e-3 if dtype == "float16" else 2e-2)


def test_gradients_in_pieces(device, rng, monkeypatch):
    """Forward and backward unpack some rows at a time; what remains at the end is fewer."""
    monkeypatch.setattr(plans, "_SCRATCH", 4 * 96 * 4)
    packed, values = weights(rng, "Q4_1", 37, 96)
    x = Tensor.from_host(device.queue, rng.standard_normal((2, 10, 96), np.float32), requires_grad=True)
    bias = Tensor.from_host(device.queue, rng.standard_normal(37, np.float32), requires_grad=True)
    g = rng.standard_normal((2, 10, 37), np.float32)
    y = ag.quantized_linear(x, Tensor.from_host(device.queue, packed), bias, kind="Q4_1", rows=37)
    if not (device.backend == "cl" and plans.has_dots(device.queue, BLOCK_TYPES["Q4_1"])):
        assert far(y.to_host(), x.to_host().astype(np.float64) @ values.T + bias.to_host()) < 2e-6
    ag.sum(ag.mul(y, Tensor.from_host(device.queue, g))).backward()
    assert far(x.grad.to_host(), g.astype(np.float64) @ values) < 2e-6
    assert np.allclose(bias.grad.to_host(), g.sum((0, 1)), atol=1e-5)


def test_layers_save_load_and_move(device, rng, tmp_path):
    linear = nn.Linear(64, 20, device=device)
    layer = nn.QuantizedLinear.from_linear(linear, "Q8_0", "float")
    x = Tensor.from_host(device.queue, rng.standard_normal((2, 64), np.float32))
    assert far(layer(x).to_host(), linear(x).to_host()) < 0.02
    assert [name for name, _ in layer.named_parameters()] == ["bias"] and set(layer.state_dict()) == {"bias", "kind", "weight"}
    blocks = quantize(linear.weight.to_host(), "Q8_0")
    assert np.array_equal(layer.blocks(), blocks)
    assert np.array_equal(layer.dequantized().to_host(), dequantize(blocks, "Q8_0", (20, 64)))
    again = nn.QuantizedLinear(64, 20, kind="Q8_0", activations="float").load_blocks(blocks.tobytes())
    again.load_state_dict({"bias": layer.bias.to_host()}, strict=False)
    assert np.allclose(again.to(device)(x).to_host(), layer(x).to_host())
    model = nn.Sequential(layer, nn.ReLU())
    save_model(model, tmp_path / "model.netcl")
    loaded = load_model(tmp_path / "model.netcl", device="cpu")
    assert loaded[0].kind == "Q8_0" and np.allclose(loaded(x.to_host()).to_host(), model(x).to_host(), atol=1e-5)


@pytest.mark.parametrize(("kind", "other"), [("Q4_0", "IQ4_NL"), ("F16", "BF16")])
def test_state_dicts_of_another_kind_are_refused(kind, other):
    state = nn.QuantizedLinear(256, 8, kind=kind).state_dict()
    layer = nn.QuantizedLinear(256, 8, kind=other)
    assert layer.weight.shape == state["weight"].shape
    with pytest.raises(ValueError, match=r"\[load_state_dict\] kind must be that of the layer's block type"):
        layer.load_state_dict(state)
    nn.QuantizedLinear(256, 8, kind=kind).load_state_dict({name: value.to_host() for name, value in state.items()})


def test_quantize_replaces_layers(device, rng):
    model = nn.Sequential(nn.Embedding(10, 64), nn.Linear(64, 64), nn.ReLU(), nn.Sequential(nn.Linear(64, 8, bias=False))).to(device)
    index = Tensor.from_host(device.queue, np.array([[1, 9, 0]]))
    before = model(index).to_host()
    assert netcl.quantize(model, bits=8, embeddings=True, activations="float") is model
    kinds = [type(module).__name__ for module in model.modules()]
    assert kinds == ["Sequential", "QuantizedEmbedding", "QuantizedLinear", "ReLU", "Sequential", "QuantizedLinear"]
    assert model[1].kind == "Q8_0" and far(model(index).to_host(), before) < 0.05
    assert netcl.quantize(nn.Sequential(nn.Linear(256, 2)), kind="q4_k")[0].kind == "Q4_K"


def test_quantize_names_the_layers_it_keeps():
    shared = nn.Linear(32, 32)
    twice = nn.Sequential(nn.Linear(20, 32), shared, nn.Linear(32, 32))
    twice[2].weight = shared.weight
    with pytest.warns(UserWarning, match=r"\[quantize\] layers with shared weights or partial blocks stay unpacked: 0, 1, 2; kind=Q4_0"):
        netcl.quantize(twice)
    same = nn.Sequential(shared, nn.ReLU(), shared)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        netcl.quantize(same)
    assert same[0] is same[2]
    with pytest.raises(ValueError, match=r"\[quantize\] bits must be 4 or 8 and group 32; bits=3, group=32; or name a block type"):
        netcl.quantize(same, bits=3)
    with pytest.raises(DtypeError, match=r"kind must be one of F32, F16, .*; kind='Q4'"):
        netcl.quantize(same, kind="Q4")
    with pytest.raises(ShapeError, match=r"\[QuantizedLinear\] the columns of Q4_K must be a multiple of 256"):
        nn.QuantizedLinear(64, 2, kind="Q4_K")


def test_an_index_out_of_range_gives_nan(cl_device, rng):
    layer = nn.QuantizedEmbedding(5, 32, device=cl_device)
    found = layer(Tensor.from_host(cl_device.queue, np.array([4, 5, -1]))).to_host()
    assert not found[0].any() and np.isnan(found[1:]).all()
