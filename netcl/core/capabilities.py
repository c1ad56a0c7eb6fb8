"""Reads the properties of a device from the driver into a frozen profile.

``has_fp16`` tells whether the driver lists half precision, ``half_arithmetic`` whether a test kernel computed correctly in it. NVIDIA's
driver does not list ``cl_khr_fp16``, but computes in half precision.
"""

from __future__ import annotations

import re
import sys
from typing import Any

from netcl.core import env
from netcl.core.device_profile import DeviceProfile as DeviceProfile

# The bits of CL_DEVICE_TYPE, fixed by the OpenCL specification.
TYPE_BITS = (("gpu", 1 << 2), ("cpu", 1 << 1), ("accel", 1 << 3))
SMALL_LOCAL_MEMORY = 16 * 1024  # the minimum of OpenCL 1.0, too small for useful tiles


def device_type(cl_device: Any) -> str:
    """Return "gpu", "cpu", "accel" or "other": the first in this order if a device reports several types, as Oclgrind's does."""
    bits = int(cl_device.type)
    return next((name for name, bit in TYPE_BITS if bits & bit), "other")


def _device_info(cl_device: Any, attribute: str, default: Any) -> Any:
    """Return one property of the device; ``default`` where the driver does not know it."""
    driver_error = getattr(sys.modules.get("pyopencl"), "Error", AttributeError)
    try:
        value = getattr(cl_device, attribute)
    except (AttributeError, driver_error):
        return default
    return default if value is None else value


def _compute_capability(cl_device: Any, extensions: tuple[str, ...]) -> tuple[int, int] | None:
    if "cl_nv_device_attribute_query" not in extensions:
        return None
    major = _device_info(cl_device, "compute_capability_major_nv", None)
    return None if major is None else (int(major), int(_device_info(cl_device, "compute_capability_minor_nv", 0)))


def device_profile(cl_device: Any) -> DeviceProfile:
    """Return the profile of a ``cl.Device``, read from the driver; a property that the driver does not know gets a default."""
    extensions = tuple(sorted(set(cl_device.extensions.split())))
    listed = " ".join(extensions) + " "

    def number(attribute: str, default: int = 0) -> int:
        return int(_device_info(cl_device, attribute, default))

    return DeviceProfile(
        name=cl_device.name.strip(),
        vendor=cl_device.vendor.strip(),
        platform=cl_device.platform.name.strip(),
        version=cl_device.version.strip(),
        driver_version=_device_info(cl_device, "driver_version", "").strip(),
        device_type=device_type(cl_device),
        extensions=extensions,
        has_fp16="fp16" in listed,
        has_fp64="_fp64 " in listed,
        has_subgroups="subgroup" in listed,
        fast_atomics=re.search(r"\bcl_khr_int64_(base|extended)_atomics ", listed) is not None,
        local_mem_size=number("local_mem_size"),
        max_work_group_size=max(1, number("max_work_group_size", 1)),
        max_work_item_sizes=tuple(int(size) for size in _device_info(cl_device, "max_work_item_sizes", (1, 1, 1))),
        max_compute_units=max(1, number("max_compute_units", 1)),
        max_clock_mhz=number("max_clock_frequency"),
        global_mem_size=number("global_mem_size"),
        global_mem_cache_size=number("global_mem_cache_size"),
        max_alloc_size=number("max_mem_alloc_size"),
        unified_memory=bool(number("host_unified_memory")),
        vector_width=max(1, number("native_vector_width_float", 1)),
        compute_capability=_compute_capability(cl_device, extensions),
        available=bool(number("available", 1)) and bool(number("compiler_available", 1)),
        device=cl_device,
    )


def numpy_profile() -> DeviceProfile:
    """Return the profile of the NumPy backend, so that every handle has one."""
    return DeviceProfile("NumPy", "NumPy", "NumPy", "", "", "cpu", has_fp64=True, unified_memory=True)


def kernel_strategy(profile: DeviceProfile) -> str:
    """Return "portable" or "optimized"; portable for CPUs and devices with little local memory.

    Other devices are optimized if they have subgroups or half precision, or are from NVIDIA or AMD. ``NETCL_KERNEL_STRATEGY`` overrides.
    """
    forced = env.value("NETCL_KERNEL_STRATEGY")
    if forced != "auto":
        return forced
    if profile.device_type == "cpu" or profile.local_mem_size < SMALL_LOCAL_MEMORY:
        return "portable"
    known_vendor = re.search(r"nvidia|\bamd\b|advanced micro devices", profile.vendor, re.I)
    return "optimized" if profile.has_subgroups or profile.has_fp16 or known_vendor else "portable"
