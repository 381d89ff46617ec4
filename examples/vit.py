"""A vision transformer (Dosovitskiy et al., arXiv 2010.11929), as a list of layers."""

import torch
from torch import Tensor, nn

from schedir.training import deferred


class Patches(nn.Module):
    """An image's patches as vectors with positions, after a class vector."""

    def __init__(self, channels: int, size: int, patch: int, width: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(channels, width, patch, stride=patch)
        self.summary = nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(0.02 * torch.randn(1, 1 + (size // patch) ** 2, width))

    def forward(self, images: Tensor) -> Tensor:
        patches = self.patches(images).flatten(2).transpose(1, 2)
        return torch.cat([self.summary.expand(len(images), -1, -1), patches], 1) + self.places


class Head(nn.Module):
    """Turns the first vector into the logits of the classes."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.logits = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.logits(self.norm(x[:, 0]))
        return out


def block(width: int, heads: int) -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(
        width, heads, 4 * width, dropout=0, activation="gelu", batch_first=True, norm_first=True
    )


def vit(
    depth: int, width: int, heads: int, patch: int, channels: int, classes: int, size: int
) -> dict[str, object]:
    """A ViT of `depth` blocks by the names of its layers; ViT-B/16 is 12, 768, 12 and 16."""
    layers: dict[str, object] = {"patches": deferred(Patches, channels, size, patch, width)}
    for i in range(depth):
        layers[f"block{i}"] = deferred(block, width, heads)
    layers["head"] = deferred(Head, width, classes)
    return layers
