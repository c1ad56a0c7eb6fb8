"""``netcl.torch``: PyTorch scripts run as they are, missing names are listed, and nothing is installed unasked."""

from __future__ import annotations

import importlib.util
import io
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

import netcl
import netcl.torch
from netcl import nn
from netcl.core import recording
from netcl.core.errors import DeviceError, DtypeError
from netcl.torch.__main__ import main

SCRIPTS = Path(__file__).parent / "torch_scripts"
NAMES = {"torch", "torchvision"}


def start(script: Path, *words: str, selector: str = "cpu", cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "netcl.torch", str(script), *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env={**os.environ, "NETCL_DEVICE": selector}, timeout=240)


def losses(done: subprocess.CompletedProcess[str]) -> tuple[float, float]:
    assert done.returncode == 0, done.stderr
    first, last = re.search(r"first (\S+) last (\S+)", done.stdout).groups()
    return float(first), float(last)


def written(folder: Path, text: str, name: str = "script.py") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture(autouse=True)
def without_pytorch(monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] in NAMES]:
        monkeypatch.delitem(sys.modules, name)


@pytest.fixture
def installed():
    netcl.torch.install()
    yield
    netcl.torch.uninstall()


# ---- scripts


@pytest.mark.parametrize("name", ["vae", "words", "gpt", "reinforce", "upscale"])
def test_script(name, tmp_path):
    first, last = losses(start(SCRIPTS / f"{name}.py", cwd=tmp_path))
    assert last < 0.85 * first


def test_script_on_one_device_with_arguments_and_a_worker(tmp_path, one_target):
    """The worker process imports the script again, and with it torch."""
    words = ("--epochs", "3", "--workers", "1", "--save", "here.pt")
    done = start(SCRIPTS / "cnn.py", *words, selector=one_target.selector, cwd=tmp_path)
    first, last = losses(done)
    assert last < 0.85 * first and (tmp_path / "here.pt").exists() and "epoch 3" in done.stdout


def test_a_script_of_77_lines_runs_unchanged_and_with_its_imports_changed(tmp_path, one_target):
    pytest.importorskip("netcl.vision", reason="transforms are there")
    lines = (SCRIPTS / "classifier.py").read_text(encoding="utf-8").splitlines()
    ported = [
        re.sub(r"^(from|import) torch(vision)?\b", lambda found: f"{found[1]} netcl{'.vision' if found[2] else ''}", line) for line in lines
    ]
    ported = ["import netcl as torch" if line == "import netcl" else line for line in ported]
    changed = [line for line, new in zip(lines, ported, strict=True) if line != new]
    assert len(lines) == 77 and len(changed) == 7 and all(line.startswith(("import torch", "from torch")) for line in changed)
    script = written(tmp_path, "\n".join(ported) + "\n")
    environment = {**os.environ, "NETCL_DEVICE": one_target.selector}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=240)
    for ran in (done, start(SCRIPTS / "classifier.py", selector=one_target.selector, cwd=tmp_path)):
        first, last = losses(ran)
        assert last < 0.5 * first and "accuracy 1.00" in ran.stdout


def test_workers_of_a_script_without_a_main_guard_are_threads(tmp_path):
    text = """
import torch
from torch.utils.data import DataLoader, TensorDataset
print("once", sum(x.sum().item() for x, in DataLoader(TensorDataset(torch.arange(6)), batch_size=2, num_workers=2)))
"""
    done = start(written(tmp_path, text), cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "once 15\n") and "num_workers=2; threads are used instead" in done.stderr, done.stderr


def test_a_script_without_its_names_ends_with_one_line(tmp_path, capsys):
    script = written(tmp_path, "import torch\nfrom torch.distributions import Categorucal\ntorch.fx.symbolic_trace(Categorucal)\n")
    done = start(script, cwd=tmp_path)
    before, last = done.stderr.splitlines()
    assert (done.returncode, done.stdout) == (1, "") and before.endswith("the script ends where it uses one of them")
    assert last == ("[netcl.torch] netcl has no torch.distributions.Categorucal, the nearest name is torch.distributions.Categorical; "
                    "at=script.py:2; the script also needs torch.fx.symbolic_trace (script.py:3)")  # fmt: skip
    assert main(["--check", str(script)]) == 1 and main(["--check", str(SCRIPTS / "gpt.py")]) == 0
    assert capsys.readouterr().err == before.removesuffix("; the script ends where it uses one of them") + "\n"


