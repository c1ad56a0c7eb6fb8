"""Block types of GGUF: bit-equal to the reference of the gguf package, and what the searched kinds lose."""

import numpy as np
import pytest

from netcl.core.errors import DtypeError, ShapeError
from netcl.ops.quantized import formats
from netcl.ops.quantized.formats import BLOCK_TYPES, TYPE_NAMES, dequantize, packed_shape, quantize

LOSS = {
    "F32": 0, "F16": 5e-4, "BF16": 4e-3, "Q8_0": 0.007, "Q6_K": 0.03, "Q5_0": 0.07, "Q5_1": 0.06, "Q5_K": 0.05, "Q4_0": 0.14, "Q4_1": 0.12,
    "Q4_K": 0.1, "IQ4_NL": 0.1, "IQ4_XS": 0.1, "Q3_K": 0.21, "Q2_K": 0.33,
}  # fmt: skip
QUANTIZED = [name for name, kind in BLOCK_TYPES.items() if not kind.plain]


def random_blocks(rng, kind, count):
    """Blocks of random bytes with sane scales: every bit pattern of codes and group scales."""
    blocks, at = rng.integers(0, 256, (count, kind.nbytes), dtype=np.uint8), 0
    for name, size in kind.fields.items():
        if name in ("d", "m") or kind.plain:
            values = (rng.standard_normal((count, 1)) * 0.01).astype(np.float32)
            blocks[:, at : at + size] = (values if size == 4 else values.astype(np.float16)).view(np.uint8)
        at += size
    return blocks


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_dequantize_is_bit_equal_to_gguf(name, rng):
    gguf = pytest.importorskip("gguf")
    kind = BLOCK_TYPES[name]
    row = kind.block * 3
    blocks = random_blocks(rng, kind, 5 * 3).reshape(5, -1)
    reference = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[name])
    assert np.array_equal(dequantize(blocks, name, (5, row)).view(np.uint32), reference.view(np.uint32))
    assert np.array_equal(dequantize(blocks.tobytes(), name.lower(), (5, row)), reference)


@pytest.mark.parametrize("name", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_quantize_is_equal_to_gguf(name, rng):
    gguf = pytest.importorskip("gguf")
    x = rng.standard_normal((7, 96)).astype(np.float32)
    x[2, :32], x[3, 32:64], x[4, :4] = 0, 1.5, [127.5, -127.5, 0.5, -0.5]
    reference = gguf.quants.quantize(x, gguf.GGMLQuantizationType[name])
    assert np.array_equal(quantize(x, name), reference.view(np.uint8))


def test_sizes_and_numbers_are_those_of_gguf():
    gguf = pytest.importorskip("gguf")
    for number, name in TYPE_NAMES.items():
        assert gguf.GGMLQuantizationType(number).name == name
        assert gguf.GGML_QUANT_SIZES[number] == (BLOCK_TYPES[name].block, BLOCK_TYPES[name].nbytes)


@pytest.mark.parametrize("name", QUANTIZED)
def test_parts_of_any_block_join_to_the_same_bytes(name, rng):
    blocks = rng.integers(0, 256, (9, BLOCK_TYPES[name].nbytes), dtype=np.uint8)
    assert np.array_equal(formats.join_blocks(formats.split_blocks(blocks, BLOCK_TYPES[name]), BLOCK_TYPES[name]), blocks)


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_loss_of_a_round_trip(name, rng):
    x = (rng.standard_normal((16, 512)) * 0.05).astype(np.float32)
    back = dequantize(quantize(x, name), name, x.shape)
    assert np.sqrt(np.mean((back - x) ** 2)) <= LOSS[name] * x.std()


@pytest.mark.parametrize("name", QUANTIZED)
def test_zeros_and_constants_survive(name):
    x = np.zeros((2, 256), np.float32)
    assert not dequantize(quantize(x, name), name, x.shape).any()
    constant = dequantize(quantize(x + 3, name), name, x.shape)
    assert np.allclose(constant, 3, rtol=0.02)


def test_large_arrays_are_converted_in_pieces(rng, monkeypatch):
    x = rng.standard_normal((8, 512)).astype(np.float32)
    whole = quantize(x, "Q4_K")
    monkeypatch.setattr(formats, "_PIECE", 512)
    assert np.array_equal(quantize(x, "Q4_K"), whole)
    assert np.array_equal(dequantize(whole, "Q4_K", x.shape)[3:], dequantize(whole[3:], "Q4_K", (5, 512)))


def test_errors():
    with pytest.raises(DtypeError, match=r"\[dequantize\] kind must be one of F32, F16, .*; kind='Q9_9'"):
        dequantize(b"", "Q9_9", (1, 32))
    with pytest.raises(
        ShapeError, match=r"\[quantize\] the last axis must be a multiple of 256, the weights in a block of Q4_K; shape=\(2, 64\)"
    ):
        quantize(np.zeros((2, 64), np.float32), "Q4_K")
    with pytest.raises(ShapeError, match=r"\[dequantize\] blocks must have 36 bytes for this shape; kind=Q4_0, shape=\(2, 32\), bytes=35"):
        dequantize(bytes(35), "Q4_0", (2, 32))
    with pytest.raises(DtypeError, match=r"\[quantize\] the array must have a floating-point dtype; dtype=int64"):
        quantize(np.zeros((2, 32), np.int64), "Q4_0")
    with pytest.raises(ValueError, match=r"\[quantize\] values must be finite"):
        quantize(np.full((1, 32), np.nan, np.float32), "Q4_0")
    with pytest.raises(ValueError, match=r"\[quantize\] the scale of every block must fit float16; largest=1e\+30"):
        quantize(np.full((1, 32), 1e30, np.float32), "Q8_0")
    assert packed_shape((2, 3, 512), "q6_k") == (2, 3, 420)
