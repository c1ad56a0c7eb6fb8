"""A variational autoencoder: two heads, a sampled code, a loss of two parts, samples drawn at the end."""

import argparse

import numpy as np
import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset


class Stripes(Dataset):
    """Images whose stripes differ in width and place."""

    def __len__(self):
        return 64

    def __getitem__(self, index):
        rng = np.random.RandomState(index)
        width, start = rng.randint(1, 4), rng.randint(0, 3)
        image = np.zeros((1, 6, 6), dtype=np.float32)
        image[:, :, start : start + width] = 1
        return torch.from_numpy(image), index % 2


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(36, 24), nn.ReLU(inplace=True))
        self.mean, self.logvar = nn.Linear(24, 3), nn.Linear(24, 3)
        self.decoder = nn.Sequential(nn.Linear(3, 24), nn.ReLU(), nn.Linear(24, 36))

    def reparameterize(self, mu, logvar):
        std = torch.exp(0.5 * logvar)
        eps = torch.randn_like(std)
        return eps.mul(std).add_(mu)

    def forward(self, x):
        hidden = self.encoder(x.view(-1, 36))
        mu, logvar = self.mean(hidden), self.logvar(hidden)
        return torch.sigmoid(self.decoder(self.reparameterize(mu, logvar))), mu, logvar


def loss_function(recon, x, mu, logvar):
    bce = F.binary_cross_entropy(recon, x.view(-1, 36), reduction="sum")
    kld = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
    return bce + kld


parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=8)
parser.add_argument("--start")
args = parser.parse_args()

torch.manual_seed(0)
if torch.accelerator.is_available() and torch.cuda.device_count() > 0:
    device = torch.accelerator.current_accelerator()
elif torch.backends.mps.is_available():
    device = torch.device("mps")
else:
    device = torch.device("cpu")
model = VAE().to(device)
if args.start:
    model.load_state_dict(torch.load(args.start, map_location=lambda storage, location: storage))
optimizer = optim.Adam(model.parameters(), lr=1e-2)
loader = DataLoader(Stripes(), batch_size=32, shuffle=True)
history = []
for _epoch in range(args.epochs):
    model.train()
    train_loss = 0
    for data, _ in loader:
        data = data.to(device)
        optimizer.zero_grad()
        recon, mu, logvar = model(data)
        loss = loss_function(recon, data, mu, logvar)
        loss.backward()
        train_loss += loss.item()
        optimizer.step()
    history.append(train_loss / len(loader.dataset))
with torch.no_grad():
    sample = torch.sigmoid(model.decoder(torch.randn(4, 3).to(device))).cpu()
assert sample.view(4, 1, 6, 6).shape == torch.Size([4, 1, 6, 6]) and sample.min() >= 0 and sample.max() <= 1
print(f"first {history[0]:.6f} last {history[-1]:.6f}")
