"""Each broken set-up is made for real, in a process of its own, and doctor must name it and the command that remedies it.

The loader's folder is moved with ``OPENCL_VENDOR_PATH``, which the real loader obeys; pyopencl is a copy without the runtimes that
wheels may have put next to it; ``sys.prefix`` is a folder of the test.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from netcl.cli.doctor import Facts, diagnose, gpus_of_the_kernel, other_netcl
from netcl.core import platforms
from netcl.core.platforms import Runtime

ROOT = Path(__file__).parent.parent.parent
PLACEHOLDER = "/opt/anaconda1anaconda2anaconda3/lib/"
MACHINES = {"x86_64": 62, "aarch64": 183, "riscv64": 243, "ppc64le": 21}

SETUP = """
import os, site, sys
from pathlib import Path
from netcl.core import platforms
site.ENABLE_USER_SITE = False
sys.prefix = {prefix!r}
platforms.LOADER_FOLDER = Path({vendors!r})
platforms.OTHER_FOLDERS = ()
platforms.DRIVERS = {drivers!r}
platforms.USER_VARIABLES = ("OCL_ICD_VENDORS", "OCL_ICD_FILENAMES")
os.environ["OPENCL_VENDOR_PATH"] = {vendors!r}
{before}
from netcl import cli
from netcl.cli import doctor
doctor.gpus_of_the_kernel = lambda: []
sys.exit(cli.main(["doctor"]))
"""
BLOCK_PYOPENCL = """
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "pyopencl":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Blocker())
"""

needs_pyopencl = pytest.mark.skipif(importlib.util.find_spec("pyopencl") is None, reason="pyopencl is not installed")
on_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems register runtimes themselves")
pytestmark = on_linux


def shared_object(needs: str = "", machine: str = "", crash: bool = False) -> bytes:
    """A small shared library that needs another one, is built for another machine, or crashes when it is loaded."""
    names = b"\0" + needs.encode() + b"\0"
    room = -(-len(names) // 64) * 64
    entries = [(1, 1)] if needs else []
    entries += [(12, 8)] if crash else []  # DT_INIT into a page that is not executable
    offset = 64 + 3 * 56
    size = 16 * (len(entries) + 5)
    strings, symbols = offset + size, offset + size + room
    entries += [(5, strings), (6, symbols), (10, len(names)), (11, 24), (0, 0)]
    dynamic = b"".join(struct.pack("<QQ", *entry) for entry in entries)
    total = symbols + 24
    code = MACHINES[machine or platform.machine()]
    header = b"\x7fELF\x02\x01\x01" + bytes(9) + struct.pack("<HHIQQQIHHHHHH", 3, code, 1, 0, 64, 0, 0, 64, 56, 3, 0, 0, 0)
    segments = struct.pack("<IIQQQQQQ", 1, 6, 0, 0, 0, total, total, 0x10000)
    segments += struct.pack("<IIQQQQQQ", 2, 6, offset, offset, offset, size, size, 8)
    segments += struct.pack("<IIQQQQQQ", 0x6474E551, 6, 0, 0, 0, 0, 0, 16)  # PT_GNU_STACK: no executable stack
    return (header + segments + dynamic + names.ljust(room, b"\0")).ljust(total, b"\0")


@pytest.fixture(scope="session")
def plain_pyopencl(tmp_path_factory) -> Path:
    """A folder with pyopencl and its loader, without the runtimes of wheels."""
    spec = importlib.util.find_spec("pyopencl")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("pyopencl is not installed")
    target = tmp_path_factory.mktemp("site")
    unwanted = shutil.ignore_patterns("*.icd", "libpocl*", "liboclgrind*", "__pycache__")
    shutil.copytree(next(iter(spec.submodule_search_locations)), target / "pyopencl", ignore=unwanted)
    return target


@pytest.fixture
def oclgrind() -> str:
    path = next((r.path for r in platforms.runtimes() if "oclgrind" in r.library.lower() and r.path and not r.error), None)
    if path is None:
        pytest.skip("Oclgrind is not installed")
    return path


@pytest.fixture
def driver(oclgrind, tmp_path) -> bytes:
    """A library that stands in for a vendor's: it has no code and needs Oclgrind by its path, so all symbols are Oclgrind's.

    A symbolic link would not do: Oclgrind's wheel finds its other library relative to the path that it was loaded by.
    """
    content = shared_object(needs=oclgrind)
    library = tmp_path / "libprobe.so"
    library.write_bytes(content)
    code = f"import ctypes; ctypes.CDLL({str(library)!r}).clGetExtensionFunctionAddress"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    if done.returncode:
        pytest.skip(f"no stand-in for a driver can be made: {done.stderr.strip().splitlines()[-1:]}")
    return content


class Sandbox:
    """A set-up to break: a vendors folder, a prefix, driver libraries; ``doctor`` runs in it."""

    def __init__(self, folder: Path, site_packages: Path):
        self.folder, self.site_packages = folder, site_packages
        self.vendors, self.prefix = folder / "vendors", folder / "prefix"
        self.prefix.mkdir()
        self.drivers: tuple = ()

    def put(self, name: str, content: str | bytes) -> Path:
        file = self.folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
        return file

    def doctor(self, before: str = "", **variables: str) -> tuple[int, str]:
        code = SETUP.format(prefix=str(self.prefix), vendors=str(self.vendors), drivers=self.drivers, before=before)
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("OCL_ICD", "OPENCL_", "NETCL_"))}
        path = os.pathsep.join([str(self.site_packages), str(ROOT)])
        env = {**inherited, "PYTHONPATH": path, "NETCL_CACHE_DIR": str(self.folder / "cache"), **variables}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=60)
        assert "Traceback" not in done.stderr, done.stderr
        return done.returncode, done.stdout


@pytest.fixture
def sandbox(tmp_path, plain_pyopencl) -> Sandbox:
    return Sandbox(tmp_path, plain_pyopencl)


@pytest.mark.fault("pyopencl is not installed", "a Python without it", "NumPy backend works; the remedy is named")
def test_no_pyopencl(sandbox):
    status, text = sandbox.doctor(BLOCK_PYOPENCL)
    assert status == 1
    assert "[no-pyopencl] pyopencl is not installed in this Python environment" in text
    by_pip = platforms.PIP_CPU if platforms.has_wheel() else f"{platforms.PIP_OPENCL}, and {platforms.install_command()}"
    assert f"fix: {by_pip}" in text and "*  cpu       NumPy" in text


@pytest.mark.fault("pyopencl does not import", "a broken extension module", "named with its remedy")
def test_pyopencl_that_does_not_import(sandbox):
    sandbox.site_packages = sandbox.folder / "site"
    sandbox.put("site/pyopencl/__init__.py", "raise ImportError('libOpenCL.so.1: cannot open shared object file')")
    status, text = sandbox.doctor()
    assert status == 1
    assert "[pyopencl-broken]" in text and "does not import (libOpenCL.so.1: cannot open shared object file)" in text
    assert "fix: pip install --force-reinstall pyopencl" in text


@pytest.mark.fault("no OpenCL runtime", "an empty machine", "named with its remedy")
def test_no_runtime(sandbox):
    status, text = sandbox.doctor()
    assert status == 1
    assert "[no-runtime] no OpenCL runtime is installed: no .icd file, no wheel, no driver library was found" in text
    assert f"fix: {platforms.install_command()}" in text
    assert str(sandbox.vendors) in text and str(sandbox.prefix) in text  # where it was looked for


def test_a_loader_without_icd_files(sandbox):
    sandbox.vendors.mkdir()
    status, text = sandbox.doctor()
    assert status == 1
    assert "[loader-without-icd] the loader" in text and f"{sandbox.vendors} holds no .icd file" in text and "libOpenCL" in text
    assert f"fix: {platforms.install_command()}" in text


def test_a_setting_of_the_user_that_finds_nothing(sandbox):
    empty = sandbox.folder / "empty"
    empty.mkdir()
    status, text = sandbox.doctor(OCL_ICD_VENDORS=str(empty))
    assert status == 1
    assert f"[setting-finds-nothing] OCL_ICD_VENDORS={empty} is set by you and leads to no OpenCL runtime" in text
    assert "fix: unset OCL_ICD_VENDORS" in text and "[no-runtime]" not in text


def test_a_setting_pyopencls_loader_does_not_read(sandbox):
    bundled = any((sandbox.site_packages / "pyopencl/.libs").glob("libOpenCL*"))
    if not bundled:
        pytest.skip("pyopencl uses the system's loader here")
    library = sandbox.put("lib/libdriver.so", shared_object())
    status, text = sandbox.doctor(OCL_ICD_FILENAMES=f"{library}:/opt/missing.so")
    assert status == 1
    assert f"[runtime-fails] the runtime driver ({library}) does not load: it has no OpenCL entry points" in text
    assert "[runtime-fails] the runtime missing (/opt/missing.so) does not load" in text and "set by you" not in text


@pytest.mark.fault("driver library is damaged", "text in place of the library", "named with its remedy")
def test_a_runtime_whose_library_is_damaged(sandbox):
    library = sandbox.put("lib/libdamaged.so", "this is no library, though it is long enough to be looked at " * 4)
    sandbox.put("vendors/damaged.icd", str(library))
    status, text = sandbox.doctor()
    assert status == 1
    assert f"[runtime-fails] the runtime damaged ({library}) does not load: {library}: invalid ELF header" in text
    assert "damaged or built for another kind of machine" in text and "[no-runtime-loads]" in text


@pytest.mark.fault("driver library is missing", "an `.icd` file that points nowhere", "named with its remedy")
def test_a_runtime_whose_library_is_missing(sandbox):
    sandbox.put("vendors/gone.icd", "libgone.so.7")
    status, text = sandbox.doctor()
    assert status == 1
    assert "[runtime-fails] the runtime gone (libgone.so.7) does not load: libgone.so.7: cannot open shared object file" in text
    assert "fix: install the package that provides libgone.so.7" in text


def test_a_runtime_of_another_machine(sandbox):
    other = "aarch64" if platform.machine() == "x86_64" else "x86_64"
    sandbox.put("lib/libother.so.1", shared_object(machine=other))
    sandbox.drivers = (("other", (str(sandbox.folder / "lib/libother.so.1"),)),)
    status, text = sandbox.doctor()
    assert status == 1
    assert "[runtime-fails] the runtime other" in text
    assert f"built for another kind of machine than {platform.machine()}" in text


@pytest.mark.fault("driver crashes while it is loaded", "a library that aborts", "the process lives; the driver is named")
def test_a_runtime_that_crashes_while_loading(sandbox):
    sandbox.put("lib/libcrash.so.1", shared_object(crash=True))
    sandbox.drivers = (("crash", (str(sandbox.folder / "lib/libcrash.so.1"),)),)
    status, text = sandbox.doctor()
    assert status == 1  # and doctor itself is alive
    assert "[runtime-fails] the runtime crash" in text and "loading it crashed with signal 11" in text


def intel_wheel(sandbox: Sandbox) -> None:
    sandbox.put("prefix/etc/OpenCL/vendors/intel-cpu.icd", f"{PLACEHOLDER}libintelocl.so")
    sandbox.put("prefix/etc/OpenCL/vendors/intel-fpga_emu.icd", f"{PLACEHOLDER}libintelocl_emu.so")


@pytest.mark.parametrize("missing", ["libimf.so", "libtbb.so.12"])
def test_intels_wheel_without_its_needs(sandbox, missing):
    if (Path(sys.base_prefix) / "lib" / missing).exists():
        pytest.skip("the system has this library")
    intel_wheel(sandbox)
    sandbox.put("prefix/lib/libintelocl.so", shared_object(needs=missing))
    status, text = sandbox.doctor()
    assert status == 1
    assert f"[intel-needs] Intel's CPU runtime is installed, but a library that it needs is missing: {missing}" in text
    assert "fix: pip install intel-cmplr-lib-rt tbb" in text
    assert "set to read" not in text  # what does not load is not registered
    assert "fpga" not in text


def test_intels_wheel_without_its_library(sandbox):
    intel_wheel(sandbox)
    status, text = sandbox.doctor()
    assert status == 1
    assert "[runtime-fails] the runtime intel-cpu" in text and "the library that its .icd file names does not exist" in text
    assert "fix: pip install --force-reinstall intel-opencl-rt" in text


def test_intels_wheel_is_registered_in_spite_of_its_placeholder(sandbox, driver):
    """A library that loads stands in for Intel's, which exists for one kind of machine only."""
    intel_wheel(sandbox)
    sandbox.put("prefix/lib/libintelocl.so", driver)
    _, text = sandbox.doctor()
    assert f"set to read {sandbox.folder / 'cache/icd'}" in text and "[registered] intel-cpu" in text
    assert "Oclgrind Simulator" in text  # the real loader loaded it