def test_arguments_status_and_default_device_are_the_scripts(tmp_path):
    text = """
import sys, torch, beside
print(sys.argv[1:], __name__, beside.x.device.backend, torch.cuda.is_available(), torch.device("cpu").type)
sys.exit(3)
"""
    written(tmp_path, "import torch\nx = torch.ones(2)\n", "beside.py")
    done = start(written(tmp_path, text), "--check", "--device", "x", cwd=tmp_path.parent)
    assert (done.returncode, done.stdout) == (3, "['--check', '--device', 'x'] __main__ cpu False cpu\n"), done.stderr


# ---- missing names


def test_missing_names_of_a_script(tmp_path):
    written(tmp_path, "from torch import nn\n\n\nclass Layer(nn.Linaer):\n    pass\n", "layers.py")
    script = written(tmp_path, """
import torch
import torch.nn.functional as F
import torch.export
from torch import nn, optim as o
from torch.nn import Linear, Nothing
from layers import Layer
try:
    import torch._dynamo
    torch.not_this
except ImportError:
    pass
torch.backends.cudnn.whatever = True
x = F.relu(torch.zeros(3).no_such_method()) + F.nope(torch.ones(2), out=o.Lamb)
nn.Linear.no_such_attribute
torch.linalg.ldl_factor(x)
torch.Tensor.add, torch.float32, torch.cuda.amp.autocast, torch.utils.data.DataLoader
""")  # fmt: skip
    assert netcl.torch.missing(script) == {
        "torch.export": "script.py:4", "torch.nn.Nothing": "script.py:6", "torch.nn.functional.nope": "script.py:14",
        "torch.optim.Lamb": "script.py:14", "torch.linalg.ldl_factor": "script.py:16", "torch.nn.Linaer": "layers.py:4",
    }  # fmt: skip


def test_a_missing_name_at_run_time_names_the_others(tmp_path):
    script = written(tmp_path, "import torch\nfrom torch import nn\nname = 'Linaer'\ngetattr(nn, name)\ntorch.nope\n")
    with pytest.raises(
        netcl.torch.MissingNameError, match=r"no torch.nn.Linaer, the nearest name is torch.nn.Linear; the script also needs"
    ):
        netcl.torch.run(script)
    assert not NAMES & set(sys.modules)


def test_other_errors_are_the_scripts_own(tmp_path):
    with pytest.raises(ModuleNotFoundError, match="no_such_module_of_mine"):
        netcl.torch.run(written(tmp_path, "import torch\nimport no_such_module_of_mine\n"))
    with pytest.raises(AttributeError, match="'dict' object has no attribute 'x'"):
        netcl.torch.run(written(tmp_path, "import torch\n{}.x\n"))
    assert not NAMES & set(sys.modules)


# ---- install, uninstall


def test_import_alone_installs_nothing():
    assert not NAMES & set(sys.modules)
    code = "import sys, netcl.torch; sys.exit(bool({'torch', 'torchvision'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_uninstall_undoes_everything():
    method, path, active = nn.Module.parameters, list(sys.path), netcl.get_default_device()
    netcl.torch.install()
    netcl.torch.install()
    assert sys.modules["torch.nn"].Linear is nn.Linear and sys.path != path
    netcl.torch.uninstall()
    netcl.torch.uninstall()
    assert not [name for name in sys.modules if name.split(".")[0] in NAMES]
    assert (nn.Module.parameters, sys.path, netcl.get_default_device()) == (method, path, active)


