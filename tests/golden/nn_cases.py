"""What make_nn.py (with torch) and tests/nn (with netcl) share: the cases, and values that both make for themselves.

Weights and inputs are not stored. Element ``i`` of the tensor called ``name`` is made from integers alone:
``h = mix(crc32(name) + i * 0x9E3779B9 mod 2^32)``, where ``mix`` is the 32-bit finalizer of MurmurHash3, and ``u = (h >> 8) / 2^23 - 1``
lies in [-1, 1). Weights are ``u * sqrt(3 / fan_in)``, so that activations keep their size; see :func:`state_value` for the rest.
"""

from __future__ import annotations

import math
import zlib

import numpy as np


def uniform(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Values in [-1, 1), the same everywhere; float32 holds each exactly."""
    h = np.uint32(zlib.crc32(name.encode())) + np.arange(math.prod(shape), dtype=np.uint32) * np.uint32(0x9E3779B9)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        h = (h ^ (h >> np.uint32(shift))) * np.uint32(factor)
    return ((h >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-23) - np.float32(1)).reshape(shape)


def integers(name: str, shape: tuple[int, ...], high: int) -> np.ndarray:
    """Integers from 0 up to but not including ``high``."""
    return ((uniform(name, shape).astype(np.float64) + 1) / 2 * high).astype(np.int64)


def state_value(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """The value of an entry of a state dict."""
    if name.endswith("num_batches_tracked"):
        return np.zeros(shape, np.int64)
    u = uniform(name, shape)
    if name.endswith("running_var"):
        return np.float32(1) + np.float32(0.5) * np.abs(u)
    if len(shape) < 2:
        scale = np.float32(0.1)
        return np.float32(1) + scale * u if name.endswith("weight") else scale * u
    return u * np.float32(math.sqrt(3 / max(1, math.prod(shape[1:]))))


def state(shapes: dict[str, tuple[int, ...]], tied: dict[str, str] | None = None, lift: float = 0.0) -> dict[str, np.ndarray]:
    """A whole state dict; ``tied`` names entries that are others, ``lift`` is added to the biases of batch norms."""
    tied = tied or {}
    values = {name: state_value(tied.get(name, name), tuple(shape)) for name, shape in shapes.items()}
    for bias in (name.replace("running_mean", "bias") for name in shapes if name.endswith("running_mean")):
        if bias in values:
            values[bias] = values[bias] + np.float32(lift)
    return values


# ResNet-18 has two million ReLUs. Where one input lies within rounding of 0, its gradient is there or not, and after batch norms that
# shows by percents in every layer before, in torch's float32 too. Gradients are compared where that is rare: above 0.
LIFT = 3.0


GPT = {"vocab_size": 65, "block_size": 24, "n_layer": 3, "n_head": 4, "n_embd": 48}
TIED = {"gpt": {"lm_head.weight": "transformer.wte.weight"}}
VIT = {"image_size": 16, "patch_size": 4, "num_layers": 2, "num_heads": 4, "hidden_dim": 32, "mlp_dim": 64, "num_classes": 10}
PADDING = np.arange(7)[None, :] >= np.array([7, 5, 3])[:, None]  # (batch, positions): what is not there

# name: inputs, and the numbers of the right classes
INPUTS = {
    "lenet": uniform("lenet.x", (4, 1, 28, 28)),
    "resnet18_cifar": uniform("resnet.x", (4, 3, 32, 32)),
    "bottleneck": uniform("bottleneck.x", (2, 3, 40, 40)),
    "encoder": uniform("encoder.x", (3, 7, 32)),
    "encoder_norm_first": uniform("encoder.x", (3, 7, 32)),
    "gpt": integers("gpt.x", (2, 20), GPT["vocab_size"]),
    "lstm": uniform("lstm.x", (3, 9, 10)),
    "vit": uniform("vit.x", (2, 3, 16, 16)),
}
TARGETS = {
    "lenet": integers("lenet.y", (4,), 10),
    "resnet18_cifar": integers("resnet.y", (4,), 10),
    "bottleneck": integers("bottleneck.y", (2,), 10),
    "encoder": integers("encoder.y", (21,), 32),
    "encoder_norm_first": integers("encoder.y", (21,), 32),
    "gpt": integers("gpt.y", (40,), GPT["vocab_size"]),
    "lstm": integers("lstm.y", (27,), 24),
    "vit": integers("vit.y", (2,), 10),
}

# Layers whose constructors both have: class, arguments, keyword arguments, shapes of the inputs (or arrays).
LAYERS = {
    "linear": ("Linear", (5, 3), {}, [(2, 4, 5)]),
    "linear_no_bias": ("Linear", (5, 3), {"bias": False}, [(5,)]),
    "bilinear": ("Bilinear", (5, 4, 3), {}, [(2, 5), (2, 4)]),
    "conv1d": ("Conv1d", (4, 6, 3), {"stride": 2, "padding": 1, "dilation": 2, "groups": 2}, [(2, 4, 17)]),
    "conv1d_circular": ("Conv1d", (4, 6, 3), {"padding": 2, "padding_mode": "circular"}, [(2, 4, 9)]),
    "conv2d": ("Conv2d", (3, 8, (3, 5)), {"stride": (2, 1), "padding": (1, 2)}, [(2, 3, 11, 9)]),
    "conv2d_same": ("Conv2d", (3, 8, 3), {"padding": "same", "dilation": 2}, [(2, 3, 8, 9)]),
    "conv2d_reflect": ("Conv2d", (3, 4, 3), {"padding": (1, 2), "padding_mode": "reflect"}, [(2, 3, 8, 9)]),
    "conv2d_replicate": ("Conv2d", (3, 4, 3), {"padding": 1, "padding_mode": "replicate", "bias": False}, [(2, 3, 8, 9)]),
    "conv_transpose2d": ("ConvTranspose2d", (6, 4, 3), {"stride": 2, "padding": 1, "output_padding": 1, "groups": 2}, [(2, 6, 5, 4)]),
    "batch_norm1d": ("BatchNorm1d", (5,), {}, [(6, 5)]),
    "batch_norm1d_signal": ("BatchNorm1d", (5,), {"affine": False, "momentum": None}, [(3, 5, 7)]),
    "batch_norm2d": ("BatchNorm2d", (5,), {"momentum": 0.3, "eps": 1e-3}, [(3, 5, 4, 6)]),
    "batch_norm2d_untracked": ("BatchNorm2d", (5,), {"track_running_stats": False}, [(3, 5, 4, 6)]),
    "instance_norm2d": ("InstanceNorm2d", (5,), {"affine": True}, [(3, 5, 4, 6)]),
    "instance_norm2d_tracked": ("InstanceNorm2d", (5,), {"track_running_stats": True}, [(3, 5, 4, 6)]),
    "layer_norm": ("LayerNorm", ((4, 6),), {}, [(3, 4, 6)]),
    "layer_norm_no_bias": ("LayerNorm", (6,), {"bias": False}, [(3, 4, 6)]),
    "rms_norm": ("RMSNorm", (6,), {}, [(3, 4, 6)]),
    "group_norm": ("GroupNorm", (2, 6), {}, [(3, 6, 5)]),
    "max_pool1d": ("MaxPool1d", (3,), {"stride": 2, "padding": 1}, [(2, 3, 11)]),
    "max_pool2d": ("MaxPool2d", (3,), {"stride": 2, "padding": 1, "ceil_mode": True}, [(2, 3, 8, 11)]),
    "max_pool2d_dilated": ("MaxPool2d", ((2, 3),), {"stride": 1, "dilation": 2}, [(2, 3, 8, 11)]),
    "avg_pool1d": ("AvgPool1d", (3,), {"padding": 1}, [(2, 3, 11)]),
    "avg_pool2d": ("AvgPool2d", (3,), {"stride": 2, "padding": 1, "count_include_pad": False}, [(2, 3, 8, 11)]),
    "adaptive_avg_pool1d": ("AdaptiveAvgPool1d", (4,), {}, [(2, 3, 11)]),
    "adaptive_avg_pool2d": ("AdaptiveAvgPool2d", ((3, 4),), {}, [(2, 3, 8, 11)]),
    "adaptive_max_pool1d": ("AdaptiveMaxPool1d", (4,), {}, [(2, 3, 11)]),
    "adaptive_max_pool2d": ("AdaptiveMaxPool2d", ((3, 4),), {}, [(2, 3, 8, 11)]),
    "embedding": ("Embedding", (11, 4), {"padding_idx": 2}, [integers("embedding.x", (3, 5), 11)]),
    "pixel_shuffle": ("PixelShuffle", (2,), {}, [(2, 8, 3, 4)]),
    "pixel_unshuffle": ("PixelUnshuffle", (2,), {}, [(2, 3, 4, 6)]),
    "upsample": ("Upsample", (), {"scale_factor": 2}, [(2, 3, 4, 5)]),
    "upsample_bilinear": ("Upsample", (), {"size": (7, 9), "mode": "bilinear"}, [(2, 3, 4, 5)]),
    "upsample_corners": ("Upsample", (), {"scale_factor": 2, "mode": "bilinear", "align_corners": True}, [(2, 3, 4, 5)]),
    "flatten": ("Flatten", (), {"start_dim": 1, "end_dim": 2}, [(2, 3, 4, 5)]),
    "unflatten": ("Unflatten", (1, (2, 3)), {}, [(2, 6)]),
    "glu": ("GLU", (), {}, [(3, 8)]),
    "softmax": ("Softmax", (), {"dim": 1}, [(3, 4, 5)]),
    "log_softmax": ("LogSoftmax", (), {"dim": -1}, [(3, 4, 5)]),
    "prelu": ("PReLU", (4,), {}, [(3, 4, 5)]),
    "rnn": ("RNN", (4, 6), {"num_layers": 2, "nonlinearity": "relu"}, [(5, 3, 4)]),
    "rnn_bidirectional": ("RNN", (4, 6), {"bidirectional": True, "bias": False}, [(5, 3, 4), (2, 3, 6)]),
    "gru": ("GRU", (4, 6), {"num_layers": 2, "bidirectional": True, "batch_first": True}, [(3, 5, 4), (4, 3, 6)]),
    "gru_single": ("GRU", (4, 6), {}, [(5, 4)]),
    "lstm_single": ("LSTM", (4, 6), {"num_layers": 2}, [(5, 4)]),
    "lstm_projected": ("LSTM", (4, 6), {"num_layers": 2, "bidirectional": True, "proj_size": 3}, [(5, 2, 4)]),
    "attention": ("MultiheadAttention", (12, 3), {}, [(5, 2, 12), (7, 2, 12), (7, 2, 12)]),
    "attention_widths": ("MultiheadAttention", (12, 3), {"kdim": 6, "vdim": 8, "batch_first": True, "bias": False},
                         [(2, 5, 12), (2, 7, 6), (2, 7, 8)]),
    "cosine_similarity": ("CosineSimilarity", (), {"dim": 1}, [(3, 5), (3, 5)]),
    "mse": ("MSELoss", (), {}, [(3, 5), (3, 5)]),
    "l1": ("L1Loss", (), {"reduction": "sum"}, [(3, 5), (3, 5)]),
    "smooth_l1": ("SmoothL1Loss", (), {"beta": 0.5}, [(3, 5), (3, 5)]),
    "huber": ("HuberLoss", (), {"delta": 0.7, "reduction": "none"}, [(3, 5), (3, 5)]),
    "bce_with_logits": ("BCEWithLogitsLoss", (), {}, [(3, 5), np.abs(uniform("bce.y", (3, 5)))]),
    "bce": ("BCELoss", (), {"reduction": "sum"}, [np.abs(uniform("bce.x", (3, 5))), np.abs(uniform("bce.y", (3, 5)))]),
    "nll": ("NLLLoss", (), {"ignore_index": 3}, [(6, 5), integers("nll.y", (6,), 5)]),
    "cross_entropy": ("CrossEntropyLoss", (), {"label_smoothing": 0.1, "reduction": "sum"}, [(6, 5), integers("nll.y", (6,), 5)]),
    "cross_entropy_dense": ("CrossEntropyLoss", (), {"ignore_index": 2}, [(2, 5, 3, 4), integers("dense.y", (2, 3, 4), 5)]),
    "kl_div": ("KLDivLoss", (), {"reduction": "batchmean"}, [(3, 5), np.abs(uniform("kl.y", (3, 5)))]),
    "triplet": ("TripletMarginLoss", (), {"margin": 0.8}, [(3, 5), (3, 5), (3, 5)]),
    "rnn_cell": ("RNNCell", (4, 6), {"nonlinearity": "relu"}, [(3, 4), (3, 6)]),
    "gru_cell": ("GRUCell", (4, 6), {"bias": False}, [(3, 4), (3, 6)]),
    "lstm_cell": ("LSTMCell", (4, 6), {}, [(3, 4)]),
    "conv_transpose1d": ("ConvTranspose1d", (6, 4, 3), {"stride": 2, "padding": 1, "output_padding": 1, "groups": 2}, [(2, 6, 5)]),
    "instance_norm1d": ("InstanceNorm1d", (5,), {"affine": True, "track_running_stats": True}, [(3, 5, 8)]),
    "decoder_layer": ("TransformerDecoderLayer", (12, 3, 16), {"dropout": 0.0}, [(5, 2, 12), (7, 2, 12)]),
    "decoder_norm_first": ("TransformerDecoderLayer", (12, 3, 16), {"dropout": 0.0, "norm_first": True, "batch_first": True},
                           [(2, 5, 12), (2, 7, 12)]),
    "transformer": ("Transformer", (12, 3, 2, 1, 16), {"dropout": 0.0, "activation": "gelu"}, [(7, 2, 12), (5, 2, 12)]),
    "threshold": ("Threshold", (0.2, 0.7), {}, [(3, 33)]),
    "softmax2d": ("Softmax2d", (), {}, [(2, 3, 4, 5)]),
    "softmin": ("Softmin", (), {"dim": 1}, [(3, 4, 5)]),
    "channel_shuffle": ("ChannelShuffle", (3,), {}, [(2, 6, 3, 4)]),
    "unfold": ("Unfold", ((2, 3),), {"padding": 1, "stride": 2}, [(2, 3, 5, 6)]),
    "fold": ("Fold", ((5, 6), (2, 3)), {"padding": 1, "stride": (2, 1)}, [(2, 18, 18)]),
    "local_response_norm": ("LocalResponseNorm", (4, 0.3, 0.6, 1.5), {}, [(2, 6, 3, 4)]),
    "lp_pool1d": ("LPPool1d", (3, 3), {"stride": 2}, [np.abs(uniform("lp1.x", (2, 3, 11)))]),
    "lp_pool2d": ("LPPool2d", (2, (2, 3)), {}, [(2, 3, 6, 7)]),
    "pairwise_distance": ("PairwiseDistance", (), {"p": 3.0, "keepdim": True}, [(4, 5), (4, 5)]),
    **{f"pad_{kind}{n}": (f"{kind}Pad{n}d", (tuple(range(1, 1 + 2 * n)) if kind in ("Constant", "Replication") else 2,
                                             *((0.5,) if kind == "Constant" else ())), {}, [(2, 3, 4, 5, 6)[: n + 2]])
       for kind in ("Constant", "Zero", "Reflection", "Replication", "Circular") for n in (1, 2, 3)},
    "margin_ranking": ("MarginRankingLoss", (0.1,), {}, [(9,), (9,), 2 * integers("ranking.y", (9,), 2) - 1]),
    "hinge_embedding": ("HingeEmbeddingLoss", (0.6,), {}, [(3, 5), 2 * integers("hinge.y", (3, 5), 2) - 1]),
    "soft_margin": ("SoftMarginLoss", (), {"reduction": "sum"}, [(3, 5), 2 * integers("hinge.y", (3, 5), 2) - 1]),
    "multilabel_soft_margin": ("MultiLabelSoftMarginLoss", (), {}, [(3, 5), np.abs(uniform("bce.y", (3, 5)))]),
    "multi_margin": ("MultiMarginLoss", (2, 0.7), {"reduction": "none"}, [(6, 5), integers("nll.y", (6,), 5)]),
    "cosine_embedding": ("CosineEmbeddingLoss", (0.1,), {}, [(6, 5), (6, 5), 2 * integers("cosine.y", (6,), 2) - 1]),
    "poisson_nll": ("PoissonNLLLoss", (), {"full": True}, [(3, 5), np.abs(uniform("counts.y", (3, 5))) * np.float32(5)]),
    "poisson_nll_rates": ("PoissonNLLLoss", (False,), {}, [np.abs(uniform("rates.x", (3, 5))), np.abs(uniform("counts.y", (3, 5)))]),
    "gaussian_nll": ("GaussianNLLLoss", (), {"full": True}, [(3, 5), (3, 5), np.abs(uniform("var.x", (3, 5))) + np.float32(0.1)]),
    "triplet_distance": ("TripletMarginWithDistanceLoss", (), {"swap": True}, [(6, 5), (6, 5), (6, 5)]),
    "conv3d": ("Conv3d", (4, 6, (3, 2, 3)), {"stride": (2, 1, 2), "padding": (1, 0, 2), "groups": 2}, [(2, 4, 6, 5, 7)]),
    "conv3d_same": ("Conv3d", (2, 3, 3), {"padding": "same", "dilation": (2, 1, 1), "bias": False}, [(1, 2, 5, 4, 3)]),
    "conv3d_replicate": ("Conv3d", (2, 3, 3), {"padding": (1, 2, 1), "padding_mode": "replicate"}, [(1, 2, 4, 3, 5)]),
    "conv_transpose3d": ("ConvTranspose3d", (4, 6, (3, 2, 3)), {"stride": (2, 1, 2), "padding": (1, 0, 1), "output_padding": (1, 0, 1),
                                                                "groups": 2}, [(2, 4, 3, 4, 3)]),
    "conv_transpose3d_dilated": ("ConvTranspose3d", (2, 3, 2), {"dilation": (2, 1, 3), "bias": False}, [(1, 2, 3, 2, 4)]),
    "batch_norm3d": ("BatchNorm3d", (3,), {}, [(2, 3, 2, 3, 4)]),
    "batch_norm2d_no_bias": ("BatchNorm2d", (3,), {"bias": False}, [(2, 3, 4, 5)]),
    "instance_norm3d": ("InstanceNorm3d", (3,), {"affine": True, "track_running_stats": True}, [(2, 3, 2, 3, 4)]),
    "group_norm_no_bias": ("GroupNorm", (2, 6), {"bias": False}, [(3, 6, 5)]),
    "max_pool3d": ("MaxPool3d", (3,), {"stride": 2, "padding": 1, "ceil_mode": True}, [(2, 2, 5, 6, 7)]),
    "max_pool3d_dilated": ("MaxPool3d", ((2, 1, 2),), {"stride": 1, "dilation": (1, 1, 2), "return_indices": True}, [(2, 2, 4, 3, 5)]),
    "max_pool2d_indices": ("MaxPool2d", (3,), {"stride": 2, "padding": 1, "return_indices": True}, [(2, 3, 8, 11)]),
    "max_pool1d_indices": ("MaxPool1d", (3, 2), {"return_indices": True}, [(2, 3, 11)]),
    "avg_pool3d": ("AvgPool3d", (3,), {"stride": 2, "padding": 1, "ceil_mode": True, "count_include_pad": False}, [(2, 2, 5, 6, 7)]),
    "avg_pool3d_padded": ("AvgPool3d", ((2, 3, 1),), {"padding": (1, 1, 0)}, [(2, 2, 5, 6, 3)]),
    "avg_pool3d_divisor": ("AvgPool3d", (3,), {"stride": 2, "padding": 1, "divisor_override": 5}, [(1, 2, 5, 6, 4)]),
    "avg_pool2d_divisor": ("AvgPool2d", (3,), {"stride": 2, "padding": 1, "ceil_mode": True, "divisor_override": 2}, [(1, 2, 5, 6)]),
    "adaptive_avg_pool3d": ("AdaptiveAvgPool3d", ((2, None, 3),), {}, [(2, 2, 5, 3, 7)]),
    "adaptive_max_pool3d": ("AdaptiveMaxPool3d", ((2, 3, None),), {"return_indices": True}, [(2, 2, 5, 4, 3)]),
    "adaptive_max_pool2d_indices": ("AdaptiveMaxPool2d", (3,), {"return_indices": True}, [(2, 3, 8, 11)]),
    "adaptive_max_pool1d_indices": ("AdaptiveMaxPool1d", (4,), {"return_indices": True}, [(2, 3, 11)]),
    "lp_pool3d": ("LPPool3d", (2, (1, 2, 3)), {}, [(2, 2, 3, 4, 6)]),
    "max_unpool1d": ("MaxUnpool1d", (2,), {}, [(2, 3, 4), integers("unpool1", (2, 3, 4), 2) + 2 * np.arange(4)]),
    "max_unpool2d": ("MaxUnpool2d", (2,), {"stride": (2, 3)}, [(1, 2, 2, 2), np.array([[[[0, 8], [10, 18]], [[1, 3], [12, 14]]]])]),
    "max_unpool3d": ("MaxUnpool3d", (2,), {}, [(1, 1, 1, 2, 2), np.array([[[[[0, 14], [5, 31]]]]])]),
    "embedding_max_norm": ("Embedding", (7, 4), {"max_norm": 0.9, "padding_idx": 2}, [integers("embedding.x", (3, 5), 6)]),
    "embedding_frequency": ("Embedding", (7, 4), {"scale_grad_by_freq": True}, [integers("embedding.x", (3, 5), 6)]),
    "bag": ("EmbeddingBag", (7, 4), {"padding_idx": 2}, [integers("bag.x", (3, 5), 7)]),
    "bag_sum": ("EmbeddingBag", (7, 4), {"mode": "sum"}, [integers("bag.x", (9,), 7), np.array([0, 0, 4, 7]), (9,)]),
    "bag_mean": ("EmbeddingBag", (7, 4), {"include_last_offset": True}, [integers("bag.x", (9,), 7), np.array([0, 3, 3, 9])]),
    "bag_max": ("EmbeddingBag", (7, 4), {"mode": "max", "padding_idx": 1}, [integers("bag.x", (9,), 7), np.array([0, 4, 4])]),
    "attention_bias_kv": ("MultiheadAttention", (12, 3), {"add_bias_kv": True, "add_zero_attn": True},
                          [(5, 2, 12), (7, 2, 12), (7, 2, 12)]),
    "ctc": ("CTCLoss", (), {}, [(8, 3, 5), np.array([[1, 2, 2, 4], [3, 3, 0, 0], [1, 0, 0, 0]]), np.array([8, 7, 5]), np.array([4, 2, 1])]),
    "ctc_sum": ("CTCLoss", (4,), {"reduction": "sum", "zero_infinity": True},
                [(4, 3, 5), np.array([1, 2, 0, 0, 3, 1, 2, 3]), np.array([4, 4, 4]), np.array([2, 2, 4])]),
    "ctc_each": ("CTCLoss", (), {"reduction": "none"}, [(5, 2, 4), np.array([[1, 3], [2, 2]]), np.array([5, 4]), np.array([2, 0])]),
    "multilabel_margin": ("MultiLabelMarginLoss", (), {}, [(3, 5), np.array([[3, 0, -1, 1, 2], [-1, 0, 0, 0, 0], [4, 3, 2, 1, 0]])]),
    "triplet_swap": ("TripletMarginLoss", (), {"swap": True, "p": 3.0}, [(6, 5), (6, 5), (6, 5)]),
    "adaptive_softmax": ("AdaptiveLogSoftmaxWithLoss", (8, 20), {"cutoffs": [5, 11], "div_value": 2.0, "head_bias": True},
                         [(6, 8), np.array([0, 4, 5, 10, 11, 19])]),
    "upsampling_nearest": ("UpsamplingNearest2d", (), {"scale_factor": 2}, [(2, 3, 4, 5)]),
    "upsampling_bilinear": ("UpsamplingBilinear2d", (), {"size": (7, 9)}, [(2, 3, 4, 5)]),
    **{f"activation_{name}": (name, (), {}, [(3, 33)]) for name in (
        "ReLU", "ReLU6", "LeakyReLU", "ELU", "CELU", "SELU", "GELU", "SiLU", "Mish", "Sigmoid", "LogSigmoid", "Tanh", "Softplus",
        "Softsign", "Hardsigmoid", "Hardswish", "Hardtanh", "Hardshrink", "Softshrink", "Tanhshrink")},
}  # fmt: skip
SCALED = {"activation_ReLU6": 8, "activation_Hardswish": 6, "activation_Hardsigmoid": 6, "activation_Softplus": 30}  # inputs beyond [-1, 1)
SOFTENED = ("ctc",)  # the first input is the result of a log_softmax
EVALUATED = ("batch_norm", "instance_norm")  # run once in training, then once in evaluation mode


# Functions of torch.nn.functional that have no layer, or forms that layers do not use: function, inputs, keyword arguments.
FUNCTIONS = {
    "bilinear_function": ("bilinear", [(2, 3, 5), (2, 3, 4), (6, 5, 4)], {}),
    "conv3d_valid": ("conv3d", [(1, 2, 4, 5, 6), (3, 2, 2, 3, 1)], {"padding": "valid", "stride": 2}),
    "conv3d_even": ("conv3d", [(1, 2, 4, 5, 6), (3, 2, 2, 4, 2), (3,)], {"padding": "same"}),
    "conv_tbc": ("conv_tbc", [(7, 2, 3), (3, 3, 4), (4,)], {"pad": 1}),
    "ctc_alone": ("ctc_loss", [(6, 4), np.array([1, 1, 2])], {"input_lengths": 6, "target_lengths": 3}),
    "linear_cross_entropy_flat": ("linear_cross_entropy", [(6, 4), (5, 4), integers("lce.y", (6,), 5)], {"ignore_index": 2}),
    "linear_cross_entropy_deep": ("linear_cross_entropy", [(6, 4), (5, 3, 4), integers("lce.y", (6, 3), 5)], {"label_smoothing": 0.1}),
    "max_unpool1d_size": ("max_unpool1d", [(1, 2, 3), np.array([[[1, 2, 5], [0, 3, 4]]])], {"kernel_size": 2, "output_size": (1, 2, 7)}),
    "multilabel_margin_one": ("multilabel_margin_loss", [(4,), np.array([3, 0, -1, 1])], {"reduction": "sum"}),
    "pdist": ("pdist", [(5, 4)], {"p": 3.0}),
    "triplet_each": ("triplet_margin_loss", [(6, 5), (6, 5), (6, 5)], {"reduction": "none", "swap": True}),
    "upsample_bilinear_function": ("upsample_bilinear", [(1, 2, 3, 4)], {"scale_factor": 2}),
}  # fmt: skip


# Layers with computed weights: the function of torch.nn.utils, then as above.
WRAPPED = {
    "weight_norm": ("weight_norm", "Linear", (4, 3), {}, [(2, 4)]),
    "weight_norm_conv": ("parametrizations.weight_norm", "Conv2d", (2, 3, 3), {}, [(1, 2, 5, 4)]),
    "spectral_norm": ("spectral_norm", "Conv1d", (2, 3, 3), {}, [(1, 2, 5)]),
    "spectral_norm_transposed": ("parametrizations.spectral_norm", "ConvTranspose2d", (2, 3, 2), {}, [(1, 2, 5, 4)]),
}
PACKED_LENGTHS = (2, 5, 3, 5, 1)


def layer_inputs(name: str) -> list[np.ndarray]:
    """The inputs of a case of a layer or a function."""
    shapes = FUNCTIONS[name][1] if name in FUNCTIONS else (LAYERS.get(name) or WRAPPED[name])[-1]
    made = [x if isinstance(x, np.ndarray) else uniform(f"{name}.{i}", x) for i, x in enumerate(shapes)]
    return [x * np.float32(SCALED.get(name, 1)) if x.dtype == np.float32 else x for x in made]


def several(out) -> list:
    """Outputs, nested or not, as one list."""
    return [part for piece in out for part in several(piece)] if isinstance(out, tuple | list) else [out]


# ---- training: ten steps of each optimizer

TRAINING_INPUTS = {**INPUTS, "resnet18_cifar": uniform("resnet.x", (8, 3, 16, 16))}
TRAINING_TARGETS = {**TARGETS, "resnet18_cifar": integers("resnet.y", (8,), 10)}
STEPS = 10
CLIP = 1.0
OPTIMIZERS = {
    "SGD": {"lr": 0.02, "momentum": 0.9, "nesterov": True, "weight_decay": 5e-4},
    "Adam": {"lr": 1e-3},
    "AdamW": {"lr": 1e-3, "weight_decay": 0.1},
    "RMSProp": {"lr": 3e-4, "momentum": 0.5},
}
SCHEDULE = {"step_size": 3, "gamma": 0.5}  # StepLR
TRAINED = ("lenet", "resnet18_cifar", "encoder", "gpt", "lstm")


def shown(array: np.ndarray) -> np.ndarray:
    """A few elements of a tensor, spread over it."""
    flat = array.reshape(-1)
    return flat[np.linspace(0, len(flat) - 1, min(len(flat), 5)).astype(int)]
