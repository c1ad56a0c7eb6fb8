"""The policy's thresholds, the vendors' tiles, what overrides them, and that answers fit the device."""

from __future__ import annotations

import dataclasses

import pytest

from netcl.core import kernel_selector
from netcl.core.capabilities import DeviceProfile
from netcl.core.errors import ShapeError
from netcl.core.kernel_selector import KernelConfig, KernelSelector, KernelVariant

MEMBERS = """MATMUL_NAIVE MATMUL_TILED MATMUL_REGISTER_TILED MATMUL_VECTORIZED CONV2D_NAIVE CONV2D_IM2COL CONV2D_IMPLICIT_GEMM
CONV2D_TILED_LOCAL CONV2D_WINOGRAD ELEMENTWISE_SCALAR ELEMENTWISE_VECTORIZED REDUCTION_SEQUENTIAL REDUCTION_PARALLEL
REDUCTION_WORKGROUP BATCHNORM_NAIVE BATCHNORM_FUSED"""


def profile(name="gpu", vendor="Acme", device_type="gpu", **facts):
    sizes = {"local_mem_size": 48 * 1024, "max_work_group_size": 1024, **facts}
    return DeviceProfile(name, vendor, "Acme CL", "OpenCL 3.0", "1", device_type, **sizes)


GPU, CPU = profile(), profile("core", device_type="cpu")
AMPERE = profile("NVIDIA GeForce RTX 3090", "NVIDIA Corporation")
TURING = profile("Tesla T4", "NVIDIA Corporation")
RDNA2 = profile("gfx1030", "Advanced Micro Devices, Inc.")


@pytest.fixture(autouse=True)
def no_switches(monkeypatch):
    for name in ("NETCL_KERNEL_STRATEGY", "NETCL_CONV_WINOGRAD", "NETCL_CONV_TILED_LOCAL"):
        monkeypatch.delenv(name, raising=False)


def test_members_and_defaults():
    assert [variant.name for variant in KernelVariant] == MEMBERS.split()
    assert all(variant.value == variant.name.lower() for variant in KernelVariant)
    fields = dataclasses.asdict(KernelConfig(KernelVariant.MATMUL_NAIVE))
    assert list(fields.items())[1:] == [
        ("tile_m", 32), ("tile_n", 32), ("tile_k", 8), ("work_per_thread", 4), ("local_size_1d", 256), ("local_size_2d", (16, 16)),
        ("use_local_memory", True), ("use_vectorization", True), ("vector_width", 4), ("extra", {}),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "size, expected", [(1, "NAIVE"), (16, "NAIVE"), (17, "TILED"), (511, "TILED"), (512, "REGISTER_TILED"), (4096, "REGISTER_TILED")]
)
def test_matmul_by_size(size, expected):
    for device in (GPU, CPU, AMPERE):
        assert KernelSelector(device).select_matmul_kernel(size, size, size, "float32").variant.name == f"MATMUL_{expected}"


def test_matmul_tiles_by_vendor(monkeypatch):
    tiles = {p.name: KernelSelector(p).select_matmul_kernel(2048, 2048, 2048, "float32") for p in (GPU, AMPERE, TURING, RDNA2)}
    assert (tiles[GPU.name].tile_m, tiles[AMPERE.name].tile_m, tiles[TURING.name].tile_n) == (64, 128, 64)
    assert tiles[RDNA2.name].extra["wave"] == 32
    monkeypatch.setenv("NETCL_KERNEL_STRATEGY", "portable")
    assert KernelSelector(AMPERE).select_matmul_kernel(2048, 2048, 2048, "float32").tile_m == 64


