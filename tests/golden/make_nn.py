"""Makes nn.npz: what torch's layers and models give for the weights and inputs of nn_cases.py.

Run with an interpreter that has torch 2.13.0: ``python tests/golden/make_nn.py``; ``--missing`` computes only layers and functions that
the file lacks, and leaves the others as they are. No test needs torch. Everything is computed in
float64: in float32 the gradients of ResNet-18 differ by 0.2 % from run to run of the order of summation.
"""

from __future__ import annotations

import sys
from operator import attrgetter
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parent))
import nn_cases as cases

# ---- models, as their papers describe them


class LeNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 6, 5, padding=2), nn.Conv2d(6, 16, 5)
        self.fc1, self.fc2, self.fc3 = nn.Linear(400, 120), nn.Linear(120, 84), nn.Linear(84, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return self.fc3(F.relu(self.fc2(F.relu(self.fc1(x.flatten(1))))))


class Block(nn.Module):
    """Both residual blocks: ``kernels`` and ``widths`` of the convolutions, the stride at one of them."""

    def __init__(self, inside, kernels, widths, strided, stride):
        super().__init__()
        before = inside
        for i, (kernel, width) in enumerate(zip(kernels, widths, strict=True)):
            step = stride if i == strided else 1
            setattr(self, f"conv{i + 1}", nn.Conv2d(before, width, kernel, step, kernel // 2, bias=False))
            setattr(self, f"bn{i + 1}", nn.BatchNorm2d(width))
            before = width
        self.count, self.downsample = len(kernels), None
        if stride != 1 or inside != before:
            self.downsample = nn.Sequential(nn.Conv2d(inside, before, 1, stride, bias=False), nn.BatchNorm2d(before))

    def forward(self, x):
        y = x
        for i in range(self.count):
            y = getattr(self, f"bn{i + 1}")(getattr(self, f"conv{i + 1}")(y))
            y = y if i == self.count - 1 else F.relu(y)
        return F.relu(y + (x if self.downsample is None else self.downsample(x)))


class ResNet(nn.Module):
    def __init__(self, counts, width, bottleneck, cifar, classes=10):
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, 1, 1, bias=False) if cifar else nn.Conv2d(3, width, 7, 2, 3, bias=False)
        self.bn1, self.cifar = nn.BatchNorm2d(width), cifar
        inside = width
        for stage, count in enumerate(counts):
            blocks, planes = [], width << stage
            for i in range(count):
                stride = 2 if stage and not i else 1
                shape = ((1, 3, 1), (planes, planes, 4 * planes), 1) if bottleneck else ((3, 3), (planes, planes), 0)
                blocks.append(Block(inside, *shape, stride))
                inside = shape[1][-1]
            setattr(self, f"layer{stage + 1}", nn.Sequential(*blocks))
        self.fc = nn.Linear(inside, classes)

    def forward(self, x):
        x = F.relu(self.bn1(self.conv1(x)))
        x = x if self.cifar else F.max_pool2d(x, 3, 2, 1)
        for stage in (self.layer1, self.layer2, self.layer3, self.layer4):
            x = stage(x)
        return self.fc(x.mean((2, 3)))


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.c_attn, self.c_proj, self.heads = nn.Linear(width, 3 * width), nn.Linear(width, width), heads

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (part.view(b, t, self.heads, c // self.heads).transpose(1, 2) for part in self.c_attn(x).split(c, 2))
        scores = (q @ k.transpose(2, 3) / (c // self.heads) ** 0.5).masked_fill(torch.ones(t, t).tril() == 0, -torch.inf)
        return self.c_proj((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, t, c))


class FeedForward(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.c_fc, self.c_proj = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return self.c_proj(F.gelu(self.c_fc(x)))


class DecoderBlock(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(width), Attention(width, heads)
        self.ln_2, self.mlp = nn.LayerNorm(width), FeedForward(width)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, vocab_size, block_size, n_layer, n_head, n_embd):
        super().__init__()
        self.block_size = block_size
        self.transformer = nn.ModuleDict({
            "wte": nn.Embedding(vocab_size, n_embd), "wpe": nn.Embedding(block_size, n_embd),
            "h": nn.ModuleList(DecoderBlock(n_embd, n_head) for _ in range(n_layer)), "ln_f": nn.LayerNorm(n_embd),
        })  # fmt: skip
        self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)
        self.lm_head.weight = self.transformer["wte"].weight

    def forward(self, tokens):
        x = self.transformer["wte"](tokens) + self.transformer["wpe"](torch.arange(tokens.shape[1]))
        for block in self.transformer["h"]:
            x = block(x)
        return self.lm_head(self.transformer["ln_f"](x))

    def greedy(self, tokens, count):
        for _ in range(count):
            tokens = torch.cat([tokens, self(tokens[:, -self.block_size :])[:, -1].argmax(-1, keepdim=True)], 1)
        return tokens


class ViT(nn.Module):
    """The state dict has torchvision's names: see test_golden.py."""

    def __init__(self, image_size, patch_size, num_layers, num_heads, hidden_dim, mlp_dim, num_classes):
        super().__init__()
        self.class_token = nn.Parameter(torch.zeros(1, 1, hidden_dim))
        self.conv_proj = nn.Conv2d(3, hidden_dim, patch_size, patch_size)
        self.encoder = nn.Module()
        self.encoder.pos_embedding = nn.Parameter(torch.zeros(1, (image_size // patch_size) ** 2 + 1, hidden_dim))
        self.encoder.layers = nn.Sequential()
        for i in range(num_layers):
            block = nn.Module()
            block.ln_1 = nn.LayerNorm(hidden_dim, 1e-6)
            block.self_attention = nn.MultiheadAttention(hidden_dim, num_heads, batch_first=True)
            block.ln_2 = nn.LayerNorm(hidden_dim, 1e-6)
            block.mlp = nn.Sequential(nn.Linear(hidden_dim, mlp_dim), nn.GELU(), nn.Identity(), nn.Linear(mlp_dim, hidden_dim))
            self.encoder.layers.add_module(f"encoder_layer_{i}", block)
        self.encoder.ln = nn.LayerNorm(hidden_dim, 1e-6)
        self.heads = nn.Sequential()
        self.heads.add_module("head", nn.Linear(hidden_dim, num_classes))

    def forward(self, x):
        tokens = self.conv_proj(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_token.expand(len(x), -1, -1), tokens], 1) + self.encoder.pos_embedding
        for block in self.encoder.layers:
            y = block.ln_1(x)
            x = x + block.self_attention(y, y, y, need_weights=False)[0]
            x = x + block.mlp(block.ln_2(x))
        return self.heads(self.encoder.ln(x)[:, 0])


class Encoder(nn.Module):
    def __init__(self, **options):
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, **options)
        self.encoder = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(32), enable_nested_tensor=False)

    def forward(self, x):
        return self.encoder(x, src_key_padding_mask=torch.from_numpy(cases.PADDING)).flatten(0, 1)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(10, 12, num_layers=2, batch_first=True, bidirectional=True)

    def forward(self, x):
        return self.lstm(x)[0].flatten(0, 1)


MODELS = {
    "lenet": LeNet,
    "resnet18_cifar": lambda: ResNet([2, 2, 2, 2], 64, bottleneck=False, cifar=True),
    "bottleneck": lambda: ResNet([1, 2, 1, 1], 8, bottleneck=True, cifar=False),
    "encoder": Encoder,
    "encoder_norm_first": lambda: Encoder(norm_first=True, activation="gelu"),
    "gpt": lambda: GPT(**cases.GPT),
    "lstm": Recurrent,
    "vit": lambda: ViT(**cases.VIT),
}


# ---- running them


def filled(module, name="", lift=0.0):
    """The module with the values of nn_cases in its state, in float64."""
    values = cases.state({key: tuple(t.shape) for key, t in module.state_dict().items()}, cases.TIED.get(name), lift)
    module.load_state_dict({key: torch.from_numpy(np.asarray(value)) for key, value in values.items()})
    return module.double()


def tensor(array):
    t = torch.from_numpy(array)
    return t.double() if t.is_floating_point() else t


def numpy(tensors):
    return [t.detach().numpy().astype(np.float32) for t in cases.several(tensors)]


def run_wrapped(name):
    wrapper, kind, args, kwargs, _ = cases.WRAPPED[name]
    return run_layer(name, filled(attrgetter(wrapper)(nn.utils)(getattr(nn, kind)(*args, **kwargs))))


def run_packed(name):
    lstm, x = filled(nn.LSTM(4, 3, num_layers=2, bidirectional=True)), tensor(cases.uniform("packed.x", (5, 5, 4))).requires_grad_()
    state = tuple(tensor(cases.uniform(f"packed.{part}", (4, 5, 3))) for part in "hc")
    packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor(cases.PACKED_LENGTHS), enforce_sorted=False)
    y, final = lstm(packed, state)
    return _results(name, cases.several((nn.utils.rnn.pad_packed_sequence(y, padding_value=0.5)[0], final)), [x], lstm)


def run_layer(name, module=None):
    if module is None:
        kind, args, kwargs, _ = cases.LAYERS[name]
        module = filled(getattr(nn, kind)(*args, **kwargs))
    inputs = [tensor(x) for x in cases.layer_inputs(name)]
    for x in inputs:
        x.requires_grad_(x.is_floating_point())
    given = [F.log_softmax(inputs[0], -1), *inputs[1:]] if name.startswith(cases.SOFTENED) else inputs
    return {**_results(name, cases.several(module(*given)), inputs, module), **_evaluated(name, module, inputs)}


def run_function(name):
    function, _, options = cases.FUNCTIONS[name]
    inputs = [tensor(x) for x in cases.layer_inputs(name)]
    for x in inputs:
        x.requires_grad_(x.is_floating_point())
    given = [F.log_softmax(inputs[0], -1), *inputs[1:]] if name.startswith(cases.SOFTENED) else inputs
    options = {key: tensor(value) if isinstance(value, np.ndarray) else value for key, value in options.items()}
    options = {key: torch.tensor(value) if key.endswith("lengths") else value for key, value in options.items()}
    return _results(name, cases.several(getattr(F, function)(*given, **options)), inputs, nn.Identity())


def _results(name, outputs, inputs, module):
    weight = [tensor(cases.uniform(f"{name}.g{i}", tuple(o.shape))) for i, o in enumerate(outputs)]
    sum((o * w).sum() for o, w in zip(outputs, weight, strict=True)).backward()
    found = {f"out{i}": o for i, o in enumerate(outputs)}
    found |= {f"dx{i}": x.grad for i, x in enumerate(inputs) if x.grad is not None}
    found |= {f"d_{key}": p.grad for key, p in module.named_parameters()}
    return {key: numpy(value)[0] for key, value in found.items()}


def _evaluated(name, module, inputs):
    if not name.startswith(cases.EVALUATED):
        return {}
    found = {f"state_{key}": value for key, value in module.state_dict().items() if "running" in key}
    found["eval"] = module.eval()(inputs[0])
    return {key: numpy(value)[0] for key, value in found.items()}


def run_model(name):
    model, x = filled(MODELS[name](), name), tensor(cases.INPUTS[name])
    found = {"eval": model.eval()(x).detach().numpy()}
    found["train"] = model.train()(x).detach().numpy()
    model = filled(MODELS[name](), name, cases.LIFT)
    loss = F.cross_entropy(model(x).flatten(0, -2), tensor(cases.TARGETS[name]))
    loss.backward()
    found["loss"] = loss.detach().numpy()
    found["norms"] = np.array([p.grad.norm().item() for p in model.parameters()], np.float32)
    found["grads"] = np.concatenate([cases.shown(p.grad.numpy()) for p in model.parameters()])
    found["buffers"] = np.concatenate([cases.shown(b.numpy()) for b in model.buffers()] or [np.zeros(0)]).astype(np.float32)
    if name == "gpt":
        found["greedy"] = model.eval().greedy(x[:, :5], 40).numpy().astype(np.int16)
    return found


def train(name, optimizer):
    model, x = filled(MODELS[name](), name, cases.LIFT), tensor(cases.TRAINING_INPUTS[name])
    target = tensor(cases.TRAINING_TARGETS[name])
    steps = getattr(torch.optim, "RMSprop" if optimizer == "RMSProp" else optimizer)(model.parameters(), **cases.OPTIMIZERS[optimizer])
    schedule = torch.optim.lr_scheduler.StepLR(steps, **cases.SCHEDULE)
    losses = []
    for _ in range(cases.STEPS):
        steps.zero_grad()
        loss = F.cross_entropy(model(x).flatten(0, -2), target)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), cases.CLIP)
        steps.step()
        schedule.step()
        losses.append(loss.item())
    parameters = np.concatenate([cases.shown(p.detach().numpy()) for p in model.parameters()])
    return {"losses": np.array(losses, np.float32), "parameters": parameters}


TABLES = (("layer", cases.LAYERS, run_layer), ("function", cases.FUNCTIONS, run_function), ("wrapped", cases.WRAPPED, run_wrapped),
          ("packed", ("lstm",), run_packed))  # fmt: skip


def main():
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True, warn_only=True)  # unpooling has no such form, and no equal places here
    path = Path(__file__).with_name("nn.npz")
    arrays: dict[str, np.ndarray] = {}
    only_missing = "--missing" in sys.argv
    if only_missing:
        with np.load(path) as file:
            kept = {f"{kind}/{name}" for kind, table, _ in TABLES for name in table}
            arrays = {key: file[key] for key in file if key.split("/")[0] in ("model", "train") or "/".join(key.split("/")[:2]) in kept}
    there = {"/".join(key.split("/")[:2]) for key in arrays}
    for kind, table, run in TABLES:
        for name in table:
            if f"{kind}/{name}" not in there:
                arrays |= {f"{kind}/{name}/{key}": value for key, value in run(name).items()}
    for name in () if only_missing else MODELS:
        arrays |= {f"model/{name}/{key}": value for key, value in run_model(name).items()}
    for name in () if only_missing else cases.TRAINED:
        for optimizer in cases.OPTIMIZERS:
            arrays |= {f"train/{name}/{optimizer}/{key}": value for key, value in train(name, optimizer).items()}
    arrays = {name: array.astype(np.float32) if array.dtype == np.float64 else array for name, array in arrays.items()}
    np.savez_compressed(path, **arrays)
    print(f"{path.name}: {len(arrays)} arrays, {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
