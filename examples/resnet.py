"""ResNet (He et al., arXiv 1512.03385), as a list of layers: an ordinary module each.

Only `deferred` is for pipelines: it makes a layer on the rank that owns it.
"""

from torch import Tensor, nn

from schedir.training import deferred

BLOCKS = {14: (1, 1, 1, 1), 26: (2, 2, 2, 2), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3)}
"""By the number of layers that have weights: the bottlenecks of each of the four widths."""


class Bottleneck(nn.Module):
    """Three convolutions, to a fourth of the channels and back, beside a shortcut."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        out = 4 * width
        self.body = nn.Sequential(
            *(nn.Conv2d(channels, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
            nn.Conv2d(width, width, 3, stride, padding=1, bias=False),
            *(nn.BatchNorm2d(width), nn.ReLU()),
            *(nn.Conv2d(width, out, 1, bias=False), nn.BatchNorm2d(out)),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != out:
            convolution = nn.Conv2d(channels, out, 1, stride, bias=False)
            self.shortcut = nn.Sequential(convolution, nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x) + self.shortcut(x)
        return out.relu()


def stem(channels: int, width: int, size: int) -> nn.Sequential:
    """Makes `width` channels, with a fourth of the rows and columns of large images, all of small
    ones."""
    if size <= 64:
        convolution = nn.Conv2d(channels, width, 3, padding=1, bias=False)
        return nn.Sequential(convolution, nn.BatchNorm2d(width), nn.ReLU())
    convolution = nn.Conv2d(channels, width, 7, stride=2, padding=3, bias=False)
    pool = nn.MaxPool2d(3, stride=2, padding=1)
    return nn.Sequential(convolution, nn.BatchNorm2d(width), nn.ReLU(), pool)


def head(channels: int, classes: int) -> nn.Sequential:
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


def resnet(depth: int, width: int, channels: int, classes: int, size: int) -> dict[str, object]:
    """ResNet-`depth` by the names of its layers; ResNet-50 as published has `width` 64.

    It is for images of `size` x `size` pixels and `channels` colours.
    """
    layers: dict[str, object] = {"stem": deferred(stem, channels, width, size)}
    channels = width
    for i, number in enumerate(BLOCKS[depth]):
        for j in range(number):
            stride = 2 if i > 0 and j == 0 else 1
            layers[f"block{i}_{j}"] = deferred(Bottleneck, channels, width << i, stride)
            channels = 4 * (width << i)
    layers["head"] = deferred(head, channels, classes)
    return layers
