"""``netcl doctor`` and ``netcl devices``: the OpenCL runtimes and devices of this machine.

``doctor`` works in three steps that can be tested one by one: :func:`collect` reads the machine into :class:`Facts`,
:func:`diagnose` turns facts into findings, and :func:`print_doctor` prints both.
"""

from __future__ import annotations

import argparse
import os
import platform as machine
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from netcl import __version__
from netcl.cli.command import command, option, say, table
from netcl.core import env, platforms, system_packages
from netcl.core.device import Found, manager, score
from netcl.core.errors import DeviceError, EnvironmentVariableError
from netcl.core.platforms import Runtime

# PCI vendors of GPUs, and what to install where their OpenCL driver is missing.
GPU_VENDORS = {"0x10de": ("nvidia", "NVIDIA"), "0x1002": ("amd", "AMD"), "0x8086": ("intel-gpu", "Intel")}
GPU_DRIVERS = {
    "nvidia": (r"nvidia", "install NVIDIA's driver; in a container: docker run --gpus all -e NVIDIA_DRIVER_CAPABILITIES=compute,utility"),
    "amd": (r"amdocl|rusticl", "apt-get install rocm-opencl-runtime (or mesa-opencl-icd, with RUSTICL_ENABLE=radeonsi)"),
    "intel-gpu": (r"igdrcl|rusticl", "apt-get install intel-opencl-icd"),
}


@dataclass(frozen=True)
class Finding:
    """A finding of doctor: ``what`` describes it; ``remedy`` is the command or action that fixes it, or empty if nothing is to be done."""

    code: str
    what: str
    remedy: str = ""

    @property
    def is_note(self) -> bool:
        return not self.remedy


@dataclass(frozen=True)
class Facts:
    """Facts about this machine and this Python environment, from which :func:`diagnose` derives its findings."""

    pyopencl: str = ""  # version and folder, empty if it does not import
    import_error: str = ""
    loader: str = ""
    bundled_loader: bool = True
    loader_folder: str = str(platforms.LOADER_FOLDER)
    loader_folder_exists: bool = False
    setting: tuple[str, str] | None = None  # the user's variable for the loader
    folder: str = ""  # what netcl told the loader
    looked_in: tuple[str, ...] = ()
    runtimes: tuple[Runtime, ...] = ()
    unseen: tuple[str, ...] = ()
    platform_names: tuple[str, ...] = ()
    found: tuple[Found, ...] = ()
    hidden: str = ""  # why devices of the driver are not shown
    refused: str = ""  # why NETCL_DEVICE leads to no device
    illegal: tuple[tuple[str, str], ...] = ()  # NETCL_ variables that hold nonsense, and what is wrong with each
    other_netcl: str = ""  # the version of the registry's netcl, another project, if it is installed here as well
    gpus: tuple[str, ...] = ()  # keys of GPU_DRIVERS: graphics cards the kernel knows
    install: str = field(default_factory=platforms.install_command)

    @property
    def usable(self) -> tuple[Found, ...]:
        """The OpenCL devices that "auto" may select."""
        return tuple(f for f in self.found if score(f.profile)[0] >= 0)

    @property
    def ready(self) -> bool:
        """Whether programs can run on an OpenCL device with the current settings."""
        return bool(self.usable) and not self.refused and not self.illegal


