"""A convolutional network for pictures of three colors: transforms, a loader, a schedule, evaluation, saving."""

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import optim
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms


class Colors(Dataset):
    """Noisy pictures that are mostly red, green or blue."""

    def __init__(self, count, seed, transform=None):
        generator = np.random.default_rng(seed)
        self.labels = generator.integers(0, 3, count)
        self.images = generator.integers(0, 160, (count, 12, 12, 3)).astype(np.uint8)
        self.images[np.arange(count), :, :, self.labels] += 60
        self.transform = transform

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        image = self.images[index] if self.transform is None else self.transform(self.images[index])
        return image, int(self.labels[index])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, kernel_size=3)
        self.norm, self.pool, self.drop = nn.BatchNorm2d(8), nn.MaxPool2d(2), nn.Dropout(0.1)
        self.fc = nn.Linear(8 * 2 * 2, 3)

    def forward(self, x):
        x = self.pool(F.relu(self.norm(self.conv1(x))))
        x = self.pool(F.relu(self.conv2(x), inplace=True))
        return self.fc(self.drop(torch.flatten(x, 1)))


def evaluate(model, loader, device):
    model.eval()
    loss, correct = 0.0, 0
    with torch.no_grad():
        for x, y in loader:
            x, y = x.to(device), y.to(device)
            output = model(x)
            loss += F.cross_entropy(output, y, reduction="sum").item()
            correct += (output.argmax(dim=1) == y).sum().item()
    return loss / len(loader.dataset), correct / len(loader.dataset)


torch.manual_seed(3)
device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
normalize = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.5, 0.5, 0.5), (0.25, 0.25, 0.25))])
train_loader = DataLoader(Colors(64, 1, normalize), batch_size=16, shuffle=True, drop_last=True)
test_loader = DataLoader(Colors(24, 2, normalize), batch_size=12)
model = Net().to(device)
optimizer = optim.AdamW(model.parameters(), lr=2e-2, weight_decay=0.01)
scheduler = CosineAnnealingLR(optimizer, T_max=3)
first = evaluate(model, test_loader, device)
for epoch in range(3):
    model.train()
    for x, y in train_loader:
        optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(model(x.to(device, non_blocking=True)), y.to(device))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), max_norm=5.0)
        optimizer.step()
    scheduler.step()
    print(f"epoch {epoch} loss {loss:.4f} lr {scheduler.get_last_lr()[0]:.5f} parameters {sum(p.numel() for p in model.parameters())}")
torch.save({"model": model.state_dict(), "epoch": 3}, "classifier.pt")
model.load_state_dict(torch.load("classifier.pt", map_location="cpu", weights_only=True)["model"])
print("first {:.6f} last {:.6f} accuracy {:.2f}".format(first[0], *evaluate(model, test_loader, device)))
