"""The modules that ``import torch`` and ``import torchvision`` import, and a table of the netcl modules that provide their names."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
from functools import cache
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import netcl.autograd as ag
from netcl import nn
from netcl.core.tensor import RemovableHandle, Tensor
from netcl.nn import init
from netcl.optim import schedule
from netcl.torch import adapters, averaging, devices, files, parallel
from netcl.torch.tensorboard import SummaryWriter
from netcl.vision import models


class MissingNameError(AttributeError):
    """Raised for a name of torch that netcl does not have."""

    def __init__(self, text: str, full_name: str):
        super().__init__(text)
        self.full_name = full_name


_SAME = """autograd.functional distributions fft func linalg nn.parameter nn.utils nn.utils.parametrizations
    nn.utils.parametrize nn.utils.prune nn.utils.rnn optim optim.optimizer optim.swa_utils""".split()
_LAYERS = """activation adaptive batchnorm channelshuffle container conv distance dropout flatten fold instancenorm linear loss module
    normalization padding pixelshuffle pooling rnn sparse transformer upsampling utils""".split()
_DATA, _TRANSFORMS, _FUNCTIONAL = ("netcl.utils.data",), ("netcl.vision.transforms",), ("netcl.vision.functional",)
_BASES = {
    "NonDynamicallyQuantizableLinear": nn.Linear, "_BatchNorm": nn.BatchNorm1d.__base__, "_InstanceNorm": nn.InstanceNorm1d.__base__,
    "_ConvNd": nn.Conv2d.__base__, "_WeightedLoss": nn.CrossEntropyLoss.__base__,
}  # fmt: skip
_NN = {**parallel.NN, **adapters.SOFTMAX_LAYERS}
_OFF: dict[str, Any] = dict.fromkeys(("is_available", "is_built", "is_initialized"), lambda: False)
_DISTRIBUTIONS = """bernoulli beta categorical dirichlet distribution exponential gamma geometric gumbel independent kl laplace log_normal
    multivariate_normal normal one_hot_categorical poisson studentT transformed_distribution transforms uniform"""
_WITH_PARTS = {  # modules whose names are those of the module above
    "distributions": ("netcl.distributions", _DISTRIBUTIONS),
    "optim": ("netcl.optim", "adadelta adagrad adam adamax adamw asgd lbfgs nadam radam rmsprop rprop sgd"),
}
_ATTENTION_KERNELS = {f"enable_{kind}_sdp": lambda enabled: None for kind in ("flash", "math", "mem_efficient", "cudnn")}
_STATES = {"get_rng_state": devices.rng_state, "set_rng_state": devices.set_rng_state}
_CUDNN = {**_OFF, "version": lambda: None, "enabled": False, "benchmark": False, "deterministic": False, "allow_tf32": False}

#: Module: the modules of netcl that its names are looked up in, and names of its own, which come first.
TABLE: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "torch": (("netcl",), {**adapters.ROOT, **_STATES, "device": devices.device, "__version__": "2.13.0+netcl"}),
    "torch.accelerator": ((), devices.ACCELERATOR),
    "torch.amp": (("netcl.amp",), adapters.AMP),
    "torch.autograd": (("netcl.autograd",), adapters.AUTOGRAD),
    **{
        f"torch.autograd.{part}": (("netcl.autograd",), adapters.AUTOGRAD) for part in ("anomaly_mode", "function", "grad_mode", "variable")
    },
    "torch.backends": ((), {}),
    "torch.backends.cuda": (
        (),
        {**_OFF, **_ATTENTION_KERNELS, "matmul": SimpleNamespace(allow_tf32=False), "sdp_kernel": adapters.ATTENTION["sdpa_kernel"]},
    ),
    "torch.backends.cudnn": ((), _CUDNN),
    "torch.backends.mps": ((), _OFF),
    "torch.compiler": ((), adapters.COMPILER),
    "torch.cuda": ((), {**adapters.CUDA_TENSORS, **devices.CUDA}),
    "torch.cuda.amp": (("netcl.amp",), adapters.CUDA_AMP),
    "torch.distributed": ((), parallel.DISTRIBUTED),
    "torch.fx": ((), {"wrap": adapters.JIT["ignore"]}),  # a mark for a tracer
    "torch.hub": (("tqdm",), files.HUB),
    "torch.jit": ((), adapters.JIT),
    "torch.jit.annotations": (("typing",), {}),
    "torch.mps": ((), _OFF),
    "torch.multiprocessing": (("multiprocessing",), {"spawn": parallel.spawn}),
    **{f"torch.{name}": ((f"netcl.{name}",), {}) for name in _SAME},
    **{f"torch.{name}.{part}": ((source,), {}) for name, (source, parts) in _WITH_PARTS.items() for part in parts.split()},
    "torch.nn": (("netcl.nn",), _NN),
    "torch.nn.attention": ((), adapters.ATTENTION),
    "torch.nn.functional": (("netcl.nn.functional",), adapters.FUNCTIONAL),
    "torch.nn.modules": (("netcl.nn",), _NN),
    **{f"torch.nn.modules.{name}": (("netcl.nn",), {**_NN, **_BASES}) for name in _LAYERS},
    "torch.nn.modules.utils": ((), adapters.TUPLES),
    "torch.nn.parallel": ((), parallel.PARALLEL),
    "torch.nn.parallel.distributed": ((), parallel.PARALLEL),
    "torch.nn.init": (
        ("netcl.nn.init",),
        {"_calculate_fan_in_and_fan_out": init.fan_in_and_fan_out}
        | {name[:-1]: getattr(init, name) for name in vars(init) if name[-1] == "_" != name[0]},
    ),
    "torch.onnx": ((), {"export": adapters.export_onnx}),
    "torch.optim.lr_scheduler": (("netcl.optim.schedule",), {"_LRScheduler": schedule.LRScheduler}),
    "torch.optim.swa_utils": ((), averaging.SWA_NAMES),
    "torch.overrides": ((), {"is_tensor_like": lambda x: isinstance(x, Tensor)}),
    "torch.profiler": ((), {"record_function": adapters.record_function}),
    "torch.autograd.profiler": ((), {"record_function": adapters.record_function}),
    "torch.random": (("netcl",), {"manual_seed": adapters.manual_seed, **_STATES}),
    "torch.serialization": ((), files.SERIALIZATION),
    "torch.special": (("netcl",), {"expit": ag.sigmoid, "gammaln": ag.lgamma, "psi": ag.digamma}),
    "torch.testing": (("netcl.testing",), {}),
    "torch._utils": ((), adapters.FLAT),
    "torch.utils": ((), {}),
    "torch.utils._pytree": ((), adapters.PYTREE),
    "torch.utils.checkpoint": ((), {"checkpoint": adapters.checkpoint, "checkpoint_sequential": adapters.checkpoint_sequential}),
    "torch.utils.data": (_DATA, {}),
    **{f"torch.utils.data.{part}": (_DATA, {}) for part in ("dataloader", "dataset", "distributed", "sampler")},
    "torch.utils.hooks": ((), {"RemovableHandle": RemovableHandle}),
    **{f"torch.utils.tensorboard{part}": ((), {"SummaryWriter": SummaryWriter}) for part in ("", ".writer")},
    "torch.version": ((), {"__version__": "2.13.0+netcl", "cuda": None, "hip": None}),
    "torch.xpu": ((), _OFF),
    "torchvision": ((), {"__version__": "0.28.0+netcl"}),
    "torchvision.datasets": (("netcl.vision.datasets",), {}),
    "torchvision.datasets.folder": (("netcl.vision.datasets",), {}),
    "torchvision.models": (("netcl.vision.models",), {name: getattr(models, name) for name in models.__all__}),  # scripts list __dict__
    **{f"torchvision.models.{part}": ((f"netcl.vision.models.{part}",), {}) for part in ("detection", "segmentation")},
    **{f"torchvision.ops{part}": (("netcl.vision.ops",), {}) for part in ("", ".boxes", ".misc")},
    "torchvision.transforms": (_TRANSFORMS, {}),
    "torchvision.transforms.functional": (_FUNCTIONAL, {}),
    "torchvision.transforms.v2": (_TRANSFORMS, {}),
    "torchvision.transforms.v2.functional": (_FUNCTIONAL, {}),
    "torchvision.utils": (("netcl.vision.utils",), {}),
}


class TorchModule(ModuleType):
    """A stand-in for a module of torch; its names are looked up in netcl."""

    def __init__(self, name: str):
        super().__init__(name, f"{name}, provided by netcl.")  # first: before Python 3.11 a module has no __dict__ until then
        self.__dict__["_sources"], own = TABLE[name]
        self.__path__: list[str] = []
        self.__spec__ = ModuleSpec(name, None, is_package=True)
        self.__dict__.update(own)

    def __getattr__(self, name: str) -> Any:
        if name == "__all__":
            return [listed for listed in dir(self) if not listed.startswith("_")]
        if not name.startswith("__"):
            for source in filter(importlib.util.find_spec, self._sources):
                value = getattr(importlib.import_module(source), name, importlib)
                if not isinstance(value, ModuleType):  # packages of netcl are modules of torch only by the table
                    return value
        full = f"{self.__name__}.{name}"
        raise MissingNameError(f"netcl has no {full}{nearest(full)}", full)

    def __dir__(self) -> list[str]:
        sources = [importlib.import_module(source) for source in filter(importlib.util.find_spec, self._sources)]
        theirs = {listed for source in sources for listed in dir(source) if not isinstance(getattr(source, listed, source), ModuleType)}
        return sorted({*self.__dict__, *theirs})

    def __reduce__(self) -> Any:
        return importlib.import_module, (self.__name__,)


@cache
def modules() -> dict[str, TorchModule]:
    """Return the stand-ins for torch's modules by name, each an attribute of its parent."""
    made = {name: TorchModule(name) for name in TABLE}
    for name, module in made.items():
        above, _, last = name.rpartition(".")
        if above:
            setattr(made[above], last, module)
    return made


def nearest(full_name: str) -> str:
    """Return ``", the nearest name is torch.y"`` for a missing ``torch.x``; empty if none is near."""
    above, _, last = full_name.rpartition(".")
    found = difflib.get_close_matches(last, dir(modules()[above]), n=1) if above in TABLE else []
    return f", the nearest name is {above}.{found[0]}" if found else ""
