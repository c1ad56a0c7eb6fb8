"""Pictures made by worker processes while the device learns: a dataset of your own, augmentation, and a position that is kept.

python examples/workers.py [--workers 2] [--device gpu]
"""

import argparse
import time

import numpy as np

import netcl
from netcl.data import DataLoader, Dataset, augment, augment_gpu


class Rings(Dataset):
    """Circles of random size, drawn when they are asked for; the class is how thick the line is."""

    classes = ("thin", "thick")

    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int):
        rng = np.random.default_rng(index)
        label = index % 2
        y, x = np.mgrid[-1:1:32j, -1:1:32j]
        distance = np.abs(np.hypot(x, y) - rng.uniform(0.4, 0.8))
        return np.exp(-((distance / (0.05 + 0.1 * label)) ** 2), dtype=np.float32)[None], label


def noisy(x, rng):
    """A transform with a parameter `rng` gets the generator of its batch: the same noise, whoever makes the batch."""
    return x + 0.1 * rng.standard_normal(x.shape, np.float32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--smoke", action="store_true", help="one epoch")
    arguments = parser.parse_args()
    with netcl.device(arguments.device) as handle:
        loader = DataLoader(
            Rings(), batch_size=32, shuffle=True, seed=0, num_workers=arguments.workers, device_queue=handle,
            transforms=noisy, augment=[augment.RandomCrop(32, padding=2), augment_gpu.RandomHorizontalFlip()],
        )  # fmt: skip
        with loader:
            for epoch in range(1 if arguments.smoke else 3):
                start, total = time.perf_counter(), netcl.zeros(1)
                for x, _ in loader:
                    total = total + x.mean()
                print(f"epoch {epoch}: mean {(total / len(loader)).item():.6f}, {time.perf_counter() - start:.2f} s")
        print("the next epoch would begin at", loader.state_dict())


if __name__ == "__main__":
    main()
