"""One model on several devices, and on several machines.

    python examples/data_parallel.py --devices cl cpu         # two devices of this machine, even unlike ones
    mpiexec -n 2 python examples/data_parallel.py             # two processes, here or on two machines (-hosts a,b)

Both end with the weights one device would have reached on the whole batch.
"""

import argparse
import json
from pathlib import Path

import netcl
from netcl import nn, optim
from netcl.data import DataLoader, datasets
from netcl.distributed import DataParallel, DistributedDataParallel, ShardedLoader, world


def model() -> nn.Module:
    netcl.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def train(parallel: nn.Module, loader, epochs: int) -> list[float]:
    """The loss of every step."""
    optimizer, loss_of = optim.SGD(parallel.parameters(), lr=0.2), nn.CrossEntropyLoss()
    losses = []
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss = loss_of(parallel(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss)
    return [loss.item() for loss in losses]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", nargs="*", default=["cpu", "cpu"], help="for one process with several devices")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--losses", help="a file for the loss of every step; the rank is appended to its name")
    parser.add_argument("--smoke", action="store_true", help="one epoch")
    arguments = parser.parse_args()
    epochs = 1 if arguments.smoke else arguments.epochs
    train_set, _ = datasets.digits()
    ranks = world()
    if ranks.size > 1:
        part = ShardedLoader(train_set, batch_size=64, shuffle=True, seed=0, drop_last=True)
        losses = train(DistributedDataParallel(model()), part, epochs)
        print(f"rank {ranks.rank} of {ranks.size}: loss {losses[-1]:.4f}")
    else:
        loader = DataLoader(train_set, batch_size=64, shuffle=True, seed=0, drop_last=True)
        losses = train(DataParallel(model(), devices=arguments.devices), loader, epochs)
        print(f"{len(arguments.devices)} devices: loss {losses[-1]:.4f}")
    if arguments.losses:
        Path(f"{arguments.losses}.{ranks.rank}").write_text(json.dumps(losses), encoding="utf-8")


if __name__ == "__main__":
    main()