def test_only_oclgrind(sandbox, oclgrind):
    sandbox.put("vendors/oclgrind.icd", oclgrind)
    status, text = sandbox.doctor()
    assert status == 1
    assert "[only-simulator] the only OpenCL device is a simulator (Oclgrind)" in text
    assert f"fix: {platforms.install_command()}" in text and "only when named" in text
    assert "*  cpu       NumPy" in text


def test_a_container_without_nvidia_icd(sandbox, driver):
    """The driver library is found by the dynamic linker and registered; a library that loads here stands in for it."""
    library = sandbox.put("lib/libnvidia-opencl.so.1", driver)
    sandbox.drivers = platforms.DRIVERS[:1]
    _, text = sandbox.doctor(LD_LIBRARY_PATH=str(library.parent))
    assert f"[nvidia-without-icd] {library} is there without an .icd file (usual in containers); netcl registers it" in text
    assert "registered by netcl" in text and "0:0" in text and "Oclgrind Simulator" in text


def test_nvidia_with_its_icd_is_left_to_the_loader(sandbox, driver):
    sandbox.put("lib/libnvidia-opencl.so.1", driver)
    sandbox.put("vendors/nvidia.icd", "libnvidia-opencl.so.1")
    sandbox.drivers = platforms.DRIVERS[:1]
    _, text = sandbox.doctor(LD_LIBRARY_PATH=str(sandbox.folder / "lib"))
    assert "set to read" not in text and "-without-icd" not in text
    assert "found by the loader" in text and text.count("Oclgrind Simulator") == 1


