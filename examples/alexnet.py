"""AlexNet (Krizhevsky, arXiv 1404.5997) as a list of layers, functions among them."""

from torch import nn
from torch.nn import functional

from schedir.training import deferred


def alexnet(width: int, channels: int, classes: int, size: int) -> list[object]:
    """AlexNet on images stretched to `size` x `size`; as published `width` is 64, `size` 224."""
    return [
        lambda images: functional.interpolate(images, (size, size), mode="bilinear"),
        deferred(nn.Conv2d, channels, width, 11, stride=4, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(3, 2),
        deferred(nn.Conv2d, width, 3 * width, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(3, 2),
        deferred(nn.Conv2d, 3 * width, 6 * width, 3, padding=1),
        nn.ReLU(),
        deferred(nn.Conv2d, 6 * width, 4 * width, 3, padding=1),
        nn.ReLU(),
        deferred(nn.Conv2d, 4 * width, 4 * width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(3, 2),
        nn.AdaptiveAvgPool2d(6),
        lambda x: x.flatten(1),
        nn.Dropout(),
        deferred(nn.Linear, 36 * 4 * width, 64 * width),
        nn.ReLU(),
        nn.Dropout(),
        deferred(nn.Linear, 64 * width, 64 * width),
        nn.ReLU(),
        deferred(nn.Linear, 64 * width, classes),
    ]
