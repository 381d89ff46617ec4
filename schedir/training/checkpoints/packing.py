"""Plain values as bytes, in a tensor, which a checkpoint keeps like any other.

DCP itself would pickle them, and run what the pickle asks for when it reads them again.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
from torch import Tensor

from schedir.errors import ExecutionError


def packed(value: Any, what: str) -> Tensor:
    """Numbers, strings, tensors, and lists, tuples and dicts of them, as a vector of bytes.

    Raises ExecutionError where the value has something else in it, which could not be read back
    without running code from a file.
    """
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        unpacked(content := torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8), what)
    except (pickle.PicklingError, AttributeError, TypeError, ExecutionError) as error:
        raise ExecutionError(
            f"{what} can't be kept in a checkpoint, which holds tensors, numbers, strings, and "
            f"lists, tuples and dicts of them: {error}",
            cause=error,
        ) from error
    return content


def unpacked(content: Tensor, what: str) -> Any:
    """What was packed, on the CPU. Raises ExecutionError where that is something else."""
    try:
        return torch.load(
            io.BytesIO(content.numpy().tobytes()), map_location="cpu", weights_only=True
        )
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        reason = str(error).splitlines()[0]
        raise ExecutionError(f"{what} can't be read: {reason}", cause=error) from error
