"""Read the weights of a Hugging Face folder: all names and shapes first, values where they go."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Collection, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from schedir.errors import ExecutionError
from schedir.training.cutting.stages import tied_names
from schedir.training.huggingface.conversion import Lazy, load
from schedir.training.huggingface.models import on_meta, some, within

logger = logging.getLogger("schedir")

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_SILENT = re.compile(r"(^|\.)(inv_freq|position_ids|attn\.(masked_)?bias)$")


def weights_of(folder: Path, skeleton: Any, new: Collection[str] = ()) -> dict[str, Lazy]:
    """Find the tensors of a model on meta in a folder, from the headers of its files alone.

    They are under all names that they have in the model. Afterwards `skeleton` has the dtypes in
    which they are read, and keeps how they are converted.

    Raises ExecutionError, alike on every rank, if the folder does not have what the model needs.
    """
    kind = type(skeleton).__name__
    tensors = {name: x for path in _files(folder) for name, x in tensors_in(path).items()}
    narrow = [
        name for name, x in tensors.items() if x.dtype.itemsize == 1 and x.dtype != torch.bool
    ]
    if getattr(skeleton.config, "quantization_config", None) is not None or narrow:
        why = f"{narrow[0]} is {tensors[narrow[0]].dtype}" if narrow else "its config says how"
        raise ExecutionError(
            f"{folder} is quantised ({why}), and can't be trained as it is; dequantise it by "
            "from_pretrained, and save that"
        )
    model = on_meta(skeleton)
    info = load(model, tensors)
    for name, told in sorted(info.conversion_errors.items()):
        reason = str(told).strip().splitlines()[-1]
        raise ExecutionError(f"{folder} has tensors that don't become {name} of {kind}: {reason}")
    names = dict(skeleton.state_dict())
    if unknown := [part for part in new if not any(within(name, [part]) for name in names)]:
        raise ExecutionError(f"new= names {unknown[0]}, which {kind} does not have")
    wrong = [
        f"{name} is {list(there)} in {folder} and {list(here)} in {kind}"
        for name, there, here in sorted(info.mismatched_keys)
        if not within(name, new)
    ]
    if wrong:
        raise ExecutionError(f"{some(wrong)}; change the config, or name them in new=")
    found = {name: x for name, x in model.state_dict(keep_vars=True).items() if isinstance(x, Lazy)}
    for group in tied_names(skeleton):
        _tie(folder, group, found)
    lacks = [
        f"{name} {list(x.shape)}"
        for name, x in names.items()
        if name in info.missing_keys and name not in found and not within(name, new)
    ]
    if lacks:
        raise ExecutionError(
            f"{folder} lacks {some(lacks)}, which {kind} has; name in new= what is to be made "
            "from the seed"
        )
    if extra := sorted(name for name in info.unexpected_keys if not _SILENT.search(name)):
        logger.warning("%s has tensors that %s does not take: %s", folder, kind, some(extra))
    for name, tensor in skeleton.state_dict(keep_vars=True).items():
        if name in found:
            tensor.data = tensor.data.to(found[name].dtype)
    skeleton._weight_conversions = getattr(model, "_weight_conversions", None)
    return found


def tensors_in(path: Path) -> dict[str, Lazy]:
    """The tensors of a file, from its header. Raises ExecutionError if it is missing or damaged."""
    from safetensors import safe_open
    from transformers.modeling_utils import str_to_torch_dtype

    tensors = {}
    try:
        file: Any = safe_open(path, "pt")
        for name in file.keys():  # noqa: SIM118 (it is no mapping)
            piece = file.get_slice(name)
            dtype = str_to_torch_dtype[piece.get_dtype()]
            like = torch.empty(piece.get_shape(), dtype=dtype, device="meta")
            tensors[name] = Lazy(like, partial(file.get_tensor, name))
    except Exception as error:  # of safetensors
        why = "is missing" if not path.exists() else f"is no whole safetensors file: {error}"
        raise ExecutionError(f"{path} {why}") from error
    return tensors


def _tie(folder: Path, names: Iterable[str], found: dict[str, Lazy]) -> None:
    """Give a tied parameter's tensor all its names. Raises ExecutionError if two differ."""
    there = [name for name in names if name in found]
    if not there:
        return
    first, *others = there
    for other in others:
        if not torch.equal(found[first].compute(), found[other].compute()):
            raise ExecutionError(
                f"{folder} has {first} and {other} with different values, but the config ties "
                "them: pass the config with tie_word_embeddings=False, and weights= the folder"
            )
    found.update(dict.fromkeys(names, found[first]))


def _files(folder: Path) -> list[Path]:
    """The safetensors files of a model. Raises ExecutionError if there are none."""
    if (folder / WHOLE).exists():
        return [folder / WHOLE]
    index = folder / INDEX
    if not index.exists():
        what = f"there are no weights in {folder}: it has no {WHOLE}"
        if shards := sorted(folder.glob("*.safetensors")):
            what += f" and no {INDEX}, which says what {shards[0].name} holds"
        elif bins := sorted(folder.glob("*.bin")):
            what += (
                f", only {bins[0].name}, a pickle, which may run code; load it once by "
                "from_pretrained, and save that"
            )
        raise ExecutionError(what)
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        paths = [folder / name for name in names]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ExecutionError(f"{index} is no index of files: {error!r}") from error
    for name in names:
        if Path(name).name != name:
            raise ExecutionError(f"{index} names a file elsewhere: {name!r}")
    return paths
