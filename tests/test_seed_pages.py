"""The snippets of the pages netcl is built from, as printed, on every device where they make sense.

``tests/seeds/<page>_<what>.py`` holds a snippet; only lost indentation was restored. A test supplies the names its reader
has to bring (an array, a queue), runs the snippet and checks what the page says about it.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import re
import subprocess
import sys
import typing
import warnings
from pathlib import Path

import numpy as np
import pytest

SEEDS = Path(__file__).parent / "seeds"


def run(snippet: str, **names: object) -> dict:
    """Run a snippet with what its reader supplies; returns the names it leaves behind."""
    path = SEEDS / f"{snippet}.py"
    namespace = {"__name__": __name__, **names}  # dataclasses look their module up by name
    exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), namespace)
    return namespace


@pytest.fixture
def default_device(request, device, monkeypatch):
    """``device``, as the one netcl takes when a program names none."""
    monkeypatch.setenv("NETCL_DEVICE", request.node.callspec.params["device"].selector)
    return device


# Page 000: Tensor


def test_tensor(default_device, rng, capsys):
    numpy_array = rng.standard_normal((4, 1024), np.float32)
    after = run("000_tensor", numpy_array=numpy_array)
    assert capsys.readouterr().out == "(4, 1024)\nFalse\n"
    assert after["queue"] is default_device.queue and after["ctx"] is default_device.context
    assert "t" not in after
    np.testing.assert_array_equal(after["host"], numpy_array)


def test_tensor_fields():
    from netcl.core.tensor import Tensor

    printed = [
        "buffer",
        "shape",
        "dtype",
        "context",
        "queue",
        "pool_handle",
        "persistent",
        "requires_grad",
        "grad",
        "grad_fn",
        "host_ref",
        "array",
    ]
    assert dataclasses.is_dataclass(Tensor)
    assert set(printed) | {"pending_event"} <= {field.name for field in dataclasses.fields(Tensor)}


# Page 001: core


def test_manager(default_device, capsys):
    dev = run("001_manager")["dev"]
    assert dev is default_device
    names, types = capsys.readouterr().out.splitlines()
    assert names == f"{dev.platform_name} {dev.device_name} {dev.backend} {dev.device_type}"
    assert "Queue" in types


def test_active_device(device):
    from netcl.core.device import get_active_device, manager

    before = get_active_device()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=RuntimeWarning)  # where there is no GPU
        if manager.default("gpu") is None:
            pytest.skip("the page asks for a GPU, and no OpenCL device is visible")
        dev = run("001_active_device")["dev"]
        assert dev is manager.default("gpu")
    assert get_active_device() is before is device


def test_device_handle(device):
    from netcl.core.device import DeviceHandle

    printed = re.findall(r"^    (\w+): ", (SEEDS / "001_device_handle.py").read_text(encoding="utf-8"), re.M)
    assert [field.name for field in dataclasses.fields(DeviceHandle)] == printed
    assert all(hasattr(device, name) for name in printed)
    with pytest.raises(dataclasses.FrozenInstanceError):
        device.backend = "other"


def test_factories(default_device, rng):
    host_ndarray = rng.standard_normal((3, 5), np.float32)
    after = run("001_factories", host_ndarray=host_ndarray)
    assert after["q"] is default_device.queue
    np.testing.assert_array_equal(after["a"].to_host(), host_ndarray)
    np.testing.assert_array_equal(after["b"].to_host(), np.zeros((4, 8), np.float32))


def test_buffer_pool(cl_device, capsys):
    pool = run("001_buffer_pool", context=cl_device.context, nbytes=1000)["pool"]
    assert capsys.readouterr().out == "0 1 1024\n"
    assert pool.allocate(1000).buffer.size == 1024 and pool.stats.hits == 1


def test_persistent_pool(cl_device, capsys):
    pool = run("001_persistent_pool", queue=cl_device.queue)["pool"]
    assert list(pool.get_stats()) == ["hits", "misses", "hit_rate", "bytes_allocated", "bytes_cached", "buckets"]
    assert capsys.readouterr().out.startswith("{'hits': ")


def test_cpu_backend(rng, capsys):
    host_arr = rng.standard_normal((4, 8), np.float32)
    after = run("001_cpu_backend", host_arr=host_arr)
    assert capsys.readouterr().out == f"{host_arr}\n"
    assert np.shares_memory(after["be"].to_host(after["x"], (4, 8), "float32"), after["x"])
    np.testing.assert_array_equal(after["y"], np.zeros((4, 8), np.float32))


def test_kernel_spec_source():
    from netcl.core.kernels.primitives import PRIMITIVE_PREAMBLE

    src = run("001_kernel_spec")["src"]
    assert src.startswith(PRIMITIVE_PREAMBLE.strip().split("\n")[0])
    assert re.search(r"__kernel void vec_add\(\s*__global const float\* a,\s*__global const float\* b,\s*__global float\* c\s*\)", src)
    assert set(["LOAD", "STORE", "ADD", "SUB", "MUL", "DIV", "RELU"]) <= set(re.findall(r"#define (\w+)", src))


def test_primitive_builder(cl_device, rng):
    spec = run("001_primitive_builder")["spec"]
    check_mul_add(cl_device, rng, spec.build(cl_device.context))


def test_build_elementwise_kernel(cl_device, rng):
    after = run("001_build_elementwise_kernel", context=cl_device.context)
    assert after["spec"].name == "mul_add"
    check_mul_add(cl_device, rng, after["kernel"])


def check_mul_add(cl_device, rng, kernel):
    from netcl.core.tensor import Tensor

    a, b = rng.standard_normal((2, 257), np.float32)
    out = Tensor.from_shape(cl_device.queue, (257,))
    kernel(cl_device.queue, (257,), None, Tensor.from_host(cl_device.queue, a), Tensor.from_host(cl_device.queue, b), out, 257)
    np.testing.assert_allclose(out.to_host(), (a + b) * 2, rtol=1e-6)


def test_kernel_config():
    from netcl.core.kernel_selector import KernelConfig, KernelVariant

    supplied = {"dataclass": dataclasses.dataclass, "field": dataclasses.field, "KernelVariant": KernelVariant}
    printed = run("001_kernel_config", **supplied, Tuple=tuple, Dict=dict, Any=typing.Any)["KernelConfig"]
    variant = KernelVariant.MATMUL_TILED
    assert dataclasses.asdict(KernelConfig(variant)) == dataclasses.asdict(printed(variant))


def test_device_profile(cl_device):
    prof = run("001_device_profile", queue=cl_device.queue)["prof"]
    assert prof.has_fp16 == prof.supports_fp16 == ("fp16" in cl_device.queue.device.extensions)


#: The module paths and names of the pages and of the public surface. They stay importable, whatever moves inside.
SYMBOLS = {
    "netcl": "Tensor KernelSpec device matmul build_matmul_kernel elementwise_binary relu bias_add reduce_sum softmax conv2d tensor zeros "
    "ones full arange manual_seed no_grad compile save load kernel synchronize",
    "netcl.core": "DeviceManager DeviceHandle manager Tensor BufferPool BufferHandle",
    "netcl.core.device": "DeviceManager DeviceHandle manager CPUQueue device get_active_device",
    "netcl.core.tensor": "Tensor",
    "netcl.core.memory": "BufferPool BufferHandle PoolStats PinnedBufferPool PersistentBufferPool is_integrated_gpu has_svm_support "
    "create_pinned_buffer create_zero_copy_buffer get_pinned_pool get_persistent_pool empty_cache memory_stats memory_summary",
    "netcl.core.backend": "",
    "netcl.core.backend.opencl": "OpenCLBackend interruptible_finish",
    "netcl.core.backend.cpu": "CPUBackend",
    "netcl.core.capabilities": "DeviceProfile kernel_strategy device_profile",
    "netcl.core.device_profile": "ExtendedDeviceProfile",
    "netcl.core.kernels.primitives": "KernelSpec PRIMITIVE_PREAMBLE WorkGroupTuner PrimitiveBuilder build_elementwise_kernel",
    "netcl.core.kernel_selector": "KernelSelector KernelVariant KernelConfig get_kernel_selector select_matmul_config select_conv2d_config",
    "netcl.ops": "matmul elementwise_unary elementwise_binary bias_add reduce_sum reduce_mean reduce_max softmax conv2d cross_entropy",
    "netcl.autograd": "Tape Node apply_op no_grad enable_grad set_grad_enabled is_grad_enabled detect_anomaly set_detect_anomaly "
    "set_current_tape get_current_tape tensor grad Function gradcheck gradgradcheck checkpoint jit_compile AutogradPrimitive "
    "register_primitive TraceNode TracingContext CompiledGraph TrainingGraphCompiler debug_tape cross_entropy",
    "netcl.autograd.ops": "matmul relu softmax conv2d",
    "netcl.nn": "Module Linear Conv2d BatchNorm2d Sequential ResNet ResNet18 BasicBlock Bottleneck resnet18 resnet34 resnet50 resnet101 "
    "resnet152 MLP LeNet GPT ViT KVCache init functional factory",
    "netcl.nn.factory": "build_sequential register_layer",
    "netcl.optim": "SGD Adam AdamW RMSProp Momentum Lion CosineAnnealingLR WarmupCosine ReduceLROnPlateau StepLR OneCycleLR LambdaLR "
    "clip_grad_norm clip_grad_norm_device ModelEMA AMPGradScaler",
    "netcl.amp": "autocast GradScaler is_autocast_enabled supports_fp16 maybe_cast_tensor master_param",
    "netcl.runtime.cache": "ProgramCache program_cache KernelHandle",
    "netcl.runtime.capture": "capture_graph Graph",
    "netcl.runtime.graph_fusion": "fuse_graph",
    "netcl.runtime.scheduler": "Stream",
    "netcl.runtime.perf": "PerfCounter timing_region",
    "netcl.profiling": "profile EventTimer",
    "netcl.profiling.autotuner": "autotune_matmul autotune_conv2d Autotuner AutotuneResult autotune",
    "netcl.profiling.timing": "",
    "netcl.data": "Dataset TensorDataset DataLoader SharedBatchRingBuffer random_split split_dataset",
    "netcl.data.augment": "",
    "netcl.data.augment_gpu": "",
    "netcl.data.filters": "",
    "netcl.data.datasets": "",
    "netcl.data.shared_batch": "",
    "netcl.trainer": "Trainer EarlyStopping ModelCheckpoint",
    "netcl.io": "save_model load_model save_checkpoint load_checkpoint save_params load_params export_onnx import_onnx",
    "netcl.distributed": "all_reduce broadcast scatter gather reduce all_gather all_reduce_p2p shard_batch replicate_params "
    "broadcast_params prepare_replicas sync_grads data_parallel_step DataParallel DeviceManager DistributedDataParallel",
    "netcl.distributed.replica": "",
    "netcl.utils.data": "DataLoader",
}


@pytest.mark.parametrize("module", SYMBOLS)
def test_symbols(module):
    found = importlib.import_module(module)
    assert [name for name in SYMBOLS[module].split() if not hasattr(found, name)] == []


def test_reexports():
    import netcl.core

    assert sorted(netcl.core.__all__) == sorted(["DeviceManager", "DeviceHandle", "manager", "Tensor", "BufferPool", "BufferHandle"])


ENVIRONMENT = {
    "NETCL_KERNEL_STRATEGY": "auto",
    "NETCL_CONV_WINOGRAD": "1",
    "NETCL_CONV_TILED_LOCAL": "0",
    "NETCL_MAX_CACHED_GB": "4",
    "NETCL_ASYNC_H2D": "1",
    "NETCL_PINNED_H2D": "1",
    "NETCL_PROFILE_EVENTS": "0",
}


def test_environment():
    from netcl.core.env import VARIABLES

    assert {name: VARIABLES[name].default for name in ENVIRONMENT} == ENVIRONMENT


# Page 003: PyOpenCL


def test_pyopencl(request, cl_device, monkeypatch):
    monkeypatch.setenv("PYOPENCL_CTX", request.node.callspec.params["cl_device"].selector)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Non-empty compiler output")  # some drivers answer every build with a log
        after = run("003_pyopencl")
    np.testing.assert_array_equal(after["host_out"], np.maximum(after["host_in"], 0))


def test_netcl_equivalent(device, rng):
    host_in = rng.standard_normal(1024, np.float32)
    after = run("003_netcl", host_in=host_in)
    assert after["x"].queue is device.queue
    np.testing.assert_array_equal(after["host_out"], np.maximum(host_in, 0))


@pytest.mark.parametrize("n", [1, 3, 255, 257, 1024])
def test_kernel_spec_run(cl_device, rng, n):
    from netcl.core.tensor import Tensor

    host = rng.standard_normal(n, np.float32)
    x = Tensor.from_host(cl_device.queue, host)
    run("003_kernel_spec", queue=cl_device.queue, n=n, x=x)
    np.testing.assert_array_equal(x.to_host(), 2 * host)


@pytest.mark.parametrize(
    "call",
    [
        'nc.KernelSpec(name="k", src="__kernel void k(__global float* x) {}").build(nc.device.manager.default().queue)',
        "BufferPool(nc.device.manager.default().context)",
        "OpenCLBackend(nc.device.manager.default().queue)",
    ],
)
def test_without_pyopencl_the_import_succeeds_and_opencl_raises(call):
    code = f"""
