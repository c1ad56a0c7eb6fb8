"""Images made larger by sub-pixel convolution: a split with a generator, a wrapped model, a model that is saved whole."""

import math
import os
import tempfile

import torch
import torch.nn as nn
import torch.nn.init as init
import torch.nn.parallel
from torch.utils.data import DataLoader, Dataset, random_split

CLASSES = [torch.nn.modules.conv.Conv2d, torch.nn.modules.activation.ReLU, torch.nn.modules.pixelshuffle.PixelShuffle]


class Waves(Dataset):
    """Smooth images, small and large; its tensors go to the worker processes."""

    def __init__(self, count):
        generator = torch.Generator().manual_seed(7)
        self.phases = torch.rand(count, 2, generator=generator) * 2 * math.pi

    def __len__(self):
        return len(self.phases)

    def __getitem__(self, index):
        a, b = self.phases[index].tolist()
        rows, columns = torch.meshgrid(torch.linspace(0, 3, 12), torch.linspace(0, 3, 12), indexing="ij")
        large = (torch.sin(rows + a) * torch.cos(columns + b)).unsqueeze(0)
        return large[:, ::2, ::2].contiguous(), large


class Upscale(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.relu = nn.ReLU()
        self.conv1 = nn.Conv2d(1, 8, (3, 3), (1, 1), (1, 1))
        self.conv2 = nn.Conv2d(8, factor**2, (3, 3), (1, 1), (1, 1))
        self.pixel_shuffle = nn.PixelShuffle(factor)
        init.orthogonal_(self.conv1.weight, init.calculate_gain("relu"))

    def forward(self, x):
        return self.pixel_shuffle(self.conv2(self.relu(self.conv1(x))))


CLASSES.append(Upscale)


def main():
    torch.manual_seed(123)
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    train, test = random_split(Waves(40), [32, 8], generator=torch.Generator().manual_seed(1))
    loader = DataLoader(train, num_workers=1, batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(2))
    model = nn.DataParallel(Upscale(2)).to(device)
    criterion = nn.MSELoss().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    losses = []
    for _epoch in range(4):
        total = 0.0
        for small, large in loader:
            optimizer.zero_grad()
            loss = criterion(model(small.to(device)), large.to(device))
            total += loss.item()
            loss.backward()
            optimizer.step()
        losses.append(total / len(loader))
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "model.pth")
        torch.save(model.module, path)
        with open(path, "rb") as f, torch.serialization.safe_globals(CLASSES):
            again = torch.load(f)
    assert next(again.parameters()).device.type == device.type
    with torch.no_grad():
        for small, large in DataLoader(test, batch_size=8):
            made, same = model(small.to(device)), again(small.to(device))
            assert torch.allclose(made, same) and made.shape == large.shape
            print(f"PSNR {10 * math.log10(1 / criterion(made, large.to(device)).item()):.2f} dB")
    print(f"first {losses[0]:.6f} last {losses[-1]:.6f}")


if __name__ == "__main__":
    main()
