"""A training step as it is and as `netcl.compile` replays it: the same numbers, without the Python between the kernels.

python examples/compiled_step.py [--device gpu] [--steps 200]
"""

import argparse
import itertools
import time

import netcl
from netcl import nn, optim
from netcl.data import DataLoader, datasets


def train(handle, compiled: bool, steps: int) -> tuple[float, float]:
    """The last loss and the milliseconds of a step."""
    netcl.manual_seed(0)
    digits, _ = datasets.digits()
    loader = DataLoader(digits, batch_size=64, shuffle=True, seed=0, drop_last=True, device_queue=handle)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = optim.Adam(model.parameters(), lr=1e-3)
    loss_of = nn.CrossEntropyLoss()

    def step(x, y):
        optimizer.zero_grad()
        loss = loss_of(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    run = netcl.compile(step) if compiled else step
    batches = itertools.islice(itertools.chain.from_iterable(itertools.repeat(loader)), steps)
    start, loss = 0.0, netcl.zeros(1)
    for number, (x, y) in enumerate(batches):
        if number == steps // 2:  # recorded and warm
            netcl.synchronize(handle)
            start = time.perf_counter()
        loss = run(x, y)
    last = loss.item()
    return last, 1e3 * (time.perf_counter() - start) / (steps - steps // 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--smoke", action="store_true", help="a few steps")
    arguments = parser.parse_args()
    steps = 10 if arguments.smoke else arguments.steps
    with netcl.device(arguments.device) as handle:
        results = {name: train(handle, name == "compiled", steps) for name in ("as it is", "compiled")}
    for name, (loss, milliseconds) in results.items():
        print(f"{name:9} loss {loss:.6f}  {milliseconds:.2f} ms per step")
    assert results["as it is"][0] == results["compiled"][0], "a replayed step gives the same numbers"


if __name__ == "__main__":
    main()