def test_platforms_were_queried_before_netcl_could_register(sandbox, oclgrind):
    sandbox.drivers = (("oclgrind", (oclgrind,)),)
    before = "import pyopencl\ntry:\n    pyopencl.get_platforms()\nexcept pyopencl.Error:\n    pass"
    status, text = sandbox.doctor(before)
    assert status == 1
    assert "[imported-before] pyopencl had asked for platforms before netcl could register: oclgrind" in text
    assert "fix: import netcl and use it before pyopencl.get_platforms() is called" in text


@pytest.mark.fault("no folder can be written", "a read-only home", "works with a temporary folder, removed at exit")
def test_no_folder_can_be_written(sandbox, oclgrind):
    sandbox.drivers = (("oclgrind", (oclgrind,)),)
    _, text = sandbox.doctor(NETCL_CACHE_DIR="/proc/netcl-cannot-be-made")
    assert "cache     none: no folder can be written" in text and "Oclgrind Simulator" in text
    told = next(line.split()[-1] for line in text.splitlines() if "set to read" in line)
    assert "netcl-icd-" in told and not Path(told).exists()  # removed at exit


def test_devices_hidden_by_the_environment(sandbox, oclgrind):
    sandbox.put("vendors/oclgrind.icd", oclgrind)
    status, text = sandbox.doctor(NETCL_PLATFORM_FILTER="radeon")
    assert status == 1 and "[hidden] devices are hidden: NETCL_PLATFORM_FILTER=radeon" in text
    status, text = sandbox.doctor(NETCL_VISIBLE_DEVICES="radeon")
    assert status == 1 and "[hidden] devices are hidden: [env] NETCL_VISIBLE_DEVICES must name devices that exist" in text