def test_install_refuses_beside_the_real_one(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", type(sys)("torch"))
    with pytest.raises(RuntimeError, match=r"\[netcl.torch\] torch must not be imported yet; .*install before anything imports it"):
        netcl.torch.install()


# ---- what the modules answer


class Own(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.width, self.layer = width, nn.Linear(width, 1)


def test_tensor_classes(installed, monkeypatch):
    import torch

    owner = type(torch.ones(1))
    monkeypatch.setattr(owner, "cuda", owner.cuda)  # restores it
    torch.Tensor.cuda = lambda x: x + 1
    assert torch.ones(1).cuda().item() == 2.0

    assert (
        isinstance(torch.ones(2), torch.Tensor)
        and isinstance(nn.Parameter(torch.ones(1)), torch.Tensor)
        and not isinstance(1, torch.Tensor)
    )
    assert torch.Tensor(2, 3).shape == torch.Size([2, 3]) and torch.Tensor([1, 2]).dtype == torch.float32
    assert isinstance(torch.LongTensor([1]), torch.LongTensor) and not isinstance(torch.ones(1), torch.LongTensor)
    both = nn.Linear(2, 3).parameters()
    assert torch.Tensor.add(torch.ones(1), 1).item() == 2.0 and [next(both).shape, next(both).shape] == [(3, 2), (3,)]


def test_import_forms(installed):
    import torch.nn.functional as F
    from torch import nn as layers
    from torch.utils.data import DataLoader

    assert (F.relu, layers.Linear, DataLoader) == (nn.functional.relu, nn.Linear, netcl.utils.data.DataLoader)
    star: dict = {}
    exec("from torch.nn import *", star)
    assert star["Conv2d"] is nn.Conv2d
    with pytest.raises(ImportError, match=r"cannot import name 'Nothing' from 'torch\.nn'"):
        from torch.nn import Nothing  # noqa: F401
    with pytest.raises(AttributeError, match=r"netcl has no torch.optim.AdamV, the nearest name is torch.optim.Adam"):
        sys.modules["torch.optim"].AdamV  # noqa: B018


def test_cuda_is_the_opencl_device(cl_device, monkeypatch, request):
    monkeypatch.setenv("NETCL_DEVICE", request.node.callspec.params["cl_device"].selector)
    netcl.torch.install()
    try:
        import torch

        there = torch.device("cuda:0")
        assert torch.cuda.is_available() and torch.cuda.device_count() >= 1 and torch.cuda.get_device_name() == cl_device.device_name
        assert (str(there), there.type, there.index, str(torch.device("cpu"))) == ("cuda:0", "cuda", 0, "cpu")
        x = torch.ones(2, device="cpu")
        assert x.device == torch.device("cpu") and x.cuda().device == x.to("cuda").device == x.to(0).device == there == cl_device
        assert torch.zeros(1, device="cuda").device == nn.Linear(1, 1).cuda().weight.device == cl_device
        assert torch.accelerator.current_accelerator() == there and nn.Linear(1, 1).cuda().cpu().bias.device == torch.device("cpu")
    finally:
        netcl.torch.uninstall()


def test_without_opencl_there_is_no_cuda(monkeypatch):
    monkeypatch.setenv("NETCL_DEVICE", "cpu")
    netcl.torch.install()
    try:
        import torch

        assert not torch.cuda.is_available() and torch.cuda.device_count() == 0 and torch.accelerator.current_accelerator() is None
        with pytest.raises(DeviceError, match=r"\[netcl.torch\] no such OpenCL device; selector='cuda'"):
            torch.ones(1, device="cuda")
        there, second = torch.device("cuda"), torch.device("cuda:1")  # as default arguments of code that does not use them
        assert (str(there), second.type, second.index, torch.ones(1).device == there) == ("cuda", "cuda", 1, False)
        assert there == torch.device("cuda") != second == torch.device("cuda", 1) and {there: 2}[torch.device("cuda")] == 2
        with pytest.raises(DeviceError, match=r"\[netcl.torch\] no such OpenCL device; selector='cuda:1'"):
            torch.ones(1).to(second)
        with pytest.warns(UserWarning, match=r"\[autocast\] there is no OpenCL device: autocast is disabled"), torch.autocast("cuda"):
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32 and not torch.is_autocast_enabled("cuda")
        with pytest.warns(UserWarning, match=r"\[GradScaler\] there is no OpenCL device: GradScaler is disabled"):
            scaler = torch.cuda.amp.GradScaler()
        scaler.load_state_dict({})
        assert (scaler.is_enabled(), scaler.get_scale(), scaler.state_dict()) == (False, 1.0, {})
    finally:
        netcl.torch.uninstall()


def test_files_and_scaler(installed, tmp_path):
    import torch

    file = io.BytesIO()
    torch.save({"w": torch.arange(3), "n": 2}, file)
    file.seek(0)
    read = torch.load(file, map_location=lambda storage, location: storage)
    assert read["w"].tolist() == [0, 1, 2] and read["n"] == 2
    torch.save(Own(2), tmp_path / "m.pt")
    with pytest.raises(ValueError, match=r"\[torch.load\] the file holds a whole module of an unknown class; .*:Own.*safe_globals"):
        torch.load(tmp_path / "m.pt")
    with torch.serialization.safe_globals([Own]):
        assert torch.load(tmp_path / "m.pt").width == 2
    assert "Own" not in str(nn.factory.registered())
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    assert scaler.scale(torch.ones(())).item() == 4.0 == scaler.get_scale() == scaler.state_dict()["scale"]
    assert sorted(scaler.state_dict()) == ["_growth_tracker", "backoff_factor", "growth_factor", "growth_interval", "scale"]
    scaler.load_state_dict({**scaler.state_dict(), "scale": 8.0, "_growth_tracker": 5})
    assert (scaler.get_scale(), scaler.state_dict()["_growth_tracker"]) == (8.0, 5)
    with torch.autocast("cpu"):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16


def test_what_tensors_say_about_their_device(cl_device, monkeypatch, request, tmp_path):
    monkeypatch.setenv("NETCL_DEVICE", request.node.callspec.params["cl_device"].selector)
    netcl.torch.install()
    try:
        import torch

        x = torch.ones(2, device="cuda")
        assert (str(x.device), x.device.type, x.device.index, x.is_cuda, x.is_xpu) == ("cuda:0", "cuda", 0, True, False)
        assert (str(x.cpu().device), x.cpu().device.type, x.cpu().is_cuda) == ("cpu", "cpu", False)
        file = io.BytesIO()
        torch.save({"x": [x]}, file)
        for place, there in ((None, "cuda"), ("cpu", "cpu"), (lambda storage, location: storage, "cpu")):
            file.seek(0)
            assert torch.load(file, map_location=place)["x"][0].device.type == there
        torch.save({"x": x}, tmp_path / "x.pt")
        before, whole = (tmp_path / "x.pt").read_bytes(), zipfile.ZipFile

        def full(path, mode="r", *more):
            if mode == "a":
                os.truncate(path, 100)
                raise OSError(28, "No space left on device")
            return whole(path, mode, *more)

        monkeypatch.setattr("zipfile.ZipFile", full)
        with pytest.raises(OSError, match="No space left"):
            torch.save({"x": x + 1}, tmp_path / "x.pt")
        assert (tmp_path / "x.pt").read_bytes() == before and os.listdir(tmp_path) == ["x.pt"]
    finally:
        netcl.torch.uninstall()
    assert repr(x.device).startswith("DeviceHandle(") and x.device.type == cl_device.device_type


def test_names_of_training_scripts(installed, tmp_path, monkeypatch):
    import torch
    from torch.distributions.categorical import Categorical
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.modules.batchnorm import _BatchNorm
    from torch.optim.adamw import AdamW
    from torch.optim.lr_scheduler import _LRScheduler
    from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

    assert (
        AdamW is netcl.optim.AdamW
        and Categorical is netcl.distributions.Categorical
        and issubclass(torch.optim.lr_scheduler.StepLR, _LRScheduler)
    )
    assert isinstance(nn.BatchNorm1d(2), _BatchNorm) and torch.nn.SyncBatchNorm(3)(torch.ones(2, 3)).shape == (2, 3)
    with sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION]), torch.backends.cuda.sdp_kernel(enable_flash=False):
        assert torch.nn.functional.scaled_dot_product_attention(*(torch.ones(1, 2, 4),) * 3).tolist() == [[[1.0] * 4] * 2]

    @torch.jit.script
    def doubled(x):
        return x if torch.jit.is_scripting() else 2 * x

    assert torch.compiler.disable(recursive=False)(doubled)(3) == 6 and not torch.compiler.is_compiling()
    tree = {"a": (1, [2, 3])}
    leaves, spec = tree_flatten(tree)
    assert (leaves, tree_unflatten([4, 5, 6], spec), tree_map(str, tree)) == ([1, 2, 3], {"a": (4, [5, 6])}, {"a": ("1", ["2", "3"])})
    weight = torch.ones(2, requires_grad=True)
    frozen = torch.autograd.Variable(weight)
    assert weight.requires_grad and not frozen.requires_grad and f"{weight.sum()} {weight.sum():.1f}" == "2.0 2.0"
    with torch.autograd.set_detect_anomaly(True):
        masked = (weight * 2).masked_fill(torch.tensor([True, False]), float("-inf"))
        masked.softmax(0).sum().backward()  # masks have infinities
        with pytest.raises(FloatingPointError, match="sqrt"):
            torch.sqrt(weight - 2)

    class Halved(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cuda", cast_inputs=torch.float32)
        def forward(ctx, x):
            return x / 2

        @staticmethod
        @torch.cuda.amp.custom_bwd
        def backward(ctx, g):
            return g / 2

    with torch.autocast("cpu"):
        assert Halved.apply(weight.to(torch.bfloat16)).dtype == torch.float32
    assert torch.special.expit(torch.zeros(1)).item() == 0.5 and torch.nn.init.constant(torch.ones(1), 3.0).item() == 3.0
    torch.use_deterministic_algorithms(True)
    torch.testing.assert_close(torch.ones(2), torch.ones(2))
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"\[torch.hub\] the file must be there: .*download https://host/net.pt"):
        torch.hub.load_state_dict_from_url("https://host/net.pt?raw=1")
    (tmp_path / "hub" / "checkpoints").mkdir(parents=True)
    torch.save({"w": torch.ones(1)}, tmp_path / "hub" / "checkpoints" / "net.pt")
    assert torch.hub.load_state_dict_from_url("https://host/net.pt?raw=1")["w"].item() == 1.0