def collect() -> Facts:
    """Return the facts of this machine: runtimes (each is loaded in a child process), loader, platforms, devices."""
    state = platforms.prepare()
    places = platforms.Places.here()
    version, error, names, found, hidden, refused = "", "", [], [], "", ""
    try:
        cl = platforms.opencl()
        version = f"{cl.VERSION_TEXT} in {os.path.dirname(str(cl.__file__))}"
        names = [platform.name for platform in platforms.cl_platforms()]
        found = manager.found()
        manager.default("auto")
    except DeviceError as caught:
        refused = str(caught)
    except ImportError as caught:
        error = str(caught)
    except EnvironmentVariableError as caught:
        hidden = str(caught)
    filters = [f"{name}={env.raw(name)}" for name in ("NETCL_PLATFORM_FILTER", "NETCL_VISIBLE_DEVICES") if env.raw(name)]
    looked_in = [*places.loader_folders, *places.other_folders, *filter(None, [places.wheel_folder])]
    looked_in += [prefix / "etc/OpenCL/vendors" for prefix in places.prefixes]
    return Facts(
        pyopencl=version,
        import_error=error,
        loader=platforms.loader_path() or "",
        bundled_loader=places.bundled_loader,
        loader_folder=str(places.loader_folders[0]),
        loader_folder_exists=places.loader_folders[0].exists(),
        setting=state.setting,
        folder=str(state.folder or ""),
        looked_in=tuple(str(folder) for folder in looked_in),
        runtimes=tuple(platforms.runtimes(verify=True)),
        unseen=tuple(runtime.name for runtime in platforms.unseen()) if version else (),
        platform_names=tuple(names),
        found=tuple(found),
        hidden=hidden or ", ".join(filters),
        refused=refused,
        illegal=tuple(illegal_variables()),
        other_netcl=other_netcl(),
        gpus=tuple(gpus_of_the_kernel()),
    )


def other_netcl() -> str:
    """Return the installed version of the unrelated project "netcl" from a package registry; empty if it is not installed."""
    try:
        found = metadata.distribution("netcl")
    except metadata.PackageNotFoundError:
        return ""
    return "" if found.read_text("direct_url.json") else found.version  # pip writes that file for a checkout, as this one once was


def illegal_variables() -> Iterator[tuple[str, str]]:
    """Yield the name of every variable of netcl with an invalid value, and the error."""
    for name in env.VARIABLES:
        try:
            env.value(name)
        except EnvironmentVariableError as caught:
            yield name, str(caught)


def gpus_of_the_kernel(root: Path = Path("/")) -> list[str]:
    """Return the vendors of the GPUs that the operating system reports, whether or not OpenCL finds them."""
    found = ["nvidia"] if (root / "proc/driver/nvidia/version").exists() or (root / "dev/nvidiactl").exists() else []
    for file in sorted(root.glob("sys/class/drm/renderD*/device/vendor")):
        key = GPU_VENDORS.get(file.read_text().strip(), ("", ""))[0]
        found += [key] if key and key not in found else []
    return found


def _about_python(facts: Facts) -> Iterator[Finding]:
    if facts.other_netcl:
        what = f"the distribution netcl {facts.other_netcl} in this environment is another project, and its files are in the same folder"
        yield Finding("other-netcl", what, "pip uninstall netcl, then install netcl-dl again")
    if "does not import" in facts.import_error:
        yield Finding("pyopencl-broken", facts.import_error.partition(";")[0], "pip install --force-reinstall pyopencl")
    elif facts.import_error:
        remedy = facts.install if facts.install.startswith("pip") else f"{platforms.PIP_OPENCL}, and {facts.install}"
        yield Finding("no-pyopencl", "pyopencl is not installed in this Python environment", remedy)
    name, text = facts.setting or ("", "")
    if name and facts.pyopencl and not facts.platform_names:
        yield Finding("setting-finds-nothing", f"{name}={text} is set by you and leads to no OpenCL runtime", f"unset {name}")
    elif name:
        yield Finding("setting", f"{name}={text} is set by you: only what it names is used, netcl added nothing")


