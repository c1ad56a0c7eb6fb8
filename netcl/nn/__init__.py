"""Neural networks: modules with parameters, under torch's names and in torch's layouts."""

from __future__ import annotations

import difflib as _difflib
from typing import Any

from netcl.nn import activation, composed, factory, functional, init, lazy, loss, pool, shape, utils
from netcl.nn.activation import *  # noqa: F403, layers of tables
from netcl.nn.adaptive_softmax import AdaptiveLogSoftmaxWithLoss
from netcl.nn.attention import CausalSelfAttention, KVCache, MultiheadAttention, RotaryAttention
from netcl.nn.composed import *  # noqa: F403
from netcl.nn.container import Concat, Identity, ModuleDict, ModuleList, ParameterDict, ParameterList, Residual, Sequential
from netcl.nn.conv import Conv1d, Conv2d, Conv3d, ConvTranspose1d, ConvTranspose2d, ConvTranspose3d, DepthwiseConv2d
from netcl.nn.dropout import AlphaDropout, Dropout, Dropout1d, Dropout2d, Dropout3d, FeatureAlphaDropout
from netcl.nn.embedding import Embedding, EmbeddingBag
from netcl.nn.factory import build, build_sequential, config_of, register_layer, unregister_layer
from netcl.nn.gpt import GPT
from netcl.nn.lazy import *  # noqa: F403
from netcl.nn.lenet import LeNet
from netcl.nn.linear import Bilinear, Linear
from netcl.nn.loss import *  # noqa: F403
from netcl.nn.mlp import MLP
from netcl.nn.module import Module
from netcl.nn.norm import (
    BatchNorm1d,
    BatchNorm2d,
    BatchNorm3d,
    GroupNorm,
    InstanceNorm1d,
    InstanceNorm2d,
    InstanceNorm3d,
    LayerNorm,
    RMSNorm,
)
from netcl.nn.parameter import Buffer, Parameter
from netcl.nn.pool import *  # noqa: F403
from netcl.nn.quantized import QuantizedEmbedding, QuantizedLinear
from netcl.nn.recurrent import GRU, LSTM, RNN, GRUCell, LSTMCell, RNNCell
from netcl.nn.resnet import BasicBlock, Bottleneck, ResNet, ResNet18, resnet18, resnet34, resnet50, resnet101, resnet152
from netcl.nn.shape import *  # noqa: F403
from netcl.nn.transformer import (
    FeedForward,
    SwiGLU,
    Transformer,
    TransformerBlock,
    TransformerDecoder,
    TransformerDecoderLayer,
    TransformerEncoder,
    TransformerEncoderLayer,
)
from netcl.nn.vit import VisionTransformer, ViT, vit_small

_TABLES = [name for module in (activation, composed, lazy, loss, pool, shape) for name in vars(module)["__all__"]]
__all__ = [
    "AdaptiveLogSoftmaxWithLoss", "AlphaDropout", "BasicBlock", "BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "Bilinear", "Bottleneck",
    "Buffer", "CausalSelfAttention", "Concat", "Conv1d", "Conv2d", "Conv3d", "ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d",
    "DepthwiseConv2d", "Dropout", "Dropout1d", "Dropout2d", "Dropout3d", "Embedding", "EmbeddingBag", "FeatureAlphaDropout",
    "FeedForward", "GPT", "GRU", "GRUCell", "GroupNorm", "Identity", "InstanceNorm1d", "InstanceNorm2d", "InstanceNorm3d", "KVCache",
    "LSTM", "LSTMCell", "LayerNorm", "LeNet", "Linear", "MLP", "Module", "ModuleDict", "ModuleList", "MultiheadAttention", "Parameter",
    "ParameterDict", "ParameterList", "QuantizedEmbedding", "QuantizedLinear", "RMSNorm", "RNN", "RNNCell", "ResNet", "ResNet18",
    "Residual", "RotaryAttention", "Sequential",
    "SwiGLU", "Transformer", "TransformerBlock", "TransformerDecoder", "TransformerDecoderLayer", "TransformerEncoder",
    "TransformerEncoderLayer", "ViT", "VisionTransformer", "build", "build_sequential", "config_of", "factory", "functional", "init",
    "register_layer", "resnet101", "resnet152", "resnet18", "resnet34", "resnet50",
    "unregister_layer", "utils", "vit_small", *_TABLES,
]  # fmt: skip

_MODELS = (ResNet18, resnet18, resnet34, resnet50, resnet101, resnet152, vit_small)
for _name in __all__:
    _made = globals()[_name]
    if _made in _MODELS or (isinstance(_made, type) and issubclass(_made, Module) and _made not in (Module, activation.Activation)):
        register_layer(_name, _made)


def __getattr__(name: str) -> Any:
    near = [] if name.startswith("__") else _difflib.get_close_matches(name, __all__, n=3)
    raise AttributeError(f"module 'netcl.nn' has no attribute {name!r}" + (f"; the nearest names are {', '.join(near)}" if near else ""))