def test_types_of_tensors_by_name_and_class(cl_device, monkeypatch, request):
    monkeypatch.setenv("NETCL_DEVICE", request.node.callspec.params["cl_device"].selector)
    netcl.torch.install()
    try:
        import torch

        x = torch.ones(2, device="cpu")
        assert (x.type(), x.long().type(), x.cuda().type(), x.char().type()) == (
            "torch.FloatTensor", "torch.LongTensor", "torch.cuda.FloatTensor", "torch.CharTensor",
        )  # fmt: skip
        there = x.type(torch.cuda.HalfTensor)
        assert (
            there.dtype == torch.half
            and there.is_cuda
            and isinstance(there, torch.cuda.HalfTensor)
            and not isinstance(x, torch.cuda.FloatTensor)
        )
        back = there.type(torch.LongTensor)
        assert (back.dtype, back.is_cuda, x.type("torch.DoubleTensor").dtype, x.type(torch.int32).dtype) == (
            "int64",
            False,
            "float64",
            "int32",
        )
        assert torch.cuda.FloatTensor(2, 3).is_cuda and torch.cuda.FloatTensor([1.0, 2.0]).tolist() == [1.0, 2.0]
    finally:
        netcl.torch.uninstall()
    assert x.type() == "netcl.FloatTensor"


