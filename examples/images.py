"""Images to classify: scikit-learn's digits, which come with it, or CIFAR-10 from disk."""

import argparse
import codecs
import pickle
from pathlib import Path
from typing import Any, TypeAlias

import attrs
import numpy as np
import torch
from sklearn.datasets import load_digits  # type: ignore[import-untyped]
from torch import Tensor
from torch.utils.data import TensorDataset

CLASSES = 10

Pair: TypeAlias = tuple[Tensor, ...]
"""An image and its class, or many of both."""


@attrs.frozen(eq=False)
class Images:
    """Pairs of an image and its class, for training and for testing.

    An image has the dimensions channel, row and column; its values are about -2 to 2.
    """

    train: TensorDataset
    test: TensorDataset

    @property
    def channels(self) -> int:
        """1 for grey, 3 for colours."""
        return self.train.tensors[0].shape[1]

    @property
    def size(self) -> int:
        """The rows, and as many columns."""
        return self.train.tensors[0].shape[2]


def _dataset(pixels: Tensor, classes: Tensor) -> TensorDataset:
    # From 0 to 1 they are; the mean of both is about 0.4, their deviation 0.3.
    return TensorDataset((pixels - 0.4) / 0.3, classes)


def digits() -> Images:
    """1,797 handwritten digits of 8 x 8 pixels; a random fifth is for testing."""
    found = load_digits()
    pixels = torch.tensor(found.images, dtype=torch.float32)[:, None] / 16
    order = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(0))
    pixels, classes = pixels[order], torch.tensor(found.target)[order].long()
    test = len(pixels) // 5
    return Images(_dataset(pixels[test:], classes[test:]), _dataset(pixels[:test], classes[:test]))


def cifar(folder: str) -> Images:
    """CIFAR-10 for Python, as unpacked in `folder`: 60,000 photographs of 32 x 32 pixels."""
    path = Path(folder)
    if (path / "cifar-10-batches-py").is_dir():
        path /= "cifar-10-batches-py"
    try:
        pairs = [_batch(path / f"data_batch_{i}") for i in range(1, 6)]
        pixels, classes = (torch.cat(parts) for parts in zip(*pairs, strict=True))
        return Images(_dataset(pixels, classes), _dataset(*_batch(path / "test_batch")))
    except OSError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _batch(path: Path) -> Pair:
    with path.open("rb") as file:
        try:
            found = _Arrays(file, encoding="bytes").load()
            pixels = torch.from_numpy(found[b"data"].copy()).view(-1, 3, 32, 32)
            return pixels.float() / 255, torch.tensor(found[b"labels"])
        except (pickle.UnpicklingError, EOFError, TypeError, KeyError, RuntimeError) as error:
            message = f"{path} holds no batch of CIFAR-10: {error}"
            raise argparse.ArgumentTypeError(message) from error


class _Arrays(pickle.Unpickler):
    """Reads arrays and Python's built-in types, without running code from the pickle."""

    def find_class(self, module: str, name: str) -> Any:
        known: dict[str, Any] = {
            "numpy.ndarray": np.ndarray,
            "numpy.dtype": np.dtype,
            "numpy.core.multiarray._reconstruct": np.empty(0).__reduce__()[0],
            "_codecs.encode": codecs.encode,
        }
        called = f"{module}.{name}".replace("._core.", ".core.")  # as it is called since numpy 2
        if called not in known:
            raise pickle.UnpicklingError(f"it calls {called}")
        return known[called]
