"""Clothes in ten classes: a CNN on Fashion-MNIST, its accuracy, and the pictures it gets wrong.

    python examples/fashion.py [--root FOLDER] [--device gpu] [--samples 60000] [--epochs 3]

The four IDX files are read from FOLDER, or from where Debian's package dataset-fashion-mnist puts them.
"""

import argparse

import numpy as np

from netcl import Tensor, device, manual_seed, nn, optim
from netcl.data import DataLoader, TensorDataset, datasets
from netcl.trainer import Trainer

CLASSES = "T-shirt trouser pullover dress coat sandal shirt sneaker bag boot".split()


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * 7 * 7, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip


def first(part, count: int):
    """The first samples of a dataset, as arrays of images (N, 1, 28, 28) and labels."""
    images, labels = part.take(np.arange(min(count, len(part))))
    return np.asarray(images, np.float32).reshape(-1, 1, 28, 28), np.asarray(labels)


def train(parts, samples: int, epochs: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Test images, their labels, and what the model takes them for."""
    manual_seed(0)
    (x, y), (images, labels) = first(parts[0], samples), first(parts[1], samples // 6)
    model = cnn()
    loader = DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True, seed=0)
    Trainer(model, optim.Adam(model.parameters(), lr=2e-3), metrics=["accuracy"]).fit(loader, epochs=epochs)
    scores = [model.eval()(Tensor.from_host(part)).numpy() for part in np.array_split(images, max(1, len(images) // 500))]
    return images, labels, np.concatenate(scores).argmax(axis=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", help="the folder of the four files")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--samples", type=int, default=60_000)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--smoke", action="store_true", help="a few steps on made-up images, without the files")
    arguments = parser.parse_args()
    if arguments.smoke:
        parts, arguments.samples, arguments.epochs = datasets.synthetic(samples=128, shape=(1, 28, 28), classes=10), 96, 1
    else:
        parts = datasets.fashion_mnist(arguments.root)
    with device(arguments.device):
        _, labels, taken = train(parts, arguments.samples, arguments.epochs)
    print(f"accuracy on {len(labels)} pictures never seen: {(labels == taken).mean():.1%}")
    wrong = [f"a {CLASSES[is_a]} was taken for a {CLASSES[as_a]}" for is_a, as_a in zip(labels, taken, strict=True) if is_a != as_a]
    for mistake in sorted({*wrong}, key=wrong.count, reverse=True)[:3]:
        print(f"  {wrong.count(mistake)} time(s) {mistake}")


if __name__ == "__main__":
    main()
