"""Fifteen models, each written once for torch and for netcl: ``build(name, framework)`` makes it with either's layers.

``ZOO[name]`` says what a model is fed. A model's ``loss(x, y)`` is what a training step minimises, its ``forward(x)`` is inference.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Entry:
    """A model, its input (``images`` and ``points`` are float, ``tokens`` integers below ``classes``) and batches for GPUs and CPUs."""

    make: Callable[[Any, Any], Any]
    input: str
    shape: tuple[int, ...]
    classes: int
    gpu: int
    cpu: int
    target: str = "class"  # what y is: "class" one of each sample, "tokens" one per position, "pixels" one per pixel, "" none

    def batch(self, size: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Input and target."""
        rng = np.random.default_rng(seed)
        x = (
            rng.integers(0, self.classes, (size, *self.shape))
            if self.input == "tokens"
            else rng.standard_normal((size, *self.shape), np.float32)
        )
        each = {"tokens": self.shape, "pixels": self.shape[1:]}.get(self.target, ())
        y = rng.integers(0, self.classes, (size, *each))
        return x, y


def build(name: str, framework: Any) -> Any:
    """A model of the zoo with the layers of torch or of netcl."""
    return ZOO[name].make(framework, framework.nn)


def _classifier(T: Any) -> Any:
    class Classifier(T.nn.Module):
        def loss(self, x: Any, y: Any) -> Any:
            logits = self(x)
            return T.nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), y.reshape(-1))

    return Classifier