def test_memory_and_events_of_cuda(cl_device, monkeypatch, request):
    monkeypatch.setenv("NETCL_DEVICE", request.node.callspec.params["cl_device"].selector)
    netcl.torch.install()
    try:
        import torch

        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        x = torch.zeros(1 << 20, device="cuda")
        del x
        assert torch.cuda.max_memory_allocated() - before == 4 << 20 and torch.cuda.memory_allocated() == before
        assert torch.cuda.max_memory_reserved() >= torch.cuda.max_memory_allocated() and torch.accelerator.memory_reserved() >= before
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        end.record()
        assert end.query() and 0 <= start.elapsed_time(end) < 1e4
        if cl_device.profile.compute_capability is None:
            with pytest.raises(DeviceError, match=r"\[torch.cuda\] only NVIDIA devices have a compute capability"):
                torch.cuda.get_device_capability()
        state = torch.cuda.get_rng_state_all()
        first = torch.rand(2).tolist()
        torch.cuda.set_rng_state_all(state)
        assert torch.rand(2).tolist() == first
    finally:
        recording.watch_leases(None)
        netcl.torch.uninstall()


def test_summaries(installed, tmp_path):
    pytest.importorskip("tensorboardX")
    import torch
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(tmp_path / "run", flush_secs=1) as writer:
        writer.add_scalar("loss", torch.tensor(0.5), 1)
        writer.add_scalars("both", {"a": torch.tensor(1.0), "b": 2.0}, global_step=1)
        writer.add_histogram("weights", torch.ones(5), 1)
        writer.add_image("picture", torch.ones(3, 4, 4), 1)
        if importlib.util.find_spec("onnx"):
            writer.add_graph(nn.Linear(2, 1), torch.ones(1, 2))
        assert writer.log_dir == str(tmp_path / "run")
    (file,) = (tmp_path / "run").glob("events*")
    assert b"loss" in file.read_bytes() and b"weights" in file.read_bytes()


