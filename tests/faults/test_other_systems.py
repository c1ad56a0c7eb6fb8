"""netcl without the names that only Unix has: in a child process they are removed from ``os`` and ``signal`` before netcl is imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from netcl.core import platforms

# What the documentation of os and signal marks as "Unix only", and modules that Windows lacks; shutil of Python 3.12 keeps O_NONBLOCK.
# Modules of Python that read such names when they are imported (asyncio of 3.13: sysconf) are imported first.
PROGRAM = r'''
import asyncio, contextlib, importlib, logging.handlers, multiprocessing, os, pkgutil, platform, runpy, select, signal, subprocess, sys
import tempfile
import numpy, platformdirs
optional = ("onnx", "mpi4py", "tensorboardX", "safetensors", "torch", "ml_dtypes", "PIL", "matplotlib", "pyopencl")
for name in optional:  # other people's modules know which system they are on
    with contextlib.suppress(ImportError):
        importlib.import_module(name)
for module, names in (
    (os, """chown chroot confstr fchdir fchown fdatasync fork forkpty fstatvfs getegid geteuid getgid getgroups getloadavg getpgid getpgrp
         getpriority getresuid getsid getuid initgroups killpg lchown lockf major mkfifo mknod nice openpty pathconf pipe2 posix_fadvise
         posix_fallocate posix_spawn pread preadv pwrite readv register_at_fork sched_getaffinity sched_yield sendfile setegid seteuid
         setgid setpgid setpriority setsid setuid statvfs sync sysconf sysconf_names tcgetpgrp ttyname uname wait wait3 wait4 writev
         O_CLOEXEC O_DIRECTORY O_DSYNC O_NOCTTY O_NOFOLLOW O_SYNC O_PATH"""),
    (signal, """SIGALRM SIGBUS SIGCHLD SIGCONT SIGHUP SIGKILL SIGPIPE SIGQUIT SIGSTOP SIGTSTP SIGTTIN SIGTTOU SIGUSR1 SIGUSR2 SIGWINCH
             alarm getitimer setitimer pause pthread_kill pthread_sigmask siginterrupt sigpending sigwait sigwaitinfo"""),
    (select, "poll epoll"),
):
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)
subprocess._USE_POSIX_SPAWN = False  # decided when it was imported, used by Python 3.13
for name in ("fcntl", "grp", "pwd", "resource", "termios", "tty", "pty", "posix"):
    sys.modules[name] = None
assert not hasattr(os, "fork") and not hasattr(signal, "SIGKILL")

import netcl
for found in pkgutil.walk_packages(netcl.__path__, "netcl."):
    if found.name == "netcl.__main__":
        continue
    try:
        importlib.import_module(found.name)
    except ImportError as missing:
        assert missing.name and missing.name.split(".")[0] in optional, missing

from netcl.cli import main
device, folder = sys.argv[1:]
assert main(["devices"]) == 0
assert main(["selftest", "relu", "--device", device]) == 0
words = ["--data", "synthetic", "--data-options", "classes=2", "samples=32", "--model", "mlp", "--epochs", "1", "--device", device]
assert main(["train", *words, "--run", folder]) == 0
assert main(["report", folder]) == 0
assert main(["doctor"]) in (0, 1)
if device != "cpu":
    with open(folder + "/mine.py", "w") as file:
        file.write("import netcl; (netcl.ones((4,)) * 2.0).to_host()")
    assert main(["trace", folder + "/mine.py", "--device", device, "--out", folder + "/trace.json"]) == 0

from netcl import nn, optim
from netcl.data import DataLoader, TensorDataset
from netcl.trainer import ModelCheckpoint, Report, Trainer
with netcl.device(device):
    model = nn.Linear(3, 2)
    x, y = numpy.ones((8, 3), numpy.float32), numpy.zeros(8, numpy.int64)
    trainer = Trainer(model, optim.Adam(model.parameters()), callbacks=[Report(folder + "/report"), ModelCheckpoint(folder + "/kept")])
    with DataLoader(TensorDataset(x, y), batch_size=4, num_workers=2, use_shared_mem=False) as loader:
        trainer.fit(loader, epochs=2)
        trainer.fit(loader, epochs=3, resume="auto")
    assert trainer.step == 6 and trainer.evaluate(x, y)["loss"] < 5
    netcl.io.save_model(model, folder + "/own.netcl")
    assert (netcl.io.load_model(folder + "/own.netcl")(x).to_host() == model(x).to_host()).all()
assert os.path.getsize(folder + "/report/report.html") > 1000
from netcl.core.host_memory import available_bytes
assert available_bytes() > 0
print("done")
'''


def test_without_the_names_of_unix(tmp_path):
    words = [sys.executable, "-c", PROGRAM, "auto" if platforms.available() else "cpu", str(tmp_path / "run")]
    done = subprocess.run(words, capture_output=True, text=True, cwd=Path(__file__).parent.parent.parent)
    assert done.returncode == 0 and done.stdout.endswith("done\n"), done.stdout + done.stderr


def test_the_folders_of_android_are_searched(monkeypatch):
    names = dict(platforms.DRIVERS)
    assert "/vendor/lib64/libOpenCL.so" in names["android"] and "/system/vendor/lib64/libOpenCL.so" in names["android"]
    assert Path("/vendor/lib64") in list(platforms._library_folders())
    monkeypatch.setattr(sys, "platform", "android")
    monkeypatch.setattr(platforms, "_state", platforms.PlatformState())
    monkeypatch.setattr(
        platforms, "gather_runtimes", lambda places: [platforms.Runtime("mali", "/v/libmali.so", "/v/libmali.so", "system", "", True)]
    )
    assert [runtime.name for runtime in platforms.prepare().runtimes] == ["mali"]
