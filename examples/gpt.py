"""A byte-level GPT cut into pipeline stages, and the text it learns: Python's own source.

Nothing here depends on schedir: a stage is an ordinary module, and any module works.
"""

import os
import sysconfig
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import attrs
import torch
from torch import Tensor, nn
from torch.nn import functional

BYTES = 256


@attrs.frozen
class Config:
    """The size of a model."""

    layers: int = 8
    width: int = 192
    heads: int = 6
    context: int = 64
    dropout: float = 0.0


class Embedding(nn.Module):
    """Turns bytes into vectors, from the byte and its position."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.token = nn.Embedding(BYTES, config.width)
        self.position = nn.Embedding(config.context, config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        out: Tensor = self.dropout(self.token(tokens) + self.position(positions))
        return out


class Block(nn.Module):
    """A transformer layer: causal attention, then two linear layers, each on a residual path."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads = config.heads
        self.norm1 = nn.LayerNorm(config.width)
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.mix = nn.Linear(config.width, config.width)
        self.norm2 = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1))
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.dropout(self.mix(seen.transpose(1, 2).flatten(2)))
        out: Tensor = x + self.dropout(self.down(functional.gelu(self.up(self.norm2(x)))))
        return out


class Head(nn.Module):
    """Turns vectors into the logits of the next byte."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.width)
        self.logits = nn.Linear(config.width, BYTES, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.logits(self.norm(x))
        return out


def build_stage(config: Config, stage: int, stages: int, seed: int = 0) -> nn.Sequential:
    """Stage number `stage` of a model cut into `stages`, with its initial weights.

    The blocks are spread evenly; the first stage has the embedding too, the last one the head.
    Every layer has its own seed, so the weights do not depend on the cut, and every process can
    build any part of the model.
    """
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    seed *= 1_000_003
    if stage == 0:
        layers["embedding"] = _seeded(Embedding, config, seed)
    for i in range(config.layers * stage // stages, config.layers * (stage + 1) // stages):
        layers[f"block{i}"] = _seeded(Block, config, seed + 1 + i)
    if stage == stages - 1:
        layers["head"] = _seeded(Head, config, seed + 1 + config.layers)
    return nn.Sequential(layers)


def size(config: Config) -> int:
    """The number of parameters."""
    with torch.device("meta"):
        return sum(weight.numel() for weight in build_stage(config, 0, 1).parameters())


def _seeded(layer: Callable[[Config], nn.Module], config: Config, seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return layer(config).apply(_initialise)


def _initialise(module: nn.Module) -> None:
    """GPT-2's initial weights."""
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
    """The mean cross-entropy of the next byte, in nats."""
    return functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def corpus(limit: int = 8_000_000, held_out: float = 0.05) -> tuple[Tensor, Tensor]:
    """The bytes to train on, and the held-out bytes: the standard library's source without tests.

    Files are taken in the order of their names until they hold `limit` bytes; the last ones, at
    least the share `held_out` of all, are held out whole.
    """
    root = Path(sysconfig.get_path("stdlib"))
    skip = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    found: list[Path] = []
    for folder, below, names in os.walk(root):
        below[:] = [name for name in below if name not in skip]
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    files: list[bytes] = []
    for path in sorted(found, key=lambda path: path.relative_to(root).as_posix()):
        files.append(path.read_bytes())
        limit -= len(files[-1])
        if limit <= 0:
            break
    kept: list[bytes] = []
    wanted = held_out * sum(map(len, files))
    while sum(map(len, kept)) < wanted:
        kept.insert(0, files.pop())
    return _as_tensor(b"".join(files)), _as_tensor(b"".join(kept))


def _as_tensor(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def batch(text: Tensor, rows: int, context: int, seed: int, step: int) -> tuple[Tensor, Tensor]:
    """The inputs and targets of one step: `rows` windows, and the byte after each of theirs.

    A function of the seed and the step alone, so every process draws the same.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    starts = torch.randint(len(text) - context, (rows, 1), generator=generator)
    windows = text[starts + torch.arange(context + 1)].long()
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def windows(text: Tensor, context: int, rows: int = 128) -> list[tuple[Tensor, Tensor]]:
    """Batches of `rows` windows in all, spread evenly over `text`, and the bytes after theirs."""
    starts = torch.linspace(0, len(text) - context - 1, rows).long()[:, None]
    cut = text[starts + torch.arange(context + 1)].long()
    return [(part[:, :-1].contiguous(), part[:, 1:].contiguous()) for part in cut.split(16)]
