"""A convolutional classifier: argparse, a loader, a schedule, evaluation, a checkpoint."""

import argparse
import os

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self, classes: int):
        super(Net, self).__init__()  # noqa: UP008, the form older scripts have
        self.conv1 = nn.Conv2d(1, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6)
        self.conv2 = nn.Conv2d(6, 8, kernel_size=3, stride=2)
        self.dropout = nn.Dropout(0.0)
        self.fc = nn.Linear(8 * 3 * 3, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norm(self.conv1(x)))
        x = F.max_pool2d(x, 2) if x.size(-1) > 14 else x
        x = torch.flatten(F.relu(self.conv2(x)), 1)
        return F.log_softmax(self.fc(self.dropout(x)), dim=1)


def patterns(count: int, classes: int, seed: int):
    rng = np.random.RandomState(seed)
    shapes = np.random.RandomState(0).rand(classes, 1, 8, 8)
    labels = rng.randint(0, classes, count)
    images = shapes[labels] + 0.2 * rng.randn(count, 1, 8, 8)
    return TensorDataset(torch.from_numpy(images.astype(np.float32)), torch.from_numpy(labels.astype(np.int64)))


def train(args, model, device, loader, optimizer, epoch):
    model.train()
    total = 0.0
    for batch_idx, (data, target) in enumerate(loader):
        data, target = data.to(device), target.to(device, non_blocking=True)
        optimizer.zero_grad()
        loss = F.nll_loss(model(data), target)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        total += loss.item()
        if batch_idx % args.log_interval == 0:
            print(f"epoch {epoch} [{batch_idx * len(data)}/{len(loader.dataset)}] loss {loss.item():.4f}")
    return total / len(loader)


@torch.no_grad()
def test(model, device, loader):
    model.eval()
    loss, correct = 0.0, 0
    for data, target in loader:
        data, target = data.to(device), target.to(device)
        output = model(data)
        loss += F.nll_loss(output, target, reduction="sum").item()
        correct += output.argmax(dim=1, keepdim=True).eq(target.view_as(output.argmax(dim=1, keepdim=True))).sum().item()
    return loss / len(loader.dataset), correct / len(loader.dataset)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=1.0)
    parser.add_argument("--log-interval", type=int, default=4)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--no-cuda", action="store_true")
    parser.add_argument("--ordered", action="store_true")
    parser.add_argument("--start", help="weights to start from")
    parser.add_argument("--save", default="cnn.pt")
    args = parser.parse_args()
    torch.manual_seed(1)
    use_cuda = not args.no_cuda and torch.cuda.is_available()
    device = torch.device("cuda" if use_cuda else "cpu")
    train_loader = DataLoader(
        patterns(96, 4, 1), batch_size=16, shuffle=not args.ordered, num_workers=args.workers, pin_memory=use_cuda, drop_last=True
    )
    test_loader = DataLoader(patterns(40, 4, 2), batch_size=20)
    model = Net(4).to(device)
    if args.start:
        model.load_state_dict(torch.load(args.start, map_location=device))
    optimizer = optim.Adadelta(model.parameters(), lr=args.lr)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    losses = []
    for epoch in range(1, args.epochs + 1):
        losses.append(train(args, model, device, train_loader, optimizer, epoch))
        print("test", *(f"{value:.4f}" for value in test(model, device, test_loader)), "lr", scheduler.get_last_lr()[0])
        scheduler.step()
    checkpoint = {"epoch": args.epochs, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(checkpoint, args.save)
    again = Net(4)
    restored = torch.load(args.save, map_location="cpu", weights_only=True)
    again.load_state_dict(restored["model"])
    before, after = test(model, device, test_loader), test(again, torch.device("cpu"), test_loader)
    assert abs(before[0] - after[0]) < 1e-4 and restored["epoch"] == args.epochs and os.path.getsize(args.save) > 0
    print(f"first {losses[0]:.6f} last {losses[-1]:.6f}")


if __name__ == "__main__":
    main()
