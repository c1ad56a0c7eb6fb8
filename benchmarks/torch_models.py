"""The models of torch that ours are measured against: the same layers under the same names, so that weights carry over."""

from __future__ import annotations

from typing import Any


def _basic_block(torch: Any) -> Any:
    nn = torch.nn

    class Block(torch.nn.Module):
        def __init__(self, channels: int, planes: int, stride: int):
            super().__init__()
            self.conv1, self.bn1 = nn.Conv2d(channels, planes, 3, stride, 1, bias=False), nn.BatchNorm2d(planes)
            self.conv2, self.bn2 = nn.Conv2d(planes, planes, 3, 1, 1, bias=False), nn.BatchNorm2d(planes)
            self.relu = nn.ReLU(inplace=True)
            self.downsample = None
            if stride != 1 or channels != planes:
                self.downsample = nn.Sequential(nn.Conv2d(channels, planes, 1, stride, bias=False), nn.BatchNorm2d(planes))

        def forward(self, x: Any) -> Any:
            kept = x if self.downsample is None else self.downsample(x)
            return self.relu(self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x))))) + kept)

    return Block


def resnet18(torch: Any) -> Any:
    """ResNet-18 with the CIFAR stem."""
    nn, block = torch.nn, _basic_block(torch)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1, self.bn1, self.relu = nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True)
            widths = (64, 64, 128, 256, 512)
            for i in range(1, 5):
                stage = nn.Sequential(block(widths[i - 1], widths[i], 1 if i == 1 else 2), block(widths[i], widths[i], 1))
                setattr(self, f"layer{i}", stage)
            self.fc = nn.Linear(512, 10)

        def forward(self, x: Any) -> Any:
            x = self.relu(self.bn1(self.conv1(x)))
            x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
            return self.fc(x.mean((2, 3)))

    return Model()


def _gpt_block(torch: Any) -> Any:
    nn = torch.nn

    class Attention(torch.nn.Module):
        def __init__(self, width: int, heads: int):
            super().__init__()
            self.heads, self.c_attn, self.c_proj = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

        def forward(self, x: Any) -> Any:
            b, t, c = x.shape
            q, k, v = (z.view(b, t, self.heads, c // self.heads).transpose(1, 2) for z in self.c_attn(x).split(c, 2))
            y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            return self.c_proj(y.transpose(1, 2).reshape(b, t, c))

    class Feed(torch.nn.Module):
        def __init__(self, width: int):
            super().__init__()
            self.c_fc, self.c_proj = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x: Any) -> Any:
            return self.c_proj(nn.functional.gelu(self.c_fc(x)))

    class Block(torch.nn.Module):
        def __init__(self, width: int, heads: int):
            super().__init__()
            self.ln_1, self.attn, self.ln_2, self.mlp = nn.LayerNorm(width), Attention(width, heads), nn.LayerNorm(width), Feed(width)

        def forward(self, x: Any) -> Any:
            x = x + self.attn(self.ln_1(x))
            return x + self.mlp(self.ln_2(x))

    return Block


def gpt(torch: Any, vocab_size: int, block_size: int, n_layer: int, n_head: int, n_embd: int) -> Any:
    """The default :class:`netcl.nn.GPT`: learned positions, layer norms, GELU, tied weights."""
    nn, block = torch.nn, _gpt_block(torch)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            parts = {"wte": nn.Embedding(vocab_size, n_embd), "wpe": nn.Embedding(block_size, n_embd)}
            parts["h"], parts["ln_f"] = nn.ModuleList(block(n_embd, n_head) for _ in range(n_layer)), nn.LayerNorm(n_embd)
            self.transformer = nn.ModuleDict(parts)
            self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)
            self.lm_head.weight = self.transformer["wte"].weight

        def forward(self, tokens: Any) -> Any:
            parts = self.transformer
            x = parts["wte"](tokens) + parts["wpe"].weight[: tokens.shape[1]]
            for layer in parts["h"]:
                x = layer(x)
            return self.lm_head(parts["ln_f"](x))

    return Model()
