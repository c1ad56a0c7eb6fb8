"""How convolutions are laid out for matrix units; what their kernels compute is held in test_conv.py, on devices that have them."""

from __future__ import annotations

import dataclasses

import pytest

from netcl.core.kernel_selector import KernelConfig, KernelVariant, Problem
from netcl.engine.algorithms import ALGORITHMS
from netcl.ops.conv import mma
from netcl.ops.conv.convolution import FORWARD, INPUT_GRAD, WEIGHT_GRAD, Convolution
from netcl.ops.conv.geometry import geometry

UNITS = 132
POLICY = KernelConfig(KernelVariant.CONV2D_IMPLICIT_GEMM, extra={"why": "policy"})
NAMED = KernelConfig(KernelVariant.CONV2D_IMPLICIT_GEMM, extra={"form": "mma", "BM": 64, "BN": 256, "splits": 5})


def conv(kind, n, c, size, filters, kernel=3, stride=1, groups=1, dtype="bfloat16"):
    g = geometry("conv2d", (n, c, size, size), (filters, c // groups, kernel, kernel), stride, kernel // 2, 1, groups)
    return Convolution(kind, g, dtype)


def work_groups(j, tile, splits):
    columns = j.g.taps * mma.chunks(j) * mma.CHUNK if j.kind == WEIGHT_GRAD else j.pixels
    return -(-j.filters // tile.m) * -(-columns // tile.n) * j.g.groups * j.classes * splits


@pytest.mark.parametrize("tile", mma.CONV_MMA_TILES, ids=lambda tile: f"{tile.m}x{tile.n}")
def test_tiles_are_whole_warps_within_local_memory(tile):
    assert tile.warp_m % 16 == tile.warp_n % 32 == 0 and tile.items in (128, 256)
    assert tile.m % tile.warp_m == tile.n % tile.warp_n == 0
    assert tile.m * tile.step % tile.items == tile.n * tile.step % tile.items == 0, "every work-item copies as many chunks"
    assert tile.stages * (tile.m + tile.n) * tile.step * 16 <= 48 * 1024


@pytest.mark.parametrize("kind", [FORWARD, INPUT_GRAD, WEIGHT_GRAD])
@pytest.mark.parametrize("layer", [(64, 32), (128, 16), (256, 8), (512, 4)])
def test_layers_of_a_residual_network_occupy_every_unit(kind, layer):
    channels, size = layer
    j = conv(kind, 128, channels, size, channels)
    tile, splits = mma.tile_of(j, POLICY, UNITS)
    assert work_groups(j, tile, splits) >= UNITS
    assert tile.m <= max(64, channels), "no tile is half empty"


def test_a_configuration_names_tile_and_parts():
    tile, splits = mma.tile_of(conv(WEIGHT_GRAD, 8, 64, 8, 64), NAMED, UNITS)
    assert (tile.m, tile.n, splits) == (64, 256, 5)


@pytest.mark.parametrize(("channels", "whole", "run"), [(3, 1, 1), (8, 1, 1), (32, 4, 4), (64, 8, 4), (72, 9, 9), (20, 3, 3)])
def test_chunks_of_a_pixel(channels, whole, run):
    assert mma.chunks(conv(FORWARD, 1, channels, 8, 16)) == whole and mma.chunk_run(whole, 4) == run


def test_the_gathered_side_of_an_input_gradient_is_that_of_the_filters():
    assert mma.chunks(conv(INPUT_GRAD, 1, 3, 8, 64)) == 8


def test_where_it_pays():
    assert mma.pays(conv(FORWARD, 128, 3, 32, 64)) and mma.pays(conv(WEIGHT_GRAD, 128, 64, 32, 64))
    assert not mma.pays(conv(FORWARD, 1, 16, 8, 16)), "launches take longer"
    assert not mma.pays(conv(FORWARD, 64, 256, 32, 256, groups=256)), "one filter in a tile of 64"


def test_nothing_and_too_much_do_not_fit():
    assert mma.fits(conv(FORWARD, 1, 1, 1, 1, kernel=1)) and not mma.fits(conv(WEIGHT_GRAD, 0, 64, 8, 64))
    assert not mma.fits(conv(FORWARD, 1 << 16, 64, 32, 64)) and not mma.fits(conv(FORWARD, 1, 8, 40, 8, kernel=17))


def test_other_devices_and_dtypes_keep_their_kernels(cl_device, monkeypatch):
    monkeypatch.setattr(mma.nvidia, "capable", lambda profile: False)
    assert not mma.suits(conv(FORWARD, 128, 64, 32, 64), NAMED, cl_device.profile)
    monkeypatch.setattr(mma.nvidia, "capable", lambda profile: True)
    assert mma.suits(conv(FORWARD, 128, 64, 32, 64), NAMED, cl_device.profile)
    assert mma.suits(conv(FORWARD, 128, 64, 32, 64), POLICY, cl_device.profile)
    assert not mma.suits(conv(FORWARD, 128, 64, 32, 64, dtype="float32"), NAMED, cl_device.profile)
    other = KernelConfig(KernelVariant.CONV2D_IMPLICIT_GEMM, extra={"form": "taps"})
    assert not mma.suits(conv(FORWARD, 128, 64, 32, 64), other, cl_device.profile)


def test_a_tuner_is_offered_the_tiles_where_there_are_units(monkeypatch):
    monkeypatch.setattr(mma.nvidia, "capable", lambda profile: True)
    problem = Problem("conv2d", (8, 64, 32, 32, 64, 3, 3), "float16", {}, None)
    (algorithm,) = (a for a in ALGORITHMS["conv2d"] if a.name == "mma")
    offered = {(config.extra["BM"], config.extra["BN"]) for config in algorithm.configurations(problem)}
    assert offered == {(tile.m, tile.n) for tile in mma.CONV_MMA_TILES}
    assert not algorithm.configurations(dataclasses.replace(problem, dtype="float32"))
