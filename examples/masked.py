"""A masked language model of bytes (after BERT, arXiv 1810.04805), and lines to train it on.

Some bytes of each line are hidden, and the model predicts them from both sides. Lines differ in
length, so they are padded. A mask goes from layer to layer, so that attention ignores the padding;
the loss does not count it.
"""

from collections.abc import Sequence

import attrs
import torch
from gpt import corpus
from torch import Tensor, nn
from torch.nn import functional

from schedir.training import deferred

HIDDEN, PADDING = 256, 257  # beside the 256 bytes
IGNORED = -100  # in a target: what the loss leaves out


@attrs.frozen
class Config:
    """The size of a model."""

    layers: int
    width: int
    heads: int
    context: int


class Positions(nn.Module):
    """Adds each byte's position to its vector."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.places = nn.Parameter(0.02 * torch.randn(config.context, config.width))

    def forward(self, x: Tensor, padding: Tensor) -> tuple[Tensor, Tensor]:
        return x + self.places, padding


class Block(nn.Module):
    """A transformer layer that ignores padding, and passes the mask on."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(
            *(config.width, config.heads, 4 * config.width),
            dropout=0,
            activation="gelu",
            batch_first=True,
            norm_first=True,
        )

    def forward(self, x: Tensor, padding: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer(x, src_key_padding_mask=padding), padding


class Norm(nn.Module):
    """The last layer to get the mask."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.width)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        out: Tensor = self.norm(x)
        return out


def masked_model(config: Config) -> dict[str, object]:
    """The layers by name; the first and the last share their weights."""
    bytes_ = deferred(_embedding, config)
    return {
        "embedding": bytes_.tied("bytes", lambda layer, x: (layer(x), x == PADDING)),
        "positions": deferred(Positions, config),
        **{f"block{i}": deferred(Block, config) for i in range(config.layers)},
        "norm": deferred(Norm, config),
        "head": bytes_.tied("bytes", lambda layer, x: functional.linear(x, layer.weight)),
    }


def _embedding(config: Config) -> nn.Embedding:
    embedding = nn.Embedding(PADDING + 1, config.width)
    nn.init.normal_(embedding.weight, std=0.02)
    return embedding


def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
    """The mean cross-entropy of the hidden bytes, in nats."""
    return functional.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=IGNORED)


def counted(target: Tensor) -> Tensor:
    """The number of bytes that the loss is the mean over."""
    return (target != IGNORED).sum()


def lines(number: int, longest: int) -> tuple[list[bytes], list[bytes]]:
    """Lines of the standard library's source to train on, and a tenth as many held out."""
    train, held_out = (
        [line for line in bytes(text.numpy()).split(b"\n") if 8 <= len(line) <= longest]
        for text in corpus(max(1_000_000, 160 * number), held_out=0.1)
    )
    return train[:number], held_out[: number // 10]


def hide(batch: Sequence[bytes], context: int) -> tuple[Tensor, Tensor]:
    """Lines as rows of `context` tokens with about 15 % of the bytes hidden, and the hidden
    bytes."""
    rows = torch.full((len(batch), context), PADDING)
    for row, line in zip(rows, batch, strict=True):
        row[: len(line)] = torch.tensor(list(line))
    chance = torch.rand(rows.shape).masked_fill(rows == PADDING, 1)
    hidden = (chance < 0.15) | (chance == chance.amin(1, keepdim=True))  # one of a line at least
    return rows.masked_fill(hidden, HIDDEN), rows.masked_fill(~hidden, IGNORED)
