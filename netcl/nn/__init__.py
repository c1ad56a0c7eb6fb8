"""Neural networks: modules with parameters, under torch's names and in torch's layouts."""

from __future__ import annotations

from netcl.nn import factory, init
from netcl.nn.activation import (
    CELU,
    ELU,
    GELU,
    GLU,
    SELU,
    Activation,
    Hardsigmoid,
    Hardswish,
    Hardtanh,
    LeakyReLU,
    LogSigmoid,
    LogSoftmax,
    Mish,
    PReLU,
    ReLU,
    ReLU6,
    Sigmoid,
    SiLU,
    Softmax,
    Softplus,
    Softsign,
    Swish,
    Tanh,
)
from netcl.nn.container import Concat, Identity, ModuleDict, ModuleList, Residual, Sequential
from netcl.nn.conv import Conv1d, Conv2d, ConvTranspose2d, DepthwiseConv2d
from netcl.nn.dropout import Dropout, Dropout1d, Dropout2d
from netcl.nn.factory import build, build_sequential, config_of, register_layer, unregister_layer
from netcl.nn.linear import Bilinear, Linear
from netcl.nn.module import Module
from netcl.nn.parameter import Parameter
from netcl.nn.recurrent import GRU, LSTM, RNN
from netcl.nn.shape import Flatten, PixelShuffle, PixelUnshuffle, Unflatten, Upsample

__all__ = [
    "CELU", "ELU", "GELU", "GLU", "GRU", "LSTM", "RNN", "SELU", "Activation", "Bilinear", "Concat", "Conv1d", "Conv2d",
    "ConvTranspose2d", "DepthwiseConv2d", "Dropout", "Dropout1d", "Dropout2d", "Flatten", "Hardsigmoid", "Hardswish", "Hardtanh",
    "Identity", "LeakyReLU", "Linear", "LogSigmoid", "LogSoftmax", "Mish", "Module", "ModuleDict", "ModuleList", "PReLU",
    "Parameter", "PixelShuffle", "PixelUnshuffle", "ReLU", "ReLU6", "Residual", "Sequential", "SiLU", "Sigmoid", "Softmax",
    "Softplus", "Softsign", "Swish", "Tanh", "Unflatten", "Upsample", "build", "build_sequential", "config_of", "factory", "init",
    "register_layer", "unregister_layer",
]  # fmt: skip

for _name in __all__:
    _made = globals()[_name]
    if isinstance(_made, type) and issubclass(_made, Module) and _made not in (Module, Activation):
        register_layer(_name, _made)
