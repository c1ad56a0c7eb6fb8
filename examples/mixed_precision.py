"""The same training in float32, float16 and bfloat16: matrix products in half, weights and losses in float32.

python examples/mixed_precision.py [--device gpu] [--steps 100]
"""

import argparse
import itertools
import time

import netcl
from netcl import amp, nn, optim
from netcl.data import DataLoader, datasets


def train(handle, dtype: str, steps: int) -> tuple[float, float]:
    """The last loss and the milliseconds of a step."""
    netcl.manual_seed(0)
    digits, _ = datasets.digits()
    loader = DataLoader(digits, batch_size=64, shuffle=True, seed=0, drop_last=True, device_queue=handle)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = optim.Adam(model.parameters(), lr=1e-3)
    loss_of, half = nn.CrossEntropyLoss(), dtype != "float32"
    scaler = amp.GradScaler() if dtype == "float16" else None  # the range of bfloat16 is that of float32
    start, loss = 0.0, netcl.zeros(1)
    for step, (x, y) in enumerate(itertools.islice(itertools.chain.from_iterable(itertools.repeat(loader)), steps)):
        if step == steps // 5:  # compiled and warm
            netcl.synchronize(handle)
            start = time.perf_counter()
        optimizer.zero_grad()
        with amp.autocast(enabled=half, dtype=dtype if half else "float16"):
            loss = loss_of(model(x), y)
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale_loss(loss).backward()
            scaler.step(optimizer)  # skipped on the device, without a wait, where a gradient overflowed
            scaler.update()
    netcl.synchronize(handle)
    return loss.item(), 1e3 * (time.perf_counter() - start) / (steps - steps // 5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--smoke", action="store_true", help="a few steps")
    arguments = parser.parse_args()
    with netcl.device(arguments.device) as handle:
        for dtype in ("float32", "float16", "bfloat16"):
            loss, milliseconds = train(handle, dtype, 5 if arguments.smoke else arguments.steps)
            print(f"{dtype:9}  loss {loss:.4f}  {milliseconds:.2f} ms per step")


if __name__ == "__main__":
    main()