import sys
sys.modules["pyopencl"] = None
import netcl as nc
from netcl.core.backend.opencl import OpenCLBackend
from netcl.core.memory import BufferPool
try:
    {call}
except ImportError as error:
    print(error)
"""
    environment = {**os.environ, "NETCL_DEVICE": "auto"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.stdout.startswith("pyopencl required"), done.stderr


# Page 004: questions


def test_finish_ends_a_measured_region(device):
    import time

    from netcl.core.tensor import Tensor

    start = time.perf_counter()
    Tensor.from_host(device.queue, np.ones(1000, np.float32))
    device.queue.finish()
    assert time.perf_counter() > start


def test_profile_events_gives_timestamps(request, cl_device):
    code = """
import netcl as nc
queue = nc.device.manager.default().queue
spec = nc.KernelSpec(name="k", src="__kernel void k(__global float* x) { x[get_global_id(0)] += 1; }")
event = spec.build(queue).run(queue, (64,), None, nc.Tensor.zeros((64,), queue=queue))
event.wait()
print(event.profile.end > event.profile.start > 0)
"""
    environment = {"NETCL_PROFILE_EVENTS": "1", "NETCL_DEVICE": request.node.callspec.params["cl_device"].selector}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **environment})
    assert done.stdout == "True\n", done.stderr
