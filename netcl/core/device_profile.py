"""The profile of a device, tables that map a device to its vendor and family, and driver quirks.

A row matches a profile if all of its non-empty fields do; patterns ignore case. To support a new device or quirk, add a row.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any


@dataclass(frozen=True)
class DeviceFamily:
    """A pattern for devices, and their brand and family. A device without a compute capability gets the first matching entry."""

    brand: str
    family: str
    platform: str = ""
    name: str = ""  # pattern in the device's name
    vendor: str = ""
    types: tuple[str, ...] = ()  # empty: any


@dataclass(frozen=True)
class Quirk:
    """A deviation of a driver from the specification or from other drivers, and the evidence for it."""

    name: str
    reason: str
    brand: str = ""
    family: str = ""
    device: str = ""  # pattern in the device's name


GPU, CPU = ("gpu",), ("cpu",)
# Numbers by which PoCL names ARM's processors: the part in MIDR_EL1.
ARM_PARTS = {
    "0xd03": "Cortex-A53", "0xd04": "Cortex-A35", "0xd05": "Cortex-A55", "0xd07": "Cortex-A57", "0xd08": "Cortex-A72",
    "0xd09": "Cortex-A73", "0xd0a": "Cortex-A75", "0xd0b": "Cortex-A76", "0xd0c": "Neoverse N1", "0xd0d": "Cortex-A77",
    "0xd40": "Neoverse V1", "0xd41": "Cortex-A78", "0xd49": "Neoverse N2", "0xd4f": "Neoverse V2", "0xd84": "Neoverse V3",
    "0xd8e": "Neoverse N3",
}  # fmt: skip
_NVIDIA, _AMD = r"nvidia", r"\bamd\b|advanced micro devices|radeon"

DEVICE_FAMILIES: tuple[DeviceFamily, ...] = (
    DeviceFamily("oclgrind", "simulator", platform="oclgrind"),
    DeviceFamily("intel", "fpga-emulator", platform="fpga emulation"),
    DeviceFamily("mesa", "software-gpu", name="llvmpipe|softpipe|swrast|lavapipe"),
    DeviceFamily("pocl", "pocl-cpu", platform="portable computing language|pocl", types=CPU),
    DeviceFamily("intel", "intel-cpu", platform="intel", types=CPU),
    DeviceFamily("amd", "amd-cpu", platform="amd|advanced micro devices", types=CPU),
    DeviceFamily("mesa", "rusticl-cpu", platform="rusticl|clover", types=CPU),
    DeviceFamily("apple", "apple-cpu", platform="apple", types=CPU),
    DeviceFamily("nvidia", "blackwell", name=r"rtx (pro )?[56]0\d\d|rtx 50|\bg?b[1-3]00\b", vendor=_NVIDIA),
    DeviceFamily("nvidia", "hopper", name=r"\bg?h[12]00\b|\bh800\b|\bh20\b", vendor=_NVIDIA),
    DeviceFamily("nvidia", "ada", name=r"rtx 40|\bl4\b|\bl40s?\b|ada\b", vendor=_NVIDIA),
    DeviceFamily("nvidia", "ampere", name=r"rtx 30|\ba(2|10|16|30|40|100|800)\b|rtx a\d|orin", vendor=_NVIDIA),
    DeviceFamily("nvidia", "turing", name=r"rtx 20|gtx 16|\bt4\b|quadro rtx|titan rtx", vendor=_NVIDIA),
    DeviceFamily("nvidia", "volta", name=r"v100|titan v\b|xavier", vendor=_NVIDIA),
    DeviceFamily("nvidia", "pascal", name=r"gtx 10|\bp(4|40|100)\b|titan x", vendor=_NVIDIA),
    DeviceFamily("nvidia", "nvidia", vendor=_NVIDIA),
    DeviceFamily("amd", "rdna4", name=r"gfx12|navi4|rx 90\d\d", vendor=_AMD),
    DeviceFamily("amd", "rdna3", name=r"gfx11|navi3|rx 7\d\d\d", vendor=_AMD),
    DeviceFamily("amd", "rdna2", name=r"gfx103|navi2|rx 6\d\d\d", vendor=_AMD),
    DeviceFamily("amd", "rdna1", name=r"gfx101|navi1|rx 5[5-7]\d\d", vendor=_AMD),
    DeviceFamily("amd", "cdna", name=r"gfx908|gfx90a|gfx94|gfx95|\bmi[123]\d\d", vendor=_AMD),
    DeviceFamily("amd", "gcn", vendor=_AMD),
    DeviceFamily("intel", "xe-hpc", name=r"gpu max|ponte vecchio", vendor="intel", types=GPU),
    DeviceFamily("intel", "arc", name=r"\barc\b|gpu flex", vendor="intel", types=GPU),
    DeviceFamily("intel", "xe", name=r"iris\W*xe|\bxe\b|uhd graphics 7[3-7]\d|graphics \[0x", vendor="intel", types=GPU),
    DeviceFamily("intel", "gen9", name=r"hd graphics (5|6)\d\d|iris.*(plus|5\d\d|6\d\d)|gen9", vendor="intel", types=GPU),
    DeviceFamily("intel", "intel-gpu", vendor="intel", types=GPU),
    DeviceFamily("apple", "apple", vendor="apple"),
    DeviceFamily("arm", "mali", name="mali|immortalis"),
    DeviceFamily("qualcomm", "adreno", name="adreno", types=GPU),
    DeviceFamily("qualcomm", "adreno", vendor="qualcomm", types=GPU),
    DeviceFamily("mesa", "rusticl-gpu", platform="rusticl|clover", types=GPU),
)

# NVIDIA's compute capability identifies the generation, also of devices whose names are not in this table.
COMPUTE_CAPABILITIES: tuple[tuple[tuple[int, int], str], ...] = (
    ((10, 0), "blackwell"), ((9, 0), "hopper"), ((8, 9), "ada"), ((8, 0), "ampere"), ((7, 5), "turing"),
    ((7, 0), "volta"), ((6, 0), "pascal"), ((5, 0), "maxwell"), ((3, 0), "kepler"),
)  # fmt: skip

# AMD's APUs do not all report unified memory.
INTEGRATED = re.compile(r"gfx90c|gfx902|gfx103[3567]|gfx1103|gfx115\d|radeon.*graphics$|tegra|orin|xavier", re.I)

QUIRKS: tuple[Quirk, ...] = (
    Quirk("every_device_type", "reports itself as CPU, GPU and accelerator at once (CL_DEVICE_TYPE is 15)", family="simulator"),
    Quirk("slow", "interprets kernels to check them; thousands of times slower than a driver", family="simulator"),
    Quirk("slow", "emulates another device on the CPU", family="fpga-emulator"),
    Quirk("slow", "a graphics driver on the CPU; only there for conformance", family="software-gpu"),
    Quirk("wrong_conversions", "aborts at or miscompares loaded halves; (long)i < 0 of an int i is false", family="software-gpu"),
    Quirk("compiles_at_launch", "the work-group function is compiled at the first launch, so a binary is complete only after one", "pocl"),
    Quirk("caches_programs", "has a cache on disk; to return a binary it compiles every kernel a second time, for any local size", "pocl"),
    Quirk("parses_all_builtins", "every build parses the declarations of all built-in functions: 0.2 s, 40 ms if it is cached", "pocl"),
    Quirk("calls_builtins", "on ARM, built-in functions are not inlined, not even min", "pocl", device="-0x|cortex|neoverse"),
    Quirk("fma_slow", "c += a * b with FP_CONTRACT ON becomes a vector FMA; fma() and mad() are slower", "pocl"),
    Quirk("no_amx", "aborts at instructions that the processor in its name does not have", "pocl", device="^cpu-(?!.*rapids)"),
    Quirk("fork_hangs", "a forked child hangs on its first context if the parent had one", "pocl"),
    Quirk("lists_fp16", "half does not build unless cl_khr_fp16 is listed, and a build that fails writes to stderr", "pocl"),
    Quirk("lists_fp16", "half arithmetic builds and then stops the simulator: 'Unsupported float size: 2 bytes'", "oclgrind"),
    Quirk("half_unlisted", "cl_khr_fp16 is not listed although kernels that compute in half build and are right", "nvidia"),
    Quirk("needs_required_size", "without reqd_work_group_size the compiler keeps to 64 registers", "nvidia"),
    Quirk("local_argument_limit", "a __local argument stops below 48 KB, a __local array may take more than is reported", "nvidia"),
    Quirk("profiling_slows_launches", "a queue with profiling doubles the cost of a launch", "nvidia"),
    Quirk("awkward_sizes_slow", "local_size=None with a global size that has no good divisor is 20 times slower", family="pocl-cpu"),
    Quirk("awkward_sizes_slow", "local_size=None with a global size that has no good divisor is 20 times slower", family="intel-cpu"),
)


@dataclass(frozen=True)
class DeviceProfile:
    """The properties and limits of a device; created by :func:`device_profile` or :func:`numpy_profile`.

    >>> from netcl.core.capabilities import numpy_profile
    >>> numpy_profile().device_type
    'cpu'
    """

    name: str
    vendor: str
    platform: str
    version: str
    driver_version: str
    device_type: str  # "gpu" | "cpu" | "accel" | "other"
    extensions: tuple[str, ...] = ()
    has_fp16: bool = False
    has_fp64: bool = False
    has_subgroups: bool = False
    fast_atomics: bool = False
    local_mem_size: int = 0
    max_work_group_size: int = 1
    max_work_item_sizes: tuple[int, ...] = (1, 1, 1)
    max_compute_units: int = 1
    max_clock_mhz: int = 0
    global_mem_size: int = 0
    global_mem_cache_size: int = 0
    max_alloc_size: int = 0
    unified_memory: bool = False
    vector_width: int = 1  # native, of float
    compute_capability: tuple[int, int] | None = None  # NVIDIA only
    available: bool = True  # and able to compile
    device: Any = field(default=None, repr=False, compare=False)  # the cl.Device; None for NumPy
    half_probe: Any = field(default=None, repr=False, compare=False)  # of the device manager: computes in half

    @property
    def supports_fp16(self) -> bool:
        """Another name for ``has_fp16``."""
        return self.has_fp16

    @cached_property
    def lanes(self) -> int:
        """The number of floats in the vectors of CPU kernels."""
        return min(16, max(4, self.vector_width))

    @cached_property
    def vector_registers(self) -> int:
        """The assumed number of vector registers of a CPU: 16 for 8 lanes (AVX2), else 32 (NEON, AVX-512)."""
        return 16 if self.lanes == 8 else 32

    @property
    def half_arithmetic(self) -> bool:
        """Whether a kernel that computes in half precision was built on this device and returned correct values."""
        return self.half_probe is not None and self.half_probe(self)

    brand = cached_property(lambda self: family_of(self)[0])  # the vendor: nvidia, pocl, other ..
    family = cached_property(lambda self: family_of(self)[1])  # the vendor's generation or driver: hopper, pocl-cpu ..

    @cached_property
    def quirks(self) -> tuple[Quirk, ...]:
        """The deviations of the driver, from :data:`QUIRKS`."""
        found = (q for q in QUIRKS if q.brand in ("", self.brand) and q.family in ("", self.family))
        return tuple(q for q in found if _fits(q.device, self.name))

    @property
    def is_simulator(self) -> bool:
        """Whether the device is Oclgrind or an FPGA emulation."""
        return self.family in ("simulator", "fpga-emulator")

    @property
    def is_integrated(self) -> bool:
        """Whether the device is a GPU that shares the host's memory."""
        return self.device_type == "gpu" and (self.unified_memory or bool(INTEGRATED.search(self.name)))

    @property
    def title(self) -> str:
        """A readable name: ``Neoverse N1, 2 cores (PoCL 3.1)`` where PoCL reports ``pthread--0xd0c``."""
        part = re.search(r"0x[0-9a-f]{3}$", self.name)
        plain = re.sub(r"\((r|tm|c)\)|\bcpu\b|\bprocessor\b|@.*", " ", re.sub(r"^(pthread|basic|cpu)-", "", self.name), flags=re.I)
        maker = re.search(r"\b(Intel|AMD|Apple|Ampere)\b.*", plain)
        name = ARM_PARTS.get(part[0] if part else "", "") or " ".join((maker[0] if maker else plain).split()).strip("- ")
        if not name or name.startswith("0x"):
            name = f"{self.vendor} CPU"
        if not self.driver_version:  # NumPy
            return name
        version = re.search(r"\d+(\.\d+)?", self.driver_version)
        runtime = " ".join(["PoCL" if self.brand == "pocl" else self.platform.replace("(R)", ""), *([version[0]] if version else [])])
        cores = f", {self.max_compute_units} core{'s' * (self.max_compute_units > 1)}" if self.device_type == "cpu" else ""
        return f"{name}{cores} ({runtime})"

    def has_quirk(self, name: str) -> bool:
        return name in [quirk.name for quirk in self.quirks]


def _fits(pattern: str, text: str) -> bool:
    return not pattern or re.search(pattern, text, re.I) is not None


def family_of(profile: DeviceProfile) -> tuple[str, str]:
    """Return brand and family: ``("nvidia", "hopper")``, ``("pocl", "pocl-cpu")``; ``("other", "other")`` if no entry matches."""
    if profile.compute_capability:
        names = (name for least, name in COMPUTE_CAPABILITIES if profile.compute_capability >= least)
        return "nvidia", next(names, "nvidia")
    for row in DEVICE_FAMILIES:
        typed = not row.types or profile.device_type in row.types
        if typed and _fits(row.platform, profile.platform) and _fits(row.vendor, profile.vendor) and _fits(row.name, profile.name):
            return row.brand, row.family
    return "other", "other"


ExtendedDeviceProfile = DeviceProfile  # its earlier name
