"""Neural networks: modules with parameters, under torch's names and in torch's layouts."""

from __future__ import annotations

from netcl.nn import composed, factory, functional, init, utils
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
from netcl.nn.attention import CausalSelfAttention, KVCache, MultiheadAttention, RotaryAttention
from netcl.nn.composed import *  # noqa: F403, the layers of a table
from netcl.nn.container import Concat, Identity, ModuleDict, ModuleList, Residual, Sequential
from netcl.nn.conv import Conv1d, Conv2d, ConvTranspose1d, ConvTranspose2d, DepthwiseConv2d
from netcl.nn.dropout import Dropout, Dropout1d, Dropout2d
from netcl.nn.embedding import Embedding
from netcl.nn.factory import build, build_sequential, config_of, register_layer, unregister_layer
from netcl.nn.gpt import GPT
from netcl.nn.lenet import LeNet
from netcl.nn.linear import Bilinear, Linear
from netcl.nn.loss import (
    BCELoss,
    BCEWithLogitsLoss,
    ContrastiveLoss,
    CosineSimilarity,
    CrossEntropyLoss,
    HingeLoss,
    HuberLoss,
    InfoNCELoss,
    KLDivLoss,
    L1Loss,
    MSELoss,
    NLLLoss,
    SmoothL1Loss,
    TripletMarginLoss,
)
from netcl.nn.mlp import MLP
from netcl.nn.module import Module
from netcl.nn.norm import BatchNorm1d, BatchNorm2d, GroupNorm, InstanceNorm1d, InstanceNorm2d, LayerNorm, RMSNorm
from netcl.nn.parameter import Parameter
from netcl.nn.pool import (
    AdaptiveAvgPool1d,
    AdaptiveAvgPool2d,
    AdaptiveMaxPool1d,
    AdaptiveMaxPool2d,
    AvgPool1d,
    AvgPool2d,
    GlobalAvgPool2d,
    GlobalMaxPool2d,
    MaxPool1d,
    MaxPool2d,
)
from netcl.nn.recurrent import GRU, LSTM, RNN, GRUCell, LSTMCell, RNNCell
from netcl.nn.resnet import BasicBlock, Bottleneck, ResNet, ResNet18, resnet18, resnet34, resnet50, resnet101, resnet152
from netcl.nn.shape import Flatten, PixelShuffle, PixelUnshuffle, Unflatten, Upsample
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

__all__ = [
    "CELU", "ELU", "GELU", "GLU", "GPT", "GRU", "LSTM", "MLP", "RNN", "SELU", "Activation", "AdaptiveAvgPool1d",
    "AdaptiveAvgPool2d", "AdaptiveMaxPool1d", "AdaptiveMaxPool2d", "AvgPool1d", "AvgPool2d", "BCELoss", "BCEWithLogitsLoss",
    "BasicBlock", "BatchNorm1d", "BatchNorm2d", "Bilinear", "Bottleneck", "CausalSelfAttention", "Concat", "ContrastiveLoss",
    "Conv1d", "Conv2d", "ConvTranspose2d", "CosineSimilarity", "CrossEntropyLoss", "DepthwiseConv2d", "Dropout", "Dropout1d",
    "Dropout2d", "Embedding", "FeedForward", "Flatten", "GlobalAvgPool2d", "GlobalMaxPool2d", "GroupNorm", "Hardsigmoid",
    "Hardswish", "Hardtanh", "HingeLoss", "HuberLoss", "Identity", "InfoNCELoss", "InstanceNorm2d", "KLDivLoss", "KVCache",
    "L1Loss", "LayerNorm", "LeNet", "LeakyReLU", "Linear", "LogSigmoid", "LogSoftmax", "MSELoss", "MaxPool1d", "MaxPool2d",
    "Mish", "Module", "ModuleDict", "ModuleList", "MultiheadAttention", "NLLLoss", "PReLU", "Parameter", "PixelShuffle",
    "PixelUnshuffle", "RMSNorm", "ReLU", "ReLU6", "ResNet", "ResNet18", "Residual", "RotaryAttention", "Sequential", "SiLU",
    "Sigmoid", "SmoothL1Loss", "Softmax", "Softplus", "Softsign", "SwiGLU", "Swish", "Tanh", "TransformerBlock",
    "TransformerEncoder", "TransformerEncoderLayer", "TripletMarginLoss", "Unflatten", "Upsample", "ViT", "VisionTransformer",
    "build", "build_sequential", "config_of", "factory", "functional", "init", "register_layer", "resnet18", "resnet34",
    "resnet50", "resnet101", "resnet152", "unregister_layer", "utils", "vit_small", "ConvTranspose1d", "GRUCell", "InstanceNorm1d",
    "LSTMCell", "RNNCell", "Transformer", "TransformerDecoder", "TransformerDecoderLayer", *composed.__all__,
]  # fmt: skip

_MODELS = (ResNet18, resnet18, resnet34, resnet50, resnet101, resnet152, vit_small)
for _name in __all__:
    _made = globals()[_name]
    if _made in _MODELS or (isinstance(_made, type) and issubclass(_made, Module) and _made not in (Module, Activation)):
        register_layer(_name, _made)
