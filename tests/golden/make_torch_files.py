"""Makes torch_files/*.pt with PyTorch 2.13: one nested state in both of its containers, to be read without it."""

from collections import OrderedDict
from pathlib import Path

import torch

HERE = Path(__file__).parent / "torch_files"


def state() -> dict:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    model(torch.randn(5, 3)).square().sum().backward()
    optimizer.step()
    grid = torch.arange(24.0).reshape(4, 6)
    return {
        "model": model.state_dict(), "optimizer": optimizer.state_dict(),
        "transposed": grid.t(), "strided": grid[1:3, ::2], "expanded": torch.ones(1).expand(3, 4), "tail": torch.arange(10)[7:],
        "bfloat16": torch.tensor([1.0, -2.5, 3e38]).bfloat16(), "float16": torch.tensor([1.0, -2.5]).half(),
        "float64": torch.tensor([0.1, 0.2], dtype=torch.float64), "int64": torch.tensor([-1, 2**40]),
        "int32": torch.tensor([-5], dtype=torch.int32), "int16": torch.tensor([-5], dtype=torch.int16),
        "int8": torch.tensor([-5], dtype=torch.int8), "uint8": torch.tensor([250], dtype=torch.uint8),
        "bool": torch.tensor([True, False]), "complex64": torch.tensor([1 + 2j]), "uint16": torch.tensor([65535], dtype=torch.uint16),
        "scalar": torch.tensor(3.5), "empty": torch.zeros(0, 3), "parameter": torch.nn.Parameter(torch.ones(2)),
        "nested": [1, (2, 3.5), {"deep": [None, True, "text ä"]}], "ordered": OrderedDict(a=1, b=2), "big": 12345678901234567890,
        "negative": -70000, "small": 300, "size": torch.Size([2, 3]), "device": torch.device("cpu"), "dtype": torch.float16,
    }  # fmt: skip


def main() -> None:
    HERE.mkdir(exist_ok=True)
    torch.save(state(), HERE / "zip.pt")
    torch.save(state(), HERE / "zip_protocol4.pt", pickle_protocol=4)
    torch.save(state(), HERE / "stream.pt", _use_new_zipfile_serialization=False)


if __name__ == "__main__":
    main()