def _about_runtimes(facts: Facts) -> Iterator[Finding]:
    for runtime in facts.runtimes:
        needs = re.search(r"lib(imf|svml|irng|intlc|tbb)\S*(?=:)", runtime.error)
        if needs and "intel" in runtime.library:
            what = f"Intel's CPU runtime is installed, but a library that it needs is missing: {needs[0]}"
            yield Finding("intel-needs", what, platforms.PIP_INTEL_NEEDS)
        elif runtime.error:
            what = f"the runtime {runtime.name} ({runtime.library}) does not load: {runtime.error}"
            yield Finding("runtime-fails", what, runtime.remedy or "reinstall it")
    registered = [r for r in facts.runtimes if not r.known and not r.error] if facts.folder else []
    for runtime in registered:
        if runtime.origin == "driver library":
            what = f"{runtime.library} is there without an .icd file (usual in containers)"
            yield Finding(f"{runtime.name}-without-icd", f"{what}; netcl registers it for its own processes, nothing to do")
        else:
            yield Finding("registered", f"{runtime.name} from {runtime.source} is registered by netcl, nothing to do")
    if facts.unseen:
        what = f"pyopencl had asked for platforms before netcl could register: {', '.join(facts.unseen)}"
        yield Finding("imported-before", what, "import netcl and use it before pyopencl.get_platforms() is called")
    if facts.setting or not facts.pyopencl or facts.platform_names:
        return
    if not facts.runtimes and facts.loader_folder_exists:
        what = f"the loader {facts.loader} is there, but {facts.loader_folder} holds no .icd file: no runtime is registered"
        yield Finding("loader-without-icd", what, facts.install)
    elif not facts.runtimes:
        yield Finding("no-runtime", "no OpenCL runtime is installed: no .icd file, no wheel, no driver library was found", facts.install)
    elif all(runtime.error for runtime in facts.runtimes):
        yield Finding("no-runtime-loads", "OpenCL runtimes are installed and none of them loads", f"see above; or {facts.install}")


def _about_devices(facts: Facts) -> Iterator[Finding]:
    names = {key: name for key, name in GPU_VENDORS.values()}
    for key in facts.gpus:
        pattern, remedy = GPU_DRIVERS[key]
        if not any(re.search(pattern, runtime.library, re.I) for runtime in facts.runtimes):
            yield Finding("gpu-without-driver", f"the system has a GPU of {names[key]}, but no OpenCL library for it", remedy)
    if facts.usable or not facts.platform_names:
        pass
    elif facts.hidden:
        yield Finding("hidden", f"devices are hidden: {facts.hidden}", "unset NETCL_PLATFORM_FILTER NETCL_VISIBLE_DEVICES")
    elif not facts.found:
        yield Finding("no-device", f"there are platforms ({', '.join(facts.platform_names)}), but none has a device", facts.install)
    elif all(f.profile.is_simulator for f in facts.found):
        what = "the only OpenCL device is a simulator (Oclgrind): right for checking kernels, too slow for work, never chosen by itself"
        yield Finding("only-simulator", what, facts.install)
    else:
        titles = ", ".join(f.profile.title for f in facts.found)
        yield Finding("only-software", f"there is no device fit for work, only: {titles}", facts.install)
    if facts.refused:
        yield Finding("no-such-device", facts.refused, "unset NETCL_DEVICE, or name one of these")
    for name, what in facts.illegal:
        yield Finding("illegal-variable", what, f"unset {name}, or give it a legal value")


def diagnose(facts: Facts) -> list[Finding]:
    """Return all findings about the set-up: problems and notes."""
    return [*_about_python(facts), *_about_runtimes(facts), *_about_devices(facts)]


def _runtime_rows(facts: Facts) -> list[list[str]]:
    def state(runtime: Runtime) -> str:
        if runtime.error:
            return "does not load"
        if runtime.known:
            return "found by the loader"
        return "registered by netcl" if facts.folder else "not used"

    return [[r.name, r.origin, r.path or r.library, state(r)] for r in facts.runtimes]


def device_rows(found: Sequence[Found]) -> list[list[str]]:
    """Return a table row per device, NumPy last; a star marks the device that "auto" selects."""
    chosen, rows = None, []
    with suppress(DeviceError, EnvironmentVariableError):  # doctor has told it already
        chosen = manager.default("auto")
    for f in found:
        p = f.profile
        star = "*" if chosen is not None and chosen.device == f.device else ""
        size = f"{p.global_mem_size / 2**30:.1f} GB"
        note = "" if score(p)[0] >= 0 else "only when named"
        halves = "listed" if p.has_fp16 else "storage"
        rows.append([star, f.index, p.platform, p.title, p.device_type, str(p.max_compute_units), size, halves, note])
    star = "*" if chosen is not None and chosen.backend == "cpu" else ""
    return [*rows, [star, "cpu", "NumPy", "NumPy", "cpu", "", "", "storage", ""]]