def test_a_variable_may_take_the_name_of_a_module(tmp_path):
    text = "from torch import optim\noptim = optim.SGDD([], 1)\noptim.step()\n"
    assert netcl.torch.missing(written(tmp_path, text)) == {"torch.optim.SGDD": "script.py:2"}


def test_process_groups_and_wrapped_models(installed):
    import torch
    import torch.distributed as dist

    with pytest.raises(RuntimeError, match=r"\[torch.distributed\] a process group is required; call init_process_group"):
        dist.get_rank()
    with pytest.raises(
        RuntimeError, match=r"\[init_process_group\] world_size must be the number of ranks .*; world_size=3, .*mpiexec -n 3"
    ):
        dist.init_process_group("nccl", world_size=3, rank=0)
    with pytest.raises(RuntimeError, match=r"rank that of this process; world_size=1, started=1, rank=1"):
        dist.init_process_group("gloo", world_size=1, rank=1)
    dist.init_process_group("gloo")
    total = torch.tensor([2.0])
    dist.all_reduce(total, op=dist.ReduceOp.SUM)
    parts, whole, objects = [torch.zeros(1)], torch.zeros(1), [None]
    dist.all_gather(parts, total)
    dist.all_gather_into_tensor(whole, total)
    dist.all_gather_object(objects, {"n": 1})
    dist.reduce(total, dst=0)
    dist.broadcast_object_list(listed := ["x", 2], src=0)
    assert (parts[0].item(), whole.item(), objects, listed, total.item()) == (2.0, 2.0, [{"n": 1}], ["x", 2], 2.0)
    model = torch.nn.parallel.DistributedDataParallel(nn.Linear(2, 1), device_ids=None)
    assert (dist.get_rank(), dist.get_world_size(), total.tolist(), model(torch.ones(3, 2)).shape) == (0, 1, [2.0], (3, 1))
    doubled = torch.nn.parallel.data_parallel(lambda x, by: x * by, torch.ones(2), None, None, 0, {"by": 2.0})
    assert doubled.tolist() == [2.0, 2.0]
    with pytest.raises(ValueError, match=r"\[DataParallel\] dim must be 0"):
        torch.nn.DataParallel(nn.Linear(2, 1), dim=1)
    dist.destroy_process_group()
    assert not dist.is_initialized() and list(nn.Module.state_dict(torch.nn.DataParallel(nn.Linear(2, 1)))) == [
        "module.weight",
        "module.bias",
    ]


def test_names_that_libraries_of_models_import(installed):
    import torch
    import torch.fx
    from torch.hub import HASH_REGEX, download_url_to_file, urlparse
    from torch.jit.annotations import List
    from torch.nn.init import _calculate_fan_in_and_fan_out
    from torch.nn.modules.instancenorm import _InstanceNorm
    from torch.utils.hooks import RemovableHandle
    from torchvision.ops.boxes import box_area
    from torchvision.ops.misc import FrozenBatchNorm2d

    assert isinstance(torch.nn.ReLU().register_forward_hook(print), RemovableHandle) and box_area(torch.ones(1, 4)).item() == 0
    assert torch.fx.wrap(len) is len and torch.fx.wrap("len") == "len" and List[int].__origin__ is list
    assert HASH_REGEX.search("resnet18-5c106cde.pth").group(1) == "5c106cde" and urlparse("http://a/b").path == "/b"
    with pytest.raises(OSError, match=r"\[torch\.hub\] a file must be there: netcl downloads nothing; path=x; download http://a/b"):
        download_url_to_file("http://a/b", "x")
    assert _calculate_fan_in_and_fan_out(torch.empty(4, 3, 2, 2)) == (12, 16) and isinstance(torch.nn.InstanceNorm2d(3), _InstanceNorm)
    assert (torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cpu"), torch.get_autocast_dtype("cuda")) == (
        False,
        torch.bfloat16,
        torch.float16,
    )
    with pytest.raises(DtypeError, match="complex64"):
        torch.zeros(2, dtype=torch.complex64)
    frozen = FrozenBatchNorm2d(3)
    frozen.running_mean, frozen.running_var, frozen.weight = torch.tensor([1.0, 2, 3]), torch.tensor([1.0, 4, 9]), torch.tensor([1.0, 2, 1])
    x = torch.randn(2, 3, 4, 4)
    plain = torch.nn.BatchNorm2d(3).eval()
    plain.load_state_dict(frozen.state_dict(), strict=False)
    torch.testing.assert_close(frozen(x), plain(x))
    frozen.load_state_dict(plain.state_dict())  # without num_batches_tracked
    assert list(frozen.parameters()) == [] and list(frozen.state_dict()) == ["weight", "bias", "running_mean", "running_var"]


