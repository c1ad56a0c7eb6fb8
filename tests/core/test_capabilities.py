"""Facts of devices, real and made up, and the tables that name their families."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest

from netcl.core import capabilities, device_profile
from netcl.core.capabilities import DeviceProfile, kernel_strategy
from netcl.core.device import manager
from netcl.core.device_profile import family_of
from netcl.core.errors import EnvironmentVariableError

POCL = "Portable Computing Language"


def profile(name="gpu", vendor="Acme", platform="Acme CL", device_type="gpu", local_mem_size=48 * 1024, **facts):
    return DeviceProfile(name, vendor, platform, "OpenCL 3.0", "1", device_type, local_mem_size=local_mem_size, **facts)


def made_up_device(extensions="", **facts):
    platform = SimpleNamespace(name="Acme CL", vendor="Acme")
    return SimpleNamespace(name=" Acme 1 ", vendor="Acme", version="OpenCL 1.2", platform=platform, type=4, extensions=extensions, **facts)


def test_a_profile_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        profile().has_fp16 = True  # type: ignore[misc]


@pytest.mark.parametrize(
    "extensions, flag, expected",
    [
        ("cl_khr_fp16", "has_fp16", True),
        ("cl_vendor_fp16_special", "has_fp16", True),
        ("cl_khr_fp64", "has_fp16", False),
        ("cl_khr_fp64", "has_fp64", True),
        ("cl_amd_fp64", "has_fp64", True),
        ("cl_khr_subgroups", "has_subgroups", True),
        ("cl_intel_subgroups", "has_subgroups", True),
        ("cl_khr_int64_base_atomics", "fast_atomics", True),
        ("cl_khr_int64_extended_atomics", "fast_atomics", True),
        ("cl_khr_global_int32_base_atomics", "fast_atomics", False),
    ],
)
def test_extensions_are_read(extensions, flag, expected):
    read = capabilities.device_profile(made_up_device(f" cl_khr_icd  {extensions} "))
    assert getattr(read, flag) is expected
    assert read.supports_fp16 is read.has_fp16
    assert read.name == "Acme 1"


def test_a_driver_that_knows_few_questions_gets_safe_answers():
    read = capabilities.device_profile(made_up_device())
    assert (read.max_work_group_size, read.local_mem_size, read.compute_capability) == (1, 0, None)
    assert read.unified_memory is False and read.available is True


@pytest.mark.parametrize("bits, expected", [(4, "gpu"), (2, "cpu"), (8, "accel"), (1 | 2, "cpu"), (15, "gpu"), (16, "other")])
def test_device_types(bits, expected):
    assert capabilities.device_type(SimpleNamespace(type=bits)) == expected


@pytest.mark.parametrize(
    "facts, expected",
    [
        ({"device_type": "cpu", "has_fp16": True, "has_subgroups": True}, "portable"),
        ({"local_mem_size": 1024, "vendor": "NVIDIA Corporation"}, "portable"),
        ({"has_subgroups": True}, "optimized"),
        ({"has_fp16": True}, "optimized"),
        ({"vendor": "NVIDIA Corporation"}, "optimized"),
        ({"vendor": "Advanced Micro Devices, Inc."}, "optimized"),
        ({"vendor": "Imagination"}, "portable"),
    ],
)
def test_strategy_asks_for_portable_conditions_first(facts, expected, monkeypatch):
    monkeypatch.delenv("NETCL_KERNEL_STRATEGY", raising=False)
    assert kernel_strategy(profile(**facts)) == expected


def test_strategy_can_be_forced(monkeypatch):
    monkeypatch.setenv("NETCL_KERNEL_STRATEGY", "optimized")
    assert kernel_strategy(profile(device_type="cpu")) == "optimized"
    monkeypatch.setenv("NETCL_KERNEL_STRATEGY", "fast")
    with pytest.raises(EnvironmentVariableError, match=r"NETCL_KERNEL_STRATEGY.*legal: auto, portable, optimized"):
        kernel_strategy(profile())


@pytest.mark.parametrize(
    "name, vendor, platform, device_type, expected",
    [
        ("NVIDIA GeForce RTX 3090", "NVIDIA Corporation", "NVIDIA CUDA", "gpu", ("nvidia", "ampere")),
        ("NVIDIA A100-SXM4-80GB", "NVIDIA Corporation", "NVIDIA CUDA", "gpu", ("nvidia", "ampere")),
        ("Tesla T4", "NVIDIA Corporation", "NVIDIA CUDA", "gpu", ("nvidia", "turing")),
        ("NVIDIA H200", "NVIDIA Corporation", "NVIDIA CUDA", "gpu", ("nvidia", "hopper")),
        ("NVIDIA GeForce RTX 4090", "NVIDIA Corporation", "NVIDIA CUDA", "gpu", ("nvidia", "ada")),
        ("gfx1030", "Advanced Micro Devices, Inc.", "AMD Accelerated Parallel Processing", "gpu", ("amd", "rdna2")),
        ("gfx1100", "Advanced Micro Devices, Inc.", "AMD Accelerated Parallel Processing", "gpu", ("amd", "rdna3")),
        ("gfx90a:sramecc+:xnack-", "Advanced Micro Devices, Inc.", "AMD Accelerated Parallel Processing", "gpu", ("amd", "cdna")),
        ("AMD Radeon RX 6800 (radeonsi, navi21)", "AMD", "rusticl", "gpu", ("amd", "rdna2")),
        ("Intel(R) UHD Graphics 630", "Intel(R) Corporation", "Intel(R) OpenCL HD Graphics", "gpu", ("intel", "gen9")),
        ("Intel(R) Iris(R) Xe Graphics", "Intel(R) Corporation", "Intel(R) OpenCL Graphics", "gpu", ("intel", "xe")),
        ("Intel(R) Arc(TM) A770 Graphics", "Intel(R) Corporation", "Intel(R) OpenCL Graphics", "gpu", ("intel", "arc")),
        ("Apple M2", "Apple", "Apple", "gpu", ("apple", "apple")),
        ("Mali-G710", "ARM", "ARM Platform", "gpu", ("arm", "mali")),
        ("QUALCOMM Adreno(TM)", "QUALCOMM", "QUALCOMM Snapdragon(TM)", "gpu", ("qualcomm", "adreno")),
        ("Intel(R) Xeon(R) CPU", "Intel(R) Corporation", "Intel(R) OpenCL", "cpu", ("intel", "intel-cpu")),
        ("pthread-skylake", "GenuineIntel", "Portable Computing Language", "cpu", ("pocl", "pocl-cpu")),
        ("llvmpipe (LLVM 15.0.6)", "Mesa/X.org", "rusticl", "cpu", ("mesa", "software-gpu")),
        ("Oclgrind Simulator", "Oclgrind", "Oclgrind", "gpu", ("oclgrind", "simulator")),
        ("FPGA Emulation Device", "Intel(R)", "Intel(R) FPGA Emulation Platform", "accel", ("intel", "fpga-emulator")),
        ("Unheard-of 9000", "Nobody", "Nobody CL", "gpu", ("other", "other")),
    ],
)  # fmt: skip
def test_families(name, vendor, platform, device_type, expected):
    assert family_of(profile(name, vendor, platform, device_type)) == expected


@pytest.mark.parametrize(
    "capability, family", [((9, 0), "hopper"), ((8, 6), "ampere"), ((8, 9), "ada"), ((7, 5), "turing"), ((12, 0), "blackwell")]
)
def test_nvidia_is_named_by_its_compute_capability(capability, family):
    renamed = profile("Some new name", "NVIDIA Corporation", compute_capability=capability)
    assert family_of(renamed) == ("nvidia", family)


def test_integrated_gpus():
    apu = profile("gfx1103", "Advanced Micro Devices, Inc.")
    assert apu.is_integrated and not profile("gfx1100", "Advanced Micro Devices, Inc.").is_integrated
    assert profile("Intel(R) UHD Graphics 630", "Intel", unified_memory=True).is_integrated
    assert not profile("pthread", device_type="cpu", unified_memory=True).is_integrated


def test_quirks_are_looked_up_by_brand_and_family():
    assert profile("NVIDIA H200", "NVIDIA Corporation").has_quirk("half_unlisted")
    pocl = profile("pthread", "ARM", "Portable Computing Language", "cpu")
    assert pocl.has_quirk("compiles_at_launch") and not pocl.has_quirk("half_unlisted")
    assert profile().quirks == ()
    names = {"cpu-skylake-avx512-Intel(R) Xeon(R)": True, "cpu-sapphirerapids-Intel(R) Xeon(R)": False, "pthread-Intel(R) Xeon(R)": False}
    for name, lacking in names.items():  # newer PoCLs name the processor they compile for
        assert profile(name, "GenuineIntel", "Portable Computing Language", "cpu").has_quirk("no_amx") is lacking


def test_every_quirk_row_is_reachable_and_says_why():
    brands = {row.brand for row in device_profile.DEVICE_FAMILIES}
    families = {row.family for row in device_profile.DEVICE_FAMILIES}
    for quirk in device_profile.QUIRKS:
        assert quirk.brand in brands | {""} and quirk.family in families | {""} and (quirk.brand or quirk.family)
        assert len(quirk.reason) > 20


def test_the_numpy_profile_has_no_half_arithmetic():
    assert manager.profile(None).half_arithmetic is False
    assert kernel_strategy(manager.profile(None)) == "portable"


def test_a_real_device_answers(cl_device):
    read = cl_device.profile
    assert read.name and read.platform and read.device_type in ("gpu", "cpu", "accel", "other")
    assert read.max_work_group_size >= 1 and read.max_compute_units >= 1 and read.local_mem_size > 0
    assert 0 < read.max_alloc_size <= read.global_mem_size
    assert manager.profile(cl_device.device) is read


def test_half_arithmetic_is_confirmed_by_a_kernel(cl_device):
    confirmed = cl_device.profile.half_arithmetic
    assert isinstance(confirmed, bool)
    if cl_device.profile.brand == "pocl" and not cl_device.profile.has_fp16:
        assert confirmed is False


@pytest.mark.parametrize(
    "facts, title",
    [
        ({"name": "pthread--0xd0c", "platform": POCL, "vendor": "ARM", "driver_version": "3.1+debian"}, "Neoverse N1, 2 cores (PoCL 3.1)"),
        ({"name": "cpu-neoverse-n1-0xd0c", "platform": POCL, "vendor": "ARM", "driver_version": "5.0"}, "Neoverse N1, 2 cores (PoCL 5.0)"),
        ({"name": "pthread--0xfff", "platform": POCL, "vendor": "ARM", "driver_version": "3.1"}, "ARM CPU, 2 cores (PoCL 3.1)"),
        (
            {"name": "pthread-Intel(R) Xeon(R) CPU @ 2.20GHz", "platform": POCL, "vendor": "GenuineIntel", "driver_version": "3.0"},
            "Intel Xeon, 2 cores (PoCL 3.0)",
        ),
        (
            {"name": "cpu-haswell-AMD EPYC 7B13", "platform": POCL, "vendor": "AuthenticAMD", "driver_version": "6.0"},
            "AMD EPYC 7B13, 2 cores (PoCL 6.0)",
        ),
        (
            {
                "name": "Intel(R) Xeon(R) Processor",
                "platform": "Intel(R) OpenCL",
                "vendor": "Intel(R) Corporation",
                "driver_version": "2026.2.0",
            },
            "Intel Xeon, 2 cores (Intel OpenCL 2026.2)",
        ),
        (
            {
                "name": "NVIDIA H200",
                "platform": "NVIDIA CUDA",
                "vendor": "NVIDIA Corporation",
                "driver_version": "580.1",
                "device_type": "gpu",
            },
            "NVIDIA H200 (NVIDIA CUDA 580.1)",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_devices_have_names_for_people(facts, title):
    profile = DeviceProfile(**{"version": "OpenCL 3.0", "device_type": "cpu", "max_compute_units": 2, **facts})
    assert profile.title == title


def test_numpy_is_called_numpy():
    assert manager.default("cpu").profile.title == "NumPy"
