"""A byte-level Llama as a list of layers, and how its blocks are split for tensor parallelism.

Nothing here depends on schedir.
"""

from collections import OrderedDict

import attrs
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional

BYTES = 256


@attrs.frozen
class Config:
    """The size of a model."""

    layers: int = 4
    width: int = 64
    heads: int = 4
    context: int = 64


class Block(nn.Module):
    """Causal attention with rotary positions, then SwiGLU, each on a residual path."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        width, self.size = config.width, config.width // config.heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query, self.key, self.value, self.mix = (
            nn.Linear(width, width, bias=False) for _ in range(4)
        )
        self.gate, self.up = (nn.Linear(width, 3 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        # -1: of a split layer only some heads are here.
        query, key, value = (
            layer(y).unflatten(-1, (-1, self.size)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        seen = functional.scaled_dot_product_attention(
            rotated(query), rotated(key), value, is_causal=True
        )
        x = x + self.mix(seen.transpose(1, 2).flatten(2))
        z = self.norm2(x)
        out: Tensor = x + self.down(functional.silu(self.gate(z)) * self.up(z))
        return out


def rotated(x: Tensor) -> Tensor:
    """Rotary positions of queries or keys, of shape [rows, heads, places, size]."""
    places, half = x.shape[-2], x.shape[-1] // 2
    speeds = 10_000.0 ** (-torch.arange(half, device=x.device) / half)
    angles = torch.arange(places, device=x.device)[:, None] * speeds
    one, other = x[..., :half], x[..., half:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([one * cos - other * sin, one * sin + other * cos], -1)


def llama(config: Config, seed: int = 0) -> OrderedDict[str, nn.Module]:
    """The layers by name; every process makes equal ones."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers: list[tuple[str, nn.Module]] = [("embedding", nn.Embedding(BYTES, config.width))]
        layers += [(f"block{i}", Block(config)) for i in range(config.layers)]
        layers.append(("norm", nn.RMSNorm(config.width)))
        layers.append(("head", nn.Linear(config.width, BYTES, bias=False)))
    return OrderedDict(layers)


def split(block: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """A block whose heads, and rows between them, are split over a mesh: Megatron-LM's cut.

    Its forward communicates twice, and so does its backward.
    """
    columns, rows = ColwiseParallel(), RowwiseParallel()
    plan = dict.fromkeys(("query", "key", "value", "gate", "up"), columns)
    return parallelize_module(block, mesh, {**plan, "mix": rows, "down": rows})
