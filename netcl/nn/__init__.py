"""Neural networks: layers and models. Layers that torch also has use torch's names and weight layouts."""

from __future__ import annotations

import difflib as _difflib
import importlib as _importlib
from typing import Any

from netcl.nn import activation, factory, functional, init, utils
from netcl.nn.factory import build, build_sequential, config_of, register_layer, unregister_layer
from netcl.nn.loss import Loss as _Loss
from netcl.nn.module import Module
from netcl.nn.parameter import Buffer, Parameter
from netcl.nn.resnet import ResNet18, resnet18, resnet34, resnet50, resnet101, resnet152
from netcl.nn.vit import vit_small

_MODELS = (ResNet18, resnet18, resnet34, resnet50, resnet101, resnet152, vit_small)
__all__ = [
    "Buffer", "Module", "Parameter", "ResNet18", "build", "build_sequential", "config_of", "factory", "functional", "init",
    "register_layer", "resnet18", "resnet34", "resnet50", "resnet101", "resnet152", "unregister_layer", "utils", "vit_small",
]  # fmt: skip
#: Where the layers are. A module without ``__all__`` exports every public layer that it defines; ``__init__.pyi`` lists all of them.
_LAYERS = """activation adaptive_softmax attention composed container conv dropout embedding gpt lazy lenet linear loss mlp norm pool
    quantized recurrent resnet shape transformer vit""".split()


for _module in (vars(_importlib.import_module(f"netcl.nn.{_name}")) for _name in _LAYERS):
    # Modules are compared first: list[int] is a type to Python 3.10, and issubclass() refuses it.
    _own = {name: value for name, value in _module.items() if isinstance(value, type) and value.__module__ == _module["__name__"]}
    _public = [name for name, value in _own.items() if name[0] != "_" and issubclass(value, Module) and value is not _Loss]
    _names = _module.get("__all__", _public)
    globals().update({name: _module[name] for name in _names})
    __all__ += _names
__all__.sort()

for _name in __all__:
    _made = globals()[_name]
    if _made in _MODELS or (isinstance(_made, type) and issubclass(_made, Module) and _made not in (Module, activation.Activation)):
        register_layer(_name, _made)


def __getattr__(name: str) -> Any:
    near = [] if name.startswith("__") else _difflib.get_close_matches(name, __all__, n=3)
    raise AttributeError(f"module 'netcl.nn' has no attribute {name!r}" + (f"; the nearest names are {', '.join(near)}" if near else ""))