def _conv_bn(nn: Any, c: int, f: int, k: int = 3, stride: int = 1, groups: int = 1, act: Any = None) -> list[Any]:
    layers = [nn.Conv2d(c, f, k, stride, k // 2, groups=groups, bias=False), nn.BatchNorm2d(f)]
    return layers + ([act()] if act else [])


# ---- convolutional networks


def resnet50(T: Any, nn: Any) -> Any:
    """ResNet-50 at 224 x 224."""

    class Bottleneck(nn.Module):
        def __init__(self, c: int, planes: int, stride: int):
            super().__init__()
            self.main = nn.Sequential(*_conv_bn(nn, c, planes, 1, act=nn.ReLU), *_conv_bn(nn, planes, planes, 3, stride, act=nn.ReLU),
                                      *_conv_bn(nn, planes, 4 * planes, 1))  # fmt: skip
            self.short = nn.Sequential(*_conv_bn(nn, c, 4 * planes, 1, stride)) if stride != 1 or c != 4 * planes else nn.Identity()
            self.relu = nn.ReLU()

        def forward(self, x: Any) -> Any:
            return self.relu(self.main(x) + self.short(x))

    class ResNet(_classifier(T)):
        def __init__(self) -> None:
            super().__init__()
            blocks, c = [], 64
            for planes, n, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
                for i in range(n):
                    blocks.append(Bottleneck(c, planes, stride if i == 0 else 1))
                    c = 4 * planes
            self.body = nn.Sequential(
                *_conv_bn(nn, 3, 64, 7, 2, act=nn.ReLU), nn.MaxPool2d(3, 2, 1), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten()
            )
            self.fc = nn.Linear(c, 1000)

        def forward(self, x: Any) -> Any:
            return self.fc(self.body(x))

    return ResNet()


def _inverted(T: Any, nn: Any, squeeze: bool, act: Any) -> Any:
    """A block of MobileNet v2 or EfficientNet: wider, depthwise, (gated,) narrower."""

    class Gate(nn.Module):
        def __init__(self, c: int, mid: int):
            super().__init__()
            self.body = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(c, mid, 1), nn.SiLU(), nn.Conv2d(mid, c, 1), nn.Sigmoid())

        def forward(self, x: Any) -> Any:
            return x * self.body(x)

    class Inverted(nn.Module):
        def __init__(self, c: int, f: int, widen: int, k: int, stride: int):
            super().__init__()
            mid = c * widen
            layers = _conv_bn(nn, c, mid, 1, act=act) if widen != 1 else []
            layers += _conv_bn(nn, mid, mid, k, stride, groups=mid, act=act)
            layers += [Gate(mid, max(1, c // 4))] if squeeze else []
            self.body, self.adds = nn.Sequential(*layers, *_conv_bn(nn, mid, f, 1)), stride == 1 and c == f

        def forward(self, x: Any) -> Any:
            return x + self.body(x) if self.adds else self.body(x)

    return Inverted


def _stages(T: Any, nn: Any, table: Any, squeeze: bool, act: Any) -> Any:
    block = _inverted(T, nn, squeeze, act)

    class Stages(_classifier(T)):
        def __init__(self) -> None:
            super().__init__()
            layers, c = _conv_bn(nn, 3, 32, 3, 2, act=act), 32
            for widen, f, n, stride, k in table:
                for i in range(n):
                    layers.append(block(c, f, widen, k, stride if i == 0 else 1))
                    c = f
            self.body = nn.Sequential(*layers, *_conv_bn(nn, c, 1280, 1, act=act), nn.AdaptiveAvgPool2d(1), nn.Flatten())
            self.fc = nn.Linear(1280, 1000)

        def forward(self, x: Any) -> Any:
            return self.fc(self.body(x))

    return Stages()


def mobilenet_v2(T: Any, nn: Any) -> Any:
    """MobileNet v2 at 224 x 224."""
    table = ((1, 16, 1, 1, 3), (6, 24, 2, 2, 3), (6, 32, 3, 2, 3), (6, 64, 4, 2, 3), (6, 96, 3, 1, 3), (6, 160, 3, 2, 3), (6, 320, 1, 1, 3))
    return _stages(T, nn, table, False, nn.ReLU6)


def efficientnet_b0(T: Any, nn: Any) -> Any:
    """EfficientNet-B0 at 224 x 224, without stochastic depth."""
    table = (
        (1, 16, 1, 1, 3),
        (6, 24, 2, 2, 3),
        (6, 40, 2, 2, 5),
        (6, 80, 3, 2, 3),
        (6, 112, 3, 1, 5),
        (6, 192, 4, 2, 5),
        (6, 320, 1, 1, 3),
    )
    return _stages(T, nn, table, True, nn.SiLU)


def convnext_tiny(T: Any, nn: Any) -> Any:
    """ConvNeXt-T at 224 x 224, with its permutes."""

    class LastNorm(nn.LayerNorm):
        def forward(self, x: Any) -> Any:
            return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)

    class Block(nn.Module):
        def __init__(self, c: int):
            super().__init__()
            self.spread, self.norm = nn.Conv2d(c, c, 7, padding=3, groups=c), nn.LayerNorm(c, eps=1e-6)
            self.wide, self.act, self.narrow = nn.Linear(c, 4 * c), nn.GELU(), nn.Linear(4 * c, c)
            self.scale = nn.Parameter(T.full((c,), 0.1))

        def forward(self, x: Any) -> Any:
            y = self.norm(self.spread(x).permute(0, 2, 3, 1))
            return x + (self.scale * self.narrow(self.act(self.wide(y)))).permute(0, 3, 1, 2)

    class ConvNeXt(_classifier(T)):
        def __init__(self) -> None:
            super().__init__()
            layers, widths = [nn.Conv2d(3, 96, 4, 4), LastNorm(96, eps=1e-6)], (96, 192, 384, 768)
            for i, n in enumerate((3, 3, 9, 3)):
                if i:
                    layers += [LastNorm(widths[i - 1], eps=1e-6), nn.Conv2d(widths[i - 1], widths[i], 2, 2)]
                layers += [Block(widths[i]) for _ in range(n)]
            self.body, self.norm, self.fc = nn.Sequential(*layers), nn.LayerNorm(768, eps=1e-6), nn.Linear(768, 1000)

        def forward(self, x: Any) -> Any:
            return self.fc(self.norm(self.body(x).mean((2, 3))))

    return ConvNeXt()


def unet(T: Any, nn: Any) -> Any:
    """A U-Net of five levels: one of two classes for each pixel."""

    def double(c: int, f: int) -> Any:
        return nn.Sequential(*_conv_bn(nn, c, f, act=nn.ReLU), *_conv_bn(nn, f, f, act=nn.ReLU))

    class UNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            w = (32, 64, 128, 256, 512)
            self.down = nn.ModuleList([double(c, f) for c, f in zip((3, *w), w, strict=False)])
            self.up = nn.ModuleList([nn.ConvTranspose2d(w[i], w[i - 1], 2, 2) for i in (4, 3, 2, 1)])
            self.join = nn.ModuleList([double(2 * w[i - 1], w[i - 1]) for i in (4, 3, 2, 1)])
            self.pool, self.head = nn.MaxPool2d(2), nn.Conv2d(w[0], 2, 1)

        def forward(self, x: Any) -> Any:
            kept = []
            for i, block in enumerate(self.down):
                x = block(self.pool(x) if i else x)
                kept.append(x)
            for up, join, old in zip(self.up, self.join, kept[-2::-1], strict=True):
                x = join(T.cat([up(x), old], 1))
            return self.head(x)

        def loss(self, x: Any, y: Any) -> Any:
            return nn.functional.cross_entropy(self(x), y)

    return UNet()


def diffusion_unet(T: Any, nn: Any) -> Any:
    """The noise predictor of a diffusion model at 32 x 32: group norms, a time embedding, attention at 16 x 16."""

    class Residual(nn.Module):
        def __init__(self, c: int, f: int):
            super().__init__()
            self.norm1, self.conv1, self.time = nn.GroupNorm(8, c), nn.Conv2d(c, f, 3, padding=1), nn.Linear(256, f)
            self.norm2, self.conv2 = nn.GroupNorm(8, f), nn.Conv2d(f, f, 3, padding=1)
            self.short, self.act = nn.Conv2d(c, f, 1) if c != f else nn.Identity(), nn.SiLU()

        def forward(self, x: Any, t: Any) -> Any:
            y = self.conv1(self.act(self.norm1(x))) + self.time(t)[:, :, None, None]
            return self.short(x) + self.conv2(self.act(self.norm2(y)))

    class Attend(nn.Module):
        def __init__(self, c: int):
            super().__init__()
            self.norm, self.qkv, self.out = nn.GroupNorm(8, c), nn.Linear(c, 3 * c), nn.Linear(c, c)

        def forward(self, x: Any) -> Any:
            b, c, h, w = x.shape
            q, k, v = self.qkv(self.norm(x).reshape(b, c, h * w).transpose(1, 2)).reshape(b, h * w, 3, 4, c // 4).permute(2, 0, 3, 1, 4)
            y = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, h * w, c)
            return x + self.out(y).transpose(1, 2).reshape(b, c, h, w)

    class Denoiser(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.time = nn.Sequential(nn.Linear(1, 256), nn.SiLU(), nn.Linear(256, 256))
            self.first, self.last = nn.Conv2d(3, 64, 3, padding=1), nn.Conv2d(64, 3, 3, padding=1)
            self.a, self.down1, self.b, self.attend1 = Residual(64, 64), nn.Conv2d(64, 128, 3, 2, 1), Residual(128, 128), Attend(128)
            self.down2, self.c, self.up2 = nn.Conv2d(128, 256, 3, 2, 1), Residual(256, 256), nn.Conv2d(256, 128, 3, padding=1)
            self.d, self.attend2, self.up1, self.e = Residual(256, 128), Attend(128), nn.Conv2d(128, 64, 3, padding=1), Residual(128, 64)
            self.enlarge = nn.Upsample(scale_factor=2, mode="nearest")

        def forward(self, x: Any) -> Any:
            t = self.time(x[:, 0, 0, :1])
            one = self.a(self.first(x), t)
            two = self.attend1(self.b(self.down1(one), t))
            three = self.c(self.down2(two), t)
            two = self.attend2(self.d(T.cat([self.up2(self.enlarge(three)), two], 1), t))
            return self.last(self.e(T.cat([self.up1(self.enlarge(two)), one], 1), t))

        def loss(self, x: Any, y: Any) -> Any:
            return ((self(x) - x) ** 2).mean()

    return Denoiser()


# ---- generators and points


def vae(T: Any, nn: Any) -> Any:
    """A variational autoencoder of 28 x 28 images, with fixed noise."""

    class Vae(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.hidden, self.mean, self.spread = nn.Linear(784, 400), nn.Linear(400, 20), nn.Linear(400, 20)
            self.back, self.out = nn.Linear(20, 400), nn.Linear(400, 784)

        def parts(self, x: Any) -> Any:
            h = T.relu(self.hidden(x))
            mean, spread = self.mean(h), self.spread(h)
            return self.out(T.relu(self.back(mean + T.exp(0.5 * spread)))), mean, spread

        def forward(self, x: Any) -> Any:
            return self.parts(x)[0]

        def loss(self, x: Any, y: Any) -> Any:
            out, mean, spread = self.parts(x)
            fit = nn.functional.binary_cross_entropy_with_logits(out, T.sigmoid(x))
            return fit - 0.5 * (1 + spread - mean * mean - T.exp(spread)).mean()

    return Vae()


def dcgan(T: Any, nn: Any) -> Any:
    """DCGAN at 64 x 64: the loss of the discriminator on a batch and on what the generator makes of its corner."""

    class Gan(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            up, w = nn.ConvTranspose2d, (512, 256, 128, 64)
            make = [up(100, w[0], 4, 1, 0, bias=False), nn.BatchNorm2d(w[0]), nn.ReLU()]
            for c, f in pairwise(w):
                make += [up(c, f, 4, 2, 1, bias=False), nn.BatchNorm2d(f), nn.ReLU()]
            self.make = nn.Sequential(*make, up(64, 3, 4, 2, 1, bias=False), nn.Tanh())
            judge = [nn.Conv2d(3, 64, 4, 2, 1, bias=False), nn.LeakyReLU(0.2)]
            for c, f in ((64, 128), (128, 256), (256, 512)):
                judge += [nn.Conv2d(c, f, 4, 2, 1, bias=False), nn.BatchNorm2d(f), nn.LeakyReLU(0.2)]
            self.judge = nn.Sequential(*judge, nn.Conv2d(512, 1, 4, 1, 0, bias=False))

        def forward(self, x: Any) -> Any:
            return self.make(x[:, :, :8, :5].reshape(x.shape[0], -1)[:, :100, None, None])

        def loss(self, x: Any, y: Any) -> Any:
            score = nn.functional.softplus
            return score(-self.judge(x)).mean() + score(self.judge(self(x))).mean()

    return Gan()


def pointnet(T: Any, nn: Any) -> Any:
    """PointNet over 1,024 points: 1 x 1 convolutions, a maximum, dense layers."""

    class PointNet(_classifier(T)):
        def __init__(self) -> None:
            super().__init__()
            layers: list[Any] = []
            for c, f in ((3, 64), (64, 64), (64, 128), (128, 1024)):
                layers += [nn.Conv1d(c, f, 1), nn.BatchNorm1d(f), nn.ReLU()]
            self.points = nn.Sequential(*layers)
            head: list[Any] = []
            for c, f in ((1024, 512), (512, 256)):
                head += [nn.Linear(c, f), nn.BatchNorm1d(f), nn.ReLU()]
            self.head = nn.Sequential(*head, nn.Linear(256, 40))

        def forward(self, x: Any) -> Any:
            return self.head(self.points(x).amax(2))

    return PointNet()


# ---- sequences and transformers


def lstm_lm(T: Any, nn: Any) -> Any:
    """A language model: an embedding, two LSTM layers of 256, 10,000 words."""

    class Words(_classifier(T)):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.lstm, self.linear = (
                nn.Embedding(10_000, 256),
                nn.LSTM(256, 256, 2, batch_first=True),
                nn.Linear(256, 10_000),
            )

        def forward(self, x: Any) -> Any:
            return self.linear(self.lstm(self.embedding(x))[0])

    return Words()


def _transformer_block(T: Any, nn: Any, causal: bool = False, first: bool = True) -> Any:
    """``first``: norms before attention and feed-forward, else after."""

    class Block(nn.Module):
        def __init__(self, width: int, heads: int):
            super().__init__()
            self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.wide, self.act, self.narrow = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)

        def attend(self, x: Any) -> Any:
            b, t, c = x.shape
            q, k, v = (z.reshape(b, t, self.heads, c // self.heads).transpose(1, 2) for z in self.qkv(x).split(c, 2))
            y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
            return self.out(y.transpose(1, 2).reshape(b, t, c))

        def feed(self, x: Any) -> Any:
            return self.narrow(self.act(self.wide(x)))

        def forward(self, x: Any) -> Any:
            if not first:
                x = self.norm1(x + self.attend(x))
                return self.norm2(x + self.feed(x))
            x = x + self.attend(self.norm1(x))
            return x + self.feed(self.norm2(x))

    return Block


def _text_model(T: Any, nn: Any, words: int, length: int, depth: int, width: int, heads: int, causal: bool, first: bool) -> Any:
    block = _transformer_block(T, nn, causal, first)

    class Text(_classifier(T)):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.places = nn.Embedding(words, width), nn.Parameter(T.zeros(length, width))
            self.blocks, self.norm = nn.Sequential(*(block(width, heads) for _ in range(depth))), nn.LayerNorm(width)
            self.head = nn.Linear(width, words, bias=False)

        def forward(self, x: Any) -> Any:
            return self.head(self.norm(self.blocks(self.words(x) + self.places[: x.shape[1]])))

    return Text()


def gpt2(T: Any, nn: Any) -> Any:
    """GPT-2 with 124 million parameters and an untied head."""
    return _text_model(T, nn, 50257, 1024, 12, 768, 12, True, True)


def bert_base(T: Any, nn: Any) -> Any:
    """BERT-base as a predictor of words."""
    return _text_model(T, nn, 30522, 512, 12, 768, 12, False, False)


def vit_small(T: Any, nn: Any) -> Any:
    """ViT-S/16 at 224 x 224."""
    block = _transformer_block(T, nn)

    class Vit(_classifier(T)):
        def __init__(self) -> None:
            super().__init__()
            self.patch, self.places, self.token = (
                nn.Conv2d(3, 384, 16, 16),
                nn.Parameter(T.zeros(197, 384)),
                nn.Parameter(T.zeros(1, 1, 384)),
            )
            self.blocks, self.norm, self.head = nn.Sequential(*(block(384, 6) for _ in range(12))), nn.LayerNorm(384), nn.Linear(384, 1000)

        def forward(self, x: Any) -> Any:
            x = self.patch(x).flatten(2).transpose(1, 2)
            x = T.cat([self.token.expand(x.shape[0], 1, 384), x], 1) + self.places
            return self.head(self.norm(self.blocks(x))[:, 0])

    return Vit()


def whisper_encoder(T: Any, nn: Any) -> Any:
    """The encoder of Whisper-small over 30 s of sound, with a class on top."""
    block = _transformer_block(T, nn)

    class Sound(_classifier(T)):
        def __init__(self) -> None:
            super().__init__()
            self.conv1, self.conv2, self.act = nn.Conv1d(80, 768, 3, padding=1), nn.Conv1d(768, 768, 3, 2, 1), nn.GELU()
            self.places, self.blocks = nn.Parameter(T.zeros(1500, 768)), nn.Sequential(*(block(768, 12) for _ in range(12)))
            self.norm, self.head = nn.LayerNorm(768), nn.Linear(768, 100)

        def forward(self, x: Any) -> Any:
            x = self.act(self.conv2(self.act(self.conv1(x)))).transpose(1, 2) + self.places
            return self.head(self.norm(self.blocks(x)).mean(1))

    return Sound()


def swin_tiny(T: Any, nn: Any) -> Any:
    """Swin-T at 224 x 224: attention in windows of 7 x 7, every second time shifted by three."""

    class Block(nn.Module):
        def __init__(self, width: int, heads: int, shift: int):
            super().__init__()
            self.heads, self.shift, self.qkv, self.out = heads, shift, nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.norm1, self.norm2, self.bias = nn.LayerNorm(width), nn.LayerNorm(width), nn.Parameter(T.zeros(heads, 49, 49))
            self.wide, self.act, self.narrow = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)

        def windows(self, x: Any) -> Any:
            b, h, w, c = x.shape
            x = T.roll(x, (-self.shift, -self.shift), (1, 2)) if self.shift else x
            x = x.reshape(b, h // 7, 7, w // 7, 7, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, 49, c)
            q, k, v = self.qkv(x).reshape(-1, 49, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
            y = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=self.bias).transpose(1, 2).reshape(-1, 49, c)
            y = self.out(y).reshape(b, h // 7, w // 7, 7, 7, c).permute(0, 1, 3, 2, 4, 5).reshape(b, h, w, c)
            return T.roll(y, (self.shift, self.shift), (1, 2)) if self.shift else y

        def forward(self, x: Any) -> Any:
            x = x + self.windows(self.norm1(x))
            return x + self.narrow(self.act(self.wide(self.norm2(x))))

    class Merge(nn.Module):
        def __init__(self, width: int):
            super().__init__()
            self.norm, self.linear = nn.LayerNorm(4 * width), nn.Linear(4 * width, 2 * width, bias=False)

        def forward(self, x: Any) -> Any:
            b, h, w, c = x.shape
            x = x.reshape(b, h // 2, 2, w // 2, 2, c).permute(0, 1, 3, 4, 2, 5).reshape(b, h // 2, w // 2, 4 * c)
            return self.linear(self.norm(x))

    class Swin(_classifier(T)):
        def __init__(self) -> None:
            super().__init__()
            layers: list[Any] = []
            for i, (n, heads) in enumerate(((2, 3), (2, 6), (6, 12), (2, 24))):
                layers += [Merge(96 * 2 ** (i - 1))] if i else []
                layers += [Block(96 * 2**i, heads, 3 * (j % 2)) for j in range(n)]
            self.patch, self.norm0, self.body = nn.Conv2d(3, 96, 4, 4), nn.LayerNorm(96), nn.Sequential(*layers)
            self.norm, self.head = nn.LayerNorm(768), nn.Linear(768, 1000)

        def forward(self, x: Any) -> Any:
            return self.head(self.norm(self.body(self.norm0(self.patch(x).permute(0, 2, 3, 1)))).mean((1, 2)))

    return Swin()


ZOO = {
    "ResNet-50": Entry(resnet50, "images", (3, 224, 224), 1000, 32, 1),
    "MobileNetV2": Entry(mobilenet_v2, "images", (3, 224, 224), 1000, 64, 2),
    "EfficientNet-B0": Entry(efficientnet_b0, "images", (3, 224, 224), 1000, 64, 2),
    "ConvNeXt-T": Entry(convnext_tiny, "images", (3, 224, 224), 1000, 32, 1),
    "U-Net": Entry(unet, "images", (3, 128, 128), 2, 16, 1, "pixels"),
    "Diffusion U-Net": Entry(diffusion_unet, "images", (3, 32, 32), 2, 64, 4, ""),
    "VAE": Entry(vae, "images", (784,), 2, 128, 128, ""),
    "DCGAN": Entry(dcgan, "images", (3, 64, 64), 2, 128, 4, ""),
    "PointNet": Entry(pointnet, "points", (3, 1024), 40, 32, 4),
    "LSTM language model": Entry(lstm_lm, "tokens", (35,), 10_000, 64, 16, "tokens"),
    "GPT-2": Entry(gpt2, "tokens", (512,), 50257, 8, 1, "tokens"),
    "BERT-base": Entry(bert_base, "tokens", (256,), 30522, 16, 1, "tokens"),
    "ViT-S": Entry(vit_small, "images", (3, 224, 224), 1000, 64, 2),
    "Swin-T": Entry(swin_tiny, "images", (3, 224, 224), 1000, 32, 1),
    "Whisper encoder": Entry(whisper_encoder, "images", (80, 3000), 100, 8, 1),
}