def codes(**facts) -> dict[str, str]:
    sound = {"pyopencl": "2026.1", "loader": "libOpenCL.so.1", "platform_names": ("Clover",), "install": "INSTALL"}
    return {finding.code: f"{finding.what} / {finding.remedy}" for finding in diagnose(Facts(**{**sound, **facts}))}


def test_a_gpu_without_its_opencl_library(tmp_path):
    card = tmp_path / "sys/class/drm/renderD128/device"
    card.mkdir(parents=True)
    (card / "vendor").write_text("0x8086\n")
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia/version").write_text("NVRM version")
    assert gpus_of_the_kernel(tmp_path) == ["nvidia", "intel-gpu"]
    found = diagnose(Facts(pyopencl="1", gpus=("nvidia", "intel-gpu")))
    remedies = {finding.what: finding.remedy for finding in found if finding.code == "gpu-without-driver"}
    assert "NVIDIA_DRIVER_CAPABILITIES=compute,utility" in remedies["the system has a GPU of NVIDIA, but no OpenCL library for it"]
    assert remedies["the system has a GPU of Intel, but no OpenCL library for it"] == "apt-get install intel-opencl-icd"
    driver = Runtime("nvidia", "libnvidia-opencl.so.1", None, "system", "", True)
    assert "gpu-without-driver" not in codes(gpus=("nvidia",), runtimes=(driver,))


