"""A class for every pixel: a small U-Net that finds discs and squares in noisy pictures.

python examples/segmentation.py [--device gpu] [--steps 300]
"""

import argparse

import numpy as np

import netcl
from netcl import nn, optim

SIZE, CLASSES = 32, ("background", "disc", "square")


def scenes(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Images (N, 1, 32, 32) with a disc and a square in noise, and the class of each pixel."""
    rng = np.random.default_rng(seed)
    rows, columns = np.mgrid[0:SIZE, 0:SIZE]
    labels = np.zeros((count, SIZE, SIZE), np.int64)
    for label in labels:
        (y, x, r), (v, u, h) = (rng.uniform((7, 7, 3), (25, 25, 6)) for _ in range(2))
        label[(rows - y) ** 2 + (columns - x) ** 2 < r * r] = 1
        label[(abs(rows - v) < h) & (abs(columns - u) < h)] = 2
    images = (labels > 0) * 0.8 + rng.normal(0, 0.3, labels.shape)
    return images[:, None].astype(np.float32), labels


class UNet(nn.Module):
    """Two scales: the fine one keeps places, the coarse one sees the shape."""

    def __init__(self, width: int = 16):
        super().__init__()
        self.fine = nn.Sequential(nn.Conv2d(1, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1), nn.ReLU())
        self.coarse = nn.Sequential(
            nn.MaxPool2d(4), nn.Conv2d(width, 2 * width, 3, padding=1), nn.ReLU(), nn.Conv2d(2 * width, 2 * width, 3, padding=1), nn.ReLU(),
            nn.ConvTranspose2d(2 * width, width, 4, stride=4),
        )  # fmt: skip
        self.head = nn.Sequential(nn.Conv2d(2 * width, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, len(CLASSES), 1))

    def forward(self, x):
        fine = self.fine(x)
        return self.head(netcl.cat([fine, self.coarse(fine)], dim=1))


def train(steps: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Images never seen, the classes of their pixels, and what the model finds."""
    netcl.manual_seed(0)
    model, loss_of = UNet(), nn.CrossEntropyLoss()
    optimizer = optim.Adam(model.parameters(), lr=5e-3)
    for step in range(steps):
        images, labels = scenes(16, seed=step + 1)
        optimizer.zero_grad()
        loss = loss_of(model(netcl.tensor(images)), netcl.tensor(labels))
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    images, labels = scenes(16, seed=0)
    return images, labels, model(netcl.tensor(images)).argmax(dim=1).numpy()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--smoke", action="store_true", help="two steps")
    arguments = parser.parse_args()
    with netcl.device(arguments.device):
        _, labels, found = train(2 if arguments.smoke else arguments.steps)
    for number, name in enumerate(CLASSES):
        both, either = ((labels == number) & (found == number)).sum(), ((labels == number) | (found == number)).sum()
        print(f"{name}: intersection over union {both / either:.2f}")


if __name__ == "__main__":
    main()