@pytest.mark.parametrize(
    "target, kernel, stride, expected",
    [
        (GPU, 1, 1, "IMPLICIT_GEMM"), (GPU, 3, 1, "WINOGRAD"), (GPU, 3, 2, "IMPLICIT_GEMM"), (GPU, 5, 1, "IMPLICIT_GEMM"),
        (CPU, 1, 1, "IM2COL"), (CPU, 3, 1, "IM2COL"),
    ],
)  # fmt: skip
def test_conv_routing(target, kernel, stride, expected):
    answer = KernelSelector(target).select_conv2d_kernel(8, 64, 56, 56, 64, kernel, kernel, stride, kernel // 2)
    assert answer.variant.name == f"CONV2D_{expected}"


def test_winograd_needs_plain_convolutions_and_can_be_switched_off(monkeypatch):
    selector = KernelSelector(GPU)
    plain = (1, 64, 56, 56, 64, 3, 3, 1, 1)
    assert selector.select_conv2d_kernel(*plain, groups=64).variant is KernelVariant.CONV2D_IMPLICIT_GEMM
    assert selector.select_conv2d_kernel(*plain, dilation=2).variant is KernelVariant.CONV2D_IMPLICIT_GEMM
    assert selector.select_conv2d_kernel(*plain).variant is KernelVariant.CONV2D_WINOGRAD
    monkeypatch.setenv("NETCL_CONV_WINOGRAD", "0")
    assert selector.select_conv2d_kernel(*plain).variant is KernelVariant.CONV2D_IMPLICIT_GEMM


def test_tiled_local_is_opt_in_and_for_small_outputs(monkeypatch):
    selector = KernelSelector(GPU)
    assert selector.select_conv2d_kernel(1, 8, 16, 16, 8, 5, 5, 1, 2).variant is KernelVariant.CONV2D_IMPLICIT_GEMM
    monkeypatch.setenv("NETCL_CONV_TILED_LOCAL", "1")
    assert selector.select_conv2d_kernel(1, 8, 16, 16, 8, 5, 5, 1, 2).variant is KernelVariant.CONV2D_TILED_LOCAL
    assert selector.select_conv2d_kernel(1, 8, 17, 16, 8, 5, 5, 1, 2).variant is KernelVariant.CONV2D_IMPLICIT_GEMM
    assert selector.select_conv2d_kernel(1, 8, 33, 33, 8, 5, 5, (2, 2), (1, 1)).variant is KernelVariant.CONV2D_TILED_LOCAL


@pytest.mark.parametrize(
    "n, dtype, width", [(0, "float32", 1), (1024, "float32", 1), (1025, "float32", 4), (1 << 24, "float64", 4), (1025, "float16", 8)]
)
def test_elementwise(n, dtype, width):
    answer = KernelSelector(GPU).select_elementwise_kernel(n, dtype)
    assert (answer.vector_width, answer.use_vectorization) == (width, width > 1)
    assert answer.variant is (KernelVariant.ELEMENTWISE_VECTORIZED if width > 1 else KernelVariant.ELEMENTWISE_SCALAR)


def test_elementwise_is_wide_where_the_device_is():
    assert KernelSelector(profile(vector_width=8)).select_elementwise_kernel(4096, "float32").vector_width == 8


@pytest.mark.parametrize(
    "n, expected", [(0, "SEQUENTIAL"), (255, "SEQUENTIAL"), (256, "PARALLEL"), (65535, "PARALLEL"), (65536, "WORKGROUP")]
)
def test_reduction(n, expected):
    assert KernelSelector(GPU).select_reduction_kernel(n, "sum").variant.name == f"REDUCTION_{expected}"


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("fuse_relu", [True, False])
def test_batchnorm(training, fuse_relu):
    answer = KernelSelector(GPU).select_batchnorm_kernel(8, 64, 32, 32, training=training, fuse_relu=fuse_relu)
    expected = KernelVariant.BATCHNORM_FUSED if fuse_relu and not training else KernelVariant.BATCHNORM_NAIVE
    assert answer.variant is expected


def test_measured_overrides_policy_and_registered_overrides_measured():
    selector, keys = KernelSelector(GPU), []
    measured = KernelConfig(KernelVariant.MATMUL_VECTORIZED, tile_m=7)
    selector.measured = lambda op, key: keys.append(key) or (measured if op == "matmul" else None)
    assert selector.select_matmul_kernel(64, 32, 16, "float32") is measured
    assert keys == [("matmul", (64, 32, 16), "float32", ())]
    assert selector.select_reduction_kernel(8, "sum").variant is KernelVariant.REDUCTION_SEQUENTIAL
    selector.register("matmul", lambda shapes, device: shapes[0] == (64, 16), KernelVariant.MATMUL_NAIVE)
    assert selector.select_matmul_kernel(64, 32, 16, "float32").variant is KernelVariant.MATMUL_NAIVE
    assert selector.select_matmul_kernel(65, 32, 16, "float32") is measured


def test_register_and_select():
    selector = KernelSelector(GPU)
    assert selector.select("rope", [(4, 8)], GPU) is None
    selector.register("rope", lambda shapes, device: True, "plain")
    selector.register("rope", lambda shapes, device: device.device_type == "gpu", "for GPUs")
    assert selector.select("rope", [(4, 8)], GPU) == "for GPUs"
    assert selector.select("rope", [(4, 8)], CPU) == "plain"
    assert selector.select("matmul", [(2, 3, 2048), (2048, 4096)], GPU).variant is KernelVariant.MATMUL_TILED
    assert selector.select("conv2d", [(8, 64, 56, 56), (64, 64, 3, 3), (2, 2), (1, 1)], GPU).variant is KernelVariant.CONV2D_IMPLICIT_GEMM
    assert selector.select("elementwise", [(1,), (64, 64)], GPU).variant is KernelVariant.ELEMENTWISE_VECTORIZED
    assert selector.select("reduction", [(4, 8)], GPU).variant is KernelVariant.REDUCTION_SEQUENTIAL
    with pytest.raises(TypeError, match=r"\[register\] a kernel for matmul must be a KernelConfig or a KernelVariant; kernel='fast'"):
        selector.register("matmul", lambda shapes, device: True, "fast")


@pytest.mark.parametrize("shapes", [[(2, 3), (4, 5)], [(2, 3)], [(2, 3), (3,)]])
def test_select_refuses_operands_that_do_not_fit(shapes):
    with pytest.raises(ShapeError, match=r"\[select\] shapes must be the shapes of the operands of matmul"):
        KernelSelector(GPU).select("matmul", shapes)


def test_negative_sizes_are_refused():
    with pytest.raises(ShapeError, match=r"\[select_reduction_kernel\] sizes must not be negative; shape=\(-1,\)"):
        KernelSelector(GPU).select_reduction_kernel(-1, "sum")


@pytest.mark.parametrize("limit, local", [(1024, 48 * 1024), (64, 4096), (1, 256), (256, 0)])
@pytest.mark.parametrize("target", [AMPERE, GPU], ids=["ampere", "other"])
def test_answers_fit_the_device(target, limit, local):
    small = dataclasses.replace(target, max_work_group_size=limit, local_mem_size=local)
    for size in (64, 1024):
        answer = KernelSelector(small).select_matmul_kernel(size, size, size, "float32")
        assert answer.local_size_1d <= limit and answer.local_size_2d[0] * answer.local_size_2d[1] <= limit
        assert (answer.tile_m + answer.tile_n) * answer.tile_k * 4 <= max(local, 8)
        assert min(answer.tile_m, answer.tile_n, answer.tile_k, *answer.local_size_2d) >= 1


def test_the_process_wide_selector_answers_for_the_active_device(device):
    selector = kernel_selector.get_kernel_selector()
    assert kernel_selector.select_matmul_config(2048, 2048, 2048) == selector.select_matmul_kernel(2048, 2048, 2048)
    expected = "IM2COL" if device.device_type == "cpu" else "WINOGRAD"
    assert kernel_selector.select_conv2d_config(8, 64, 56, 56, 64, 3, 3, 1, 1).variant.name == f"CONV2D_{expected}"
