"""Your own photos: one folder per class, read, augmented and learned.

    python examples/photos.py FOLDER [--device gpu] [--epochs 8] [--size 32]

FOLDER holds one folder of JPEG or PNG files per class. Without one, the program paints skies by day, by night and at dusk.
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image

import netcl
from netcl import nn, optim
from netcl.utils.data import DataLoader, random_split
from netcl.vision import datasets, transforms

SKIES = {"day": ((70, 140, 230), (190, 220, 250)), "dusk": ((60, 40, 110), (250, 140, 60)), "night": ((5, 8, 25), (30, 35, 80))}


def paint(folder: Path, each: int, seed: int = 0) -> Path:
    """Pictures of skies: a gradient, a sun or moon, grain."""
    rng = np.random.default_rng(seed)
    rows, columns = np.mgrid[0:48, 0:64]
    for name, (top, bottom) in SKIES.items():
        (folder / name).mkdir(parents=True)
        for number in range(each):
            part = np.clip(rows / 47 + rng.normal(0, 0.1), 0, 1)[..., None]
            image = np.array(top) * (1 - part) + np.array(bottom) * part + rng.normal(0, 14, (48, 64, 3))
            y, x, radius = rng.uniform(6, 40), rng.uniform(6, 58), rng.uniform(3, 7)
            image[(rows - y) ** 2 + (columns - x) ** 2 < radius**2] = (250, 240, 200)
            Image.fromarray(np.clip(image * rng.uniform(0.7, 1.2), 0, 255).astype(np.uint8)).save(folder / name / f"{number:03}.jpg")
    return folder


def train(folder: Path, epochs: int, size: int):
    """Photos that were kept for the test: tensors, their labels, what the model takes them for; and the names of the classes."""
    netcl.manual_seed(0)
    moved = [transforms.Resize((size, size)), transforms.RandomHorizontalFlip(), transforms.ColorJitter(0.2, 0.2), transforms.ToTensor()]
    photos = datasets.ImageFolder(str(folder), transforms.Compose(moved))
    kept, rest = random_split(photos, [len(photos) // 4, len(photos) - len(photos) // 4])
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(128, len(photos.classes)),
    )  # fmt: skip
    optimizer, loss_of = optim.Adam(model.parameters(), lr=5e-3), nn.CrossEntropyLoss()
    for epoch in range(epochs):
        losses = []
        for x, y in DataLoader(rest, batch_size=16, shuffle=True):
            optimizer.zero_grad()
            loss = loss_of(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        print(f"epoch {epoch}: loss {np.mean(losses):.3f}")
    x, y = next(iter(DataLoader(kept, batch_size=len(kept))))
    return x.numpy(), y.numpy(), model(x).argmax(dim=1).numpy(), photos.classes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--smoke", action="store_true", help="one epoch over a few pictures")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch, netcl.device(arguments.device):
        folder = arguments.folder or paint(Path(scratch) / "skies", 6 if arguments.smoke else 60)
        _, labels, taken, classes = train(folder, 1 if arguments.smoke else arguments.epochs, arguments.size)
    print(f"{', '.join(classes)}: {(labels == taken).mean():.0%} of {len(labels)} photos never seen are right")


if __name__ == "__main__":
    main()
