"""The named cases with their targets (our time / torch's), one or more per row of the project's table of targets.

Sizes and targets differ between CPUs and GPUs; ``gpu portable`` is what kernels without matrix units should reach.
"""

from __future__ import annotations

import layers
import problems
import steps
import train_steps
from comparison import Case, Comparison

# Residual network for 32 x 32 images: channels, size, filters, kernel, stride of every convolution that differs.
RESNET_LAYERS = (
    (3, 32, 64, 3, 1), (64, 32, 64, 3, 1), (64, 32, 128, 3, 2), (64, 32, 128, 1, 2), (128, 16, 128, 3, 1), (128, 16, 256, 3, 2),
    (128, 16, 256, 1, 2), (256, 8, 256, 3, 1), (256, 8, 512, 3, 2), (256, 8, 512, 1, 2), (512, 4, 512, 3, 1),
)  # fmt: skip
# Generator of DCGAN and expanding path of a U-Net: channels, size, filters, kernel, padding of every transposed convolution.
UPSAMPLING_LAYERS = (
    (512, 4, 256, 4, 1), (256, 8, 128, 4, 1), (128, 16, 64, 4, 1), (64, 32, 3, 4, 1), (256, 16, 128, 2, 0), (128, 32, 64, 2, 0),
)  # fmt: skip
PARTS = ("forward", "input gradient", "weight gradient")


def cases(gpu: bool, quick: bool = False) -> list[Case]:
    """Every case for a device type; ``quick`` takes the small ones only."""
    made = [*products(gpu), *convolutions(gpu), *bandwidth(gpu), *norms(gpu), *training(gpu)]
    return [case for case in made if case.name in QUICK] if quick else made


def products(gpu: bool) -> list[Case]:
    square = {"cpu": 1.0, "gpu": 0.5, "gpu portable": 1.1}
    shaped = {"cpu": 1.1, "gpu": 1.2}
    side = 4096 if gpu else 1024
    rows = [problems.matmul(n, n, n, targets=square) for n in ((1024, 4096, 8192) if gpu else (512, 1024, 2048))]
    rows += [problems.matmul(side, side, side, which, targets=shaped) for which in ("a", "b", "ab")]
    rows += [layers.linear(64, 784, 128, shaped), layers.linear(8, 512, 1000, shaped)]
    rows.append(problems.matmul(64, 64, 32, "b", 64, shaped, "attention scores 64 x 64x64x32"))
    rows.append(problems.matmul(64, 32, 64, "", 64, shaped, "attention values 64 x 64x32x64"))
    for dtype in ("bfloat16", "float16"):
        pairs = [Comparison(targets={"gpu": 1.1}), Comparison(yardstick="ours in float32", targets={"cpu": 1.0})]
        rows.append(layers.half_matmul(side, dtype, pairs))
    return rows


def convolutions(gpu: bool) -> list[Case]:
    limits = {"forward": 0.6, "input gradient": 0.9, "weight gradient": 0.6}
    batch = 64 if gpu else 8
    rows = [problems.conv(batch, 64, 56, 64, part=part, targets={"cpu": 1.0, "gpu": limits[part], "gpu portable": 1.3}) for part in PARTS]
    for c, size, filters, kernel, stride in RESNET_LAYERS:
        rows += [problems.conv(128 if gpu else 8, c, size, filters, kernel, stride, part) for part in PARTS]
    for batch in (128,) if gpu else (1, 4, 8):
        rows += [problems.conv_transpose(batch, c, size, filters, kernel, 2, pad) for c, size, filters, kernel, pad in UPSAMPLING_LAYERS]
    if gpu:
        layers = [(64, 64, 56, 64, 3, 1), *((128, *layer) for layer in RESNET_LAYERS)]
        rows += [problems.conv(*layer, part, dtype="bfloat16") for layer in layers for part in PARTS]
    return rows


def bandwidth(gpu: bool) -> list[Case]:
    n, side = (1 << 28, 16384) if gpu else (1 << 24, 2048)
    fused = {"cpu": 0.10, "gpu": 0.34}
    return [
        layers.chain(n, {name: fused for name in ("ours", "compiled", "kernel")}),
        problems.softmax(side, side, {"cpu": 0.9, "gpu": 1.0}),
        problems.total(n, {"cpu": 1.0, "gpu": 1.05}),
    ]


def norms(gpu: bool) -> list[Case]:
    limit, batch = {"cpu": 0.7, "gpu": 0.9}, 128 if gpu else 8
    rows = [layers.layer_norm(16384 if gpu else 1024, 768, backward, limit) for backward in (False, True)]
    return rows + [layers.batch_norm(batch, 64, 32, backward, limit) for backward in (False, True)]


def training(gpu: bool) -> list[Case]:
    adam = [Comparison(targets={"cpu": 0.15, "gpu": 0.5}), Comparison(yardstick="torch fused", targets={"cpu": 0.9, "gpu": 1.1})]
    mlp = [Comparison("compiled", targets={"cpu": 0.4, "gpu": 0.5}), Comparison()]
    resnet = [Comparison(targets={"cpu": 0.95, "gpu": 0.7}), Comparison("compiled", targets={"cpu": 0.8, "gpu": 0.42})]
    amp = "bfloat16" if gpu else ""
    if gpu:
        resnet.append(Comparison("amp", "torch amp", {"gpu": 0.8}))
    gpt = [Comparison(name, targets={"cpu": 1.0, "gpu": 1.0}) for name in ("ours", "compiled")]
    gpt += [Comparison("amp", "torch amp")] if gpu else []
    cost = [Comparison(yardstick=None, targets={"intel": 8e-6, "portable computing language": 5e-6, "gpu": 9e-6})]
    replay = [Comparison(yardstick=None, targets={"gpu": 6.5e-6})]
    start = [Comparison(yardstick=None, targets={"cpu": 1.5, "gpu": 3.0})]
    return [
        train_steps.adam(adam), steps.mlp_step(64, mlp), train_steps.resnet_step(128 if gpu else 8, resnet, amp),
        train_steps.gpt_step(64 if gpu else 4, gpt, amp=amp),
        train_steps.resnet_memory(128 if gpu else 8, [Comparison(targets={"gpu": 1.0})]), train_steps.call_cost(cost),
        train_steps.replay_cost(replay), train_steps.fresh_process(start),
    ]  # fmt: skip


QUICK = {
    "matmul 512", "matmul 1024", "linear 64x784x128", "attention scores 64 x 64x64x32", "conv 3x3 8x64x56x56 to 64 forward",
    "conv 3x3 64x64x56x56 to 64 forward", "softmax 2048x2048", "softmax 16384x16384", "sum 2^24", "sum 2^28", "chain 2^24", "chain 2^28",
    "conv 3x3 64x64x56x56 to 64 forward bfloat16", "MLP 784-128-10 step, batch 64", "host cost of one op",
}  # fmt: skip