DEVICE_HEADER = ("", "selector", "platform", "device", "type", "units", "memory", "half", "")


def print_doctor(facts: Facts, findings: Sequence[Finding]) -> None:
    """Print the facts, the findings with their remedies, and whether a device is ready."""
    say(f"netcl {__version__}, Python {machine.python_version()} on {machine.system()} {machine.machine()}")
    say(f"pyopencl  {facts.pyopencl or 'does not import'}")
    say(f"loader    {facts.loader or 'none in use'}")
    reading = f"set to read {facts.folder}" if facts.folder else f"reads {facts.loader_folder}"
    say(f"          {reading}" + (f" ({facts.setting[0]} is set by you)" if facts.setting else ""))
    say(f"cache     {env.cache_dir() or 'none: no folder can be written'}")
    say("\nRuntimes were looked for in:")
    drivers = dict.fromkeys(os.path.basename(names[0]) for _, names in platforms.DRIVERS)
    say(textwrap.indent("\n".join([*facts.looked_in, f"driver libraries: {', '.join(drivers)}"]), "  "))
    say("\nRuntimes found:")
    say(table(("name", "from", "library", "state"), _runtime_rows(facts), 2) if facts.runtimes else "  none")
    say('\nDevices (* is what "auto" chooses):')
    say(table(DEVICE_HEADER, device_rows(facts.found), 2))
    for title, chosen in (("Notes", [f for f in findings if f.is_note]), ("Problems", [f for f in findings if not f.is_note])):
        if chosen:
            say(f"\n{title}:")
        for finding in chosen:
            say(f"  [{finding.code}] {finding.what}" + (f"\n      fix: {finding.remedy}" if finding.remedy else ""))
    print()
    if facts.ready:
        say("Ready: there is an OpenCL device fit for work.")
    elif facts.illegal:
        say(f"Not ready: {', '.join(name for name, _ in facts.illegal)} cannot be read, and nothing runs until they are corrected.")
    elif facts.refused:
        say("Not ready: NETCL_DEVICE names a device that is not there, and nothing runs until that is fixed.")
    else:
        say("Not ready: there is no OpenCL device fit for work. netcl computes with NumPy until there is one.")


def fix(facts: Facts) -> bool:
    """Install the missing parts of a CPU device (pyopencl, PoCL) by pip or as system packages; returns whether anything was installed."""
    loads = facts.import_error and any(not r.error and "oclgrind" not in r.library for r in facts.runtimes)  # it only lacks pyopencl
    wants_runtime = not (facts.usable or facts.hidden or facts.setting or loads)
    wheels = ["pyopencl"] if facts.import_error else []
    wheels += ["pocl-binary-distribution"] if wants_runtime and platforms.has_wheel() else []
    done = False
    if wheels:
        say(f"netcl: pip installs {' '.join(wheels)}", flush=True)
        done = subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", *wheels]).returncode == 0
    if wants_runtime and not platforms.has_wheel():
        done = system_packages.install_packages("runtime") or done
    return done


@command("doctor", option("--fix", action="store_true", help="install a CPU runtime if there is no device, by pip or as a system package"))
def doctor(args: argparse.Namespace) -> int:
    """Show the OpenCL runtimes and devices of this machine, and the commands that fix problems."""
    facts = collect()
    if args.fix and not facts.ready and fix(facts):
        sys.stdout.flush()
        return subprocess.run([sys.executable, "-m", "netcl", "doctor"]).returncode  # a loader reads its runtimes once per process
    print_doctor(facts, diagnose(facts))
    return 0 if facts.ready else 1


@command("devices")
def devices(args: argparse.Namespace) -> int:
    """List the devices, and the selectors that name them."""
    print(table(DEVICE_HEADER, device_rows(manager.found())))
    return 0
