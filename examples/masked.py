"""A masked language model of bytes (after BERT, arXiv 1810.04805), and lines to train it on.

Of each line some bytes are hidden, and guessed from those on both sides. Lines differ in length:
what they are padded with is neither looked at, for which a mask goes along from layer to layer, nor
counted in the loss.
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
    """Adds to each byte's vector where it stands."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.places = nn.Parameter(0.02 * torch.randn(config.context, config.width))

    def forward(self, x: Tensor, padding: Tensor) -> tuple[Tensor, Tensor]:
        return x + self.places, padding


class Block(nn.Module):
    """A transformer layer that looks at all but padding, and passes on what that is."""

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
    """How many bytes that mean is over."""
    return (target != IGNORED).sum()


def lines(number: int, longest: int) -> tuple[list[bytes], list[bytes]]:
    """Lines of the standard library's source to train on, and a tenth as many held out."""
    train, held_out = (
        [line for line in bytes(text.numpy()).split(b"\n") if 8 <= len(line) <= longest]
        for text in corpus(max(1_000_000, 160 * number), held_out=0.1)
    )
    return train[:number], held_out[: number // 10]


def hide(batch: Sequence[bytes], context: int) -> tuple[Tensor, Tensor]:
    """Lines as rows of `context` tokens, some 15 % of their bytes hidden; and what these were."""
    rows = torch.full((len(batch), context), PADDING)
    for row, line in zip(rows, batch, strict=True):
        row[: len(line)] = torch.tensor(list(line))
    chance = torch.rand(rows.shape).masked_fill(rows == PADDING, 1)
    hidden = (chance < 0.15) | (chance == chance.amin(1, keepdim=True))  # one of a line at least
    return rows.masked_fill(hidden, HIDDEN), rows.masked_fill(~hidden, IGNORED)