def test_platforms_without_devices():
    runtime = Runtime("mesa", "libMesaOpenCL.so.1", None, "system", "", True)
    found = codes(runtimes=(runtime,), platform_names=("Clover", "rusticl"))
    assert found == {"no-device": "there are platforms (Clover, rusticl), but none has a device / INSTALL"}


def test_a_setting_that_works_is_a_note():
    (finding,) = [
        f for f in diagnose(Facts(pyopencl="1", platform_names=("x",), hidden="", setting=("OCL_ICD_VENDORS", "/a"))) if f.is_note
    ]
    assert finding.code == "setting" and "OCL_ICD_VENDORS=/a is set by you: only what it names is used" in finding.what


@needs_pyopencl
@pytest.mark.fault("NUL byte in an `.icd` file", "written there", "named")
def test_a_nul_byte_in_an_icd_file(sandbox):
    sandbox.put("vendors/odd.icd", b"libodd\0.so\n")
    status, text = sandbox.doctor()
    assert status == 1 and "[runtime-fails] the runtime odd (libodd" in text


@needs_pyopencl
@pytest.mark.fault("pyopencl raises an `OSError`", "a module that does", "named with its remedy")
def test_a_pyopencl_that_raises_an_os_error(sandbox, tmp_path):
    (tmp_path / "broken/pyopencl").mkdir(parents=True)
    (tmp_path / "broken/pyopencl/__init__.py").write_text("raise OSError(5, 'Input/output error')\n")
    sandbox.site_packages = tmp_path / "broken"
    status, text = sandbox.doctor()
    assert status == 1 and "[pyopencl-broken]" in text and "Input/output error" in text


@pytest.mark.parametrize("setting", [("NETCL_DEBUG", "x"), ("NETCL_FUSION", "-3")])
@pytest.mark.fault("variable holds nonsense", "`NETCL_*` values that are none", "named with its remedy")
def test_a_variable_that_holds_nonsense(sandbox, setting):
    status, text = sandbox.doctor(**dict([setting]))
    assert status == 1 and f"[illegal-variable] [env] {setting[0]} must have one of its legal values; value='{setting[1]}'" in text
    assert f"fix: unset {setting[0]}" in text


@pytest.mark.parametrize("from_registry", [True, False])
def test_the_other_netcl_is_recognised(from_registry, tmp_path, monkeypatch):
    info = tmp_path / "netcl-0.4.4.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: netcl\nVersion: 0.4.4\n")
    if not from_registry:
        (info / "direct_url.json").write_text('{"url": "file:///checkout", "dir_info": {"editable": true}}')
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert other_netcl() == ("0.4.4" if from_registry else "")
    codes = [finding.code for finding in diagnose(Facts(pyopencl="2026.1", other_netcl=other_netcl()))]
    assert ("other-netcl" in codes) == from_registry
