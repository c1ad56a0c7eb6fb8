"""Train a small CNN on the bundled digits, with checkpoints, and look at what it gets wrong.

    python examples/train_cnn.py [--device gpu] [--epochs 15] [--run runs/digits]

Run it again after a crash or a Ctrl-C and it goes on where it was.
"""

import argparse

import numpy as np

from netcl import device, manual_seed, nn, optim
from netcl.data import DataLoader, augment, datasets
from netcl.trainer import ConfusionMatrix, ModelCheckpoint, Trainer


def cnn(classes: int = 10) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * 4 * 4, 64), nn.ReLU(), nn.Linear(64, classes),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--run", default="runs/digits")
    parser.add_argument("--smoke", action="store_true", help="one short epoch")
    arguments = parser.parse_args()
    manual_seed(0)
    train, test = datasets.digits()
    if arguments.smoke:
        train, test = (type(part)(*part.take(np.arange(128)), classes=part.classes) for part in (train, test))
        arguments.epochs = 1

    with device(arguments.device) as handle:
        moved = augment.RandomAffine(degrees=5, translate=0.03)
        loader = DataLoader(train, batch_size=32, shuffle=True, seed=0, augment=moved, device_queue=handle)
        held_out = DataLoader(test, batch_size=64, shuffle=False, device_queue=handle)
        model = cnn()
        optimizer = optim.AdamW(model.parameters(), lr=3e-3, weight_decay=1e-2)
        steps = arguments.epochs * len(loader)
        schedule = optim.WarmupCosine(optimizer, warmup_steps=steps // 10, total_steps=steps)
        trainer = Trainer(
            model, optimizer, metrics=["accuracy", ConfusionMatrix(10)], scheduler=schedule, callbacks=[ModelCheckpoint(arguments.run)]
        )
        trainer.fit(loader, held_out, epochs=arguments.epochs, resume="auto")
        result = trainer.evaluate(held_out)

    print(f"accuracy on {len(test)} digits never seen: {result['accuracy']:.2%}")
    counts = np.asarray(result["confusion"])
    wrong = [(counts[i, j], train.classes[i], train.classes[j]) for i in range(10) for j in range(10) if i != j and counts[i, j]]
    for count, is_a, taken_for in sorted(wrong, reverse=True)[:3]:
        print(f"  {count} time(s) a {is_a} was taken for a {taken_for}")


if __name__ == "__main__":
    main()
