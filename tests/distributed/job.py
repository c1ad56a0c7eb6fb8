"""A training job that runs alone, on several devices, or as ranks under mpiexec, and writes the parameters it ends with.

``python job.py mlp out.npz [--devices a,b or a/2] [--steps 20] [--fault kill|shape|late|raise|swallow] [and gpt gpt.npz ...]``
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

import netcl
import netcl.autograd as ag
from netcl import nn, optim
from netcl.core.device import manager
from netcl.core.tensor import Tensor
from netcl.distributed import (
    DataParallel,
    DistributedDataParallel,
    ShardedOptimizer,
    convert_sync_batchnorm,
    load_checkpoint,
    save_checkpoint,
)
from netcl.distributed import world as this_world

BATCH = 8


def build(kind: str) -> tuple[nn.Module, np.ndarray, np.ndarray]:
    """A model and its one batch; the same on every rank."""
    netcl.manual_seed(3)
    rng = np.random.default_rng(5)
    if kind == "gpt":
        model: nn.Module = nn.GPT(vocab_size=17, block_size=6, n_layer=2, n_head=2, n_embd=16)
        tokens = rng.integers(0, 17, (BATCH, 7))
        return model, tokens[:, :-1], tokens[:, 1:]
    labels = rng.integers(0, 4, BATCH)
    if kind == "resnet":
        return nn.resnet18(num_classes=4, stem="cifar", width=8), rng.standard_normal((BATCH, 3, 8, 8)).astype(np.float32), labels
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4))
    return model, rng.standard_normal((BATCH, 6)).astype(np.float32), labels


def loss_of(model: nn.Module, x: np.ndarray, y: np.ndarray) -> Tensor:
    out = model(Tensor.from_host(model.queue, x))
    return ag.cross_entropy(out.reshape(-1, out.shape[-1]), Tensor.from_host(out.queue, y.reshape(-1)))


def optimizer_of(params: list[Tensor]) -> optim.Optimizer:
    return optim.SGD(params, lr=0.02, momentum=0.9)


def on_devices(model: nn.Module, x: np.ndarray, y: np.ndarray, args: argparse.Namespace) -> list[float]:
    whole, _, parts = args.devices.partition("/")
    devices = manager.partition(whole, int(parts)) if parts else whole.split(",")
    parallel = DataParallel(model, devices, sync_batchnorm=True, weights=args.weights)
    return learn(parallel, parallel.optimizer(optimizer_of), x, y, args.steps, args.max_norm)


def learn(model: nn.Module, opt: Any, x: np.ndarray, y: np.ndarray, steps: int, max_norm: float | None = None) -> list[float]:
    """The losses of some steps on one batch."""
    losses = []
    for _ in range(steps):
        loss = loss_of(model, x, y)
        loss.backward()
        opt.step(max_norm=max_norm)
        opt.zero_grad()
        losses.append(loss.item())
    return losses


def as_rank(model: nn.Module, x: np.ndarray, y: np.ndarray, args: argparse.Namespace) -> list[float]:
    world = this_world()
    part = slice(world.rank * len(x) // world.size, (world.rank + 1) * len(x) // world.size)
    convert_sync_batchnorm(model, world)
    wrapped = DistributedDataParallel(model, world, bucket_mb=args.bucket_mb, compress=args.compress)
    params = wrapped.parameters()
    opt = ShardedOptimizer(params, optimizer_of, world) if args.zero else optimizer_of(params)
    folder, losses, sent, start = args.checkpoints, [], [], 0
    if folder and folder.exists() and any(folder.iterdir()):
        start = load_checkpoint(folder, world=world, model=wrapped, optimizer=opt).step
    for step in range(start, args.steps):
        if step == args.fault_at and world.rank == 1:
            misbehave(args.fault)
        loss = loss_of(wrapped, x[part], y[part])
        loss.backward()
        opt.step(max_norm=args.max_norm)
        opt.zero_grad()
        losses.append(float(world.all_reduce(np.float64(loss.item()), "mean")))
        sent.append(world.bytes_sent + wrapped.bytes_sent)
        if folder:
            save_checkpoint(folder, world=world, model=wrapped, optimizer=opt, step=step + 1, keep_last=2)
    if args.out and world.rank == 0:
        print("bytes", *sent)
    return losses


def misbehave(fault: str) -> None:
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "late":
        time.sleep(600)
    if fault == "raise":
        raise ValueError("this rank has had enough")
    if fault == "swallow":
        with suppress(ValueError), this_world().together():
            raise ValueError("this rank has had enough")
        time.sleep(600)


def train(words: list[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", choices=["mlp", "resnet", "gpt"])
    parser.add_argument("out", type=Path)
    parser.add_argument("--devices", default="")
    parser.add_argument("--weights", type=lambda text: [float(part) for part in text.split(",")], default=None)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--max-norm", type=float, default=None)
    parser.add_argument("--bucket-mb", type=float, default=0.002)
    parser.add_argument("--compress", default=None)
    parser.add_argument("--zero", action="store_true")
    parser.add_argument("--checkpoints", type=Path, default=None)
    parser.add_argument("--fault", default="")
    parser.add_argument("--fault-at", type=int, default=-1)
    args = parser.parse_args(words)
    model, x, y = build(args.model)
    if args.fault == "shape" and this_world().rank == 1:
        model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 5))
    losses = (on_devices if args.devices else as_rank)(model, x, y, args)
    if args.devices or this_world().rank == 0:
        np.savez(args.out, np.array(losses), *(p.to_host() for p in model.parameters()))


def main() -> None:
    """Run what the command line describes; the word ``and`` stands between several runs."""
    words = sys.argv[1:]
    while "and" in words:
        train(words[: words.index("and")])
        words = words[words.index("and") + 1 :]
    train(words)


if __name__ == "__main__":
    main()