def test_torchvision(installed, tmp_path):
    pytest.importorskip("PIL")
    from torchvision import datasets, models, transforms
    from torchvision.models import segmentation
    from torchvision.ops import nms
    from torchvision.transforms import v2
    from torchvision.utils import make_grid

    assert models.segmentation is segmentation and callable(segmentation.fcn_resnet50) and nms.__name__ == "nms"
    assert models.squeezenet1_1(weights=None, num_classes=2).classifier[1].out_channels == 2 and issubclass(models.VGG, nn.Module)
    assert (
        "resnet18" in models.__dict__
        and "efficientnet_b0" in models.__dict__
        and v2.Resize is transforms.Resize
        and make_grid.__name__ == "make_grid"
    )

    folder = tmp_path / "MNIST" / "raw"
    folder.mkdir(parents=True)
    pixels = np.arange(2 * 4 * 4, dtype=np.uint8).reshape(2, 4, 4)
    for part in ("train", "t10k"):
        (folder / f"{part}-images-idx3-ubyte").write_bytes(np.array([0x803, 2, 4, 4], ">i4").tobytes() + pixels.tobytes())
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(np.array([0x801, 2], ">i4").tobytes() + bytes([7, 3]))
    to_tensor = transforms.Compose([transforms.RandomHorizontalFlip(1.0), transforms.ToTensor(), transforms.Normalize((0.5,), (0.25,))])
    data = datasets.MNIST(str(tmp_path), train=True, download=True, transform=to_tensor)
    image, label = data[1]
    assert (len(data), label, image.shape) == (2, 3, (1, 4, 4))
    assert np.allclose(image.numpy()[0], (pixels[1][:, ::-1] / 255 - 0.5) / 0.25, atol=1e-6)


def test_processes_are_started_by_mpi(installed):
    import torch.multiprocessing as mp

    seen = []
    mp.spawn(lambda rank, word: seen.append((rank, word)), args=("x",), nprocs=1)
    assert seen == [(0, "x")]
    with pytest.raises(RuntimeError, match=r"\[torch.multiprocessing.spawn\] .*; nprocs=2; start the ranks with mpiexec -n 2 python"):
        mp.spawn(print, nprocs=2)


def test_states_of_random_numbers_are_saved(installed, tmp_path):
    import torch

    for get, put in ((torch.get_rng_state, torch.set_rng_state), (torch.cuda.get_rng_state, torch.cuda.set_rng_state)):
        torch.save({"rng": get()}, tmp_path / "state.pt")
        first = torch.rand(3).tolist(), list(torch.utils.data.RandomSampler(range(20)))
        put(torch.load(tmp_path / "state.pt")["rng"])
        assert (torch.rand(3).tolist(), list(torch.utils.data.RandomSampler(range(20)))) == first and get().dtype == torch.uint8
    x = torch.ones(2, requires_grad=True)
    torch.utils.checkpoint.checkpoint(torch.tanh, x, use_reentrant=False, preserve_rng_state=False).sum().backward()
    assert x.grad is not None
    generator = torch.manual_seed(3)
    assert torch.rand(2, generator=generator).shape == (2,)
    assert [part.tolist() for part in torch.where(torch.tensor([0, 1, 1]) > 0)] == [[1, 2]]


@pytest.mark.parametrize(("dimensions", "axis"), [(1, 0), (2, 1), (3, 0), (4, 1)])
def test_softmax_without_dim_is_along_torchs_axis(installed, dimensions, axis):
    import torch

    x = torch.arange(float(2**dimensions)).reshape((2,) * dimensions) ** 2
    for found in (torch.nn.functional.softmax(x), torch.nn.Softmax()(x), torch.nn.LogSoftmax()(x).exp(), torch.nn.Softmin()(-x)):
        np.testing.assert_allclose(found.numpy(), netcl.softmax(x, axis).numpy(), rtol=1e-5)
