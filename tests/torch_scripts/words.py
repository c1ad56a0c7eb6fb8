"""A word model: a vocabulary, an embedding, an LSTM whose state is carried from window to window, perplexity, generated words."""

import argparse
import math
import os
import tempfile

import torch
import torch.nn as nn

TEXT = "the cat sat on the mat and the dog sat on the log while the cat saw the dog and the dog saw the cat " * 6


class Vocabulary:
    def __init__(self, words):
        self.names = sorted(set(words))
        self.index = {word: i for i, word in enumerate(self.names)}

    def __len__(self):
        return len(self.names)


class WordModel(nn.Module):
    def __init__(self, ntoken, size, hidden, layers, dropout=0.0):
        super().__init__()
        self.drop = nn.Dropout(dropout)
        self.encoder = nn.Embedding(ntoken, size)
        self.rnn = nn.LSTM(size, hidden, layers, dropout=dropout)
        self.decoder = nn.Linear(hidden, ntoken)
        self.layers, self.hidden = layers, hidden
        self.init_weights()

    def init_weights(self):
        nn.init.uniform_(self.encoder.weight, -0.5, 0.5)
        nn.init.zeros_(self.decoder.bias)
        nn.init.uniform_(self.decoder.weight, -0.5, 0.5)

    def forward(self, tokens, state):
        output, state = self.rnn(self.drop(self.encoder(tokens)), state)
        decoded = self.decoder(self.drop(output))
        return decoded.view(-1, decoded.size(2)), state

    def init_hidden(self, bsz):
        weight = next(self.parameters())
        return (weight.new_zeros(self.layers, bsz, self.hidden), weight.new_zeros(self.layers, bsz, self.hidden))


def repackage(state):
    """The same values without their history."""
    return state.detach() if isinstance(state, torch.Tensor) else tuple(repackage(part) for part in state)


def batchify(data, bsz, device):
    nbatch = data.size(0) // bsz
    return data.narrow(0, 0, nbatch * bsz).view(bsz, -1).t().contiguous().to(device)


parser = argparse.ArgumentParser()
parser.add_argument("--cuda", action="store_true")
parser.add_argument("--epochs", type=int, default=6)
parser.add_argument("--start")
args = parser.parse_args()
torch.manual_seed(3)
device = torch.device("cuda:0") if args.cuda else torch.device("cpu")

words = TEXT.split()
vocabulary = Vocabulary(words)
ids = torch.tensor([vocabulary.index[w] for w in words]).type(torch.int64)
data = batchify(ids, 4, device)
model = WordModel(len(vocabulary), 12, 24, 1).to(device)
if args.start:
    model.load_state_dict(torch.load(args.start))
criterion = nn.CrossEntropyLoss()
lr, bptt, losses = 4.0, 8, []
for epoch in range(args.epochs):
    model.train()
    total, count = 0.0, 0
    hidden = model.init_hidden(4)
    for i in range(0, data.size(0) - 1, bptt):
        length = min(bptt, len(data) - 1 - i)
        source, target = data[i : i + length], data[i + 1 : i + 1 + length].reshape(-1)
        model.zero_grad()
        hidden = repackage(hidden)
        output, hidden = model(source, hidden)
        loss = criterion(output, target)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for p in model.parameters():
            p.data.add_(p.grad, alpha=-lr)
        total, count = total + loss.item(), count + 1
    losses.append(total / count)
    print(f"epoch {epoch} loss {losses[-1]:.4f} perplexity {math.exp(losses[-1]):.2f}")

with tempfile.TemporaryDirectory() as folder:
    with open(os.path.join(folder, "model.pt"), "wb") as f:
        torch.save(model, f)
    with open(os.path.join(folder, "model.pt"), "rb") as f, torch.serialization.safe_globals([WordModel, nn.Embedding, nn.LSTM]):
        model = torch.load(f)
model.rnn.flatten_parameters()
model.eval()
token, state, said = torch.randint(len(vocabulary), (1, 1), dtype=torch.long).to(device), model.init_hidden(1), []
with torch.no_grad():
    for _ in range(5):
        output, state = model(token, state)
        token.fill_(torch.multinomial(output.squeeze().div(1.0).exp().cpu(), 1)[0])
        said.append(vocabulary.names[token.item()])
assert len(said) == 5
print(f"first {losses[0]:.6f} last {losses[-1]:.6f}")
