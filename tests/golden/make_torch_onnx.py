"""Makes torch_onnx/*.onnx with PyTorch 2.13's exporter (which needs the package onnx), and what PyTorch computes for an input."""

from pathlib import Path

import numpy as np
import torch
from torch import nn

HERE = Path(__file__).parent / "torch_onnx"


class Cnn(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Hardswish(), nn.MaxPool2d(2), nn.Upsample(scale_factor=2), nn.AvgPool2d(2),
            nn.ConvTranspose2d(4, 4, 2, 2), nn.AdaptiveAvgPool2d(2),
        )  # fmt: skip
        self.fc = nn.Linear(16, 3)

    def forward(self, x):
        return self.fc(self.body(x).flatten(1)).log_softmax(-1)


class Encoder(nn.Module):
    """Computes its mask and positions from the shape of its input, in the graph."""

    def __init__(self):
        super().__init__()
        self.embedding, self.out = nn.Embedding(11, 16), nn.Linear(16, 11)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)

    def forward(self, tokens):
        mask = torch.triu(torch.full((tokens.shape[1], tokens.shape[1]), float("-inf")), 1)
        return self.out(self.layer(self.embedding(tokens) + torch.arange(tokens.shape[1])[None, :, None] * 0.1, src_mask=mask))


def main() -> None:
    HERE.mkdir(exist_ok=True)
    torch.manual_seed(0)
    for name, model, x in (("cnn", Cnn(), torch.randn(2, 3, 8, 8)), ("encoder", Encoder(), torch.arange(12).reshape(2, 6) % 11)):
        options = {"dynamo": False, "opset_version": 17, "dynamic_axes": {"x": {0: "batch"}}, "input_names": ["x"]}
        torch.onnx.export(model.eval(), (x,), HERE / f"{name}.onnx", **options)
        np.savez(HERE / f"{name}.npz", x=x.numpy(), y=model(x).detach().numpy())


if __name__ == "__main__":
    main()
