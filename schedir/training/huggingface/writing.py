"""Write what is trained in stages as a Hugging Face folder."""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from schedir.errors import ExecutionError
from schedir.runtime import Executor
from schedir.runtime.accelerator import accelerator_of
from schedir.runtime.session import digest
from schedir.training.collective import everywhere
from schedir.training.huggingface import conversion
from schedir.training.huggingface.models import CONFIG, Model, some
from schedir.training.huggingface.reading import INDEX, WHOLE, weights_of
from schedir.training.huggingface.stages import PretrainedStage
from schedir.training.whole_names import Held, held_by

_COPIED = (
    *("generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model"),
    *("special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt"),
    *("spiece.model", "sentencepiece.bpe.model", "chat_template.jinja", "chat_template.json"),
    *("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"),
)

_File: TypeAlias = tuple[int, str, dict[str, tuple[int, str]]]
"""A stage's file: the stage, the file's name for now, and the size and dtype of each tensor."""


def save_pretrained(
    executor: Executor,
    folder: str | os.PathLike[str],
    *,
    max_shard_size: int | str = "5GB",
    dtype: torch.dtype | None = None,
) -> None:
    """Write the model of `stages_of` as a Hugging Face folder, which `from_pretrained` loads.

    >>> from tempfile import TemporaryDirectory
    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> from schedir import build
    >>> from schedir.runtime import Executor
    >>> from schedir.training import causal_lm_loss, save_pretrained, stages_of
    >>> config = GPT2Config(n_layer=2, n_embd=8, n_head=2, vocab_size=64, bos_token_id=0)
    >>> schedule = build("1f1b", ranks=2, microbatches=2)
    >>> stages = stages_of(config, schedule)
    >>> options = {"ties": stages.ties, "in_process": True}
    >>> with TemporaryDirectory() as folder:
    ...     with Executor(schedule, stages, causal_lm_loss, **options) as executor:
    ...         save_pretrained(executor, folder)
    ...     model = GPT2LMHeadModel.from_pretrained(folder)

    Every rank calls it, between two steps, and must see the folder. Each stage's first rank writes
    the stage's tensors, in files of at most `max_shard_size`. Their names and layout are those that
    were read, or the usual ones of the model's class. The config is written as it came; of a
    folder that was read, the files of the tokenizer and of generation are copied. `dtype` is that
    of the files, by default that of the parameters. What the model keeps in float32 stays so.

    The folder must be empty, or not exist. The files are written beside it, in `folder.saving`, and
    at the end one rename makes them the folder. So an interrupted write leaves no folder, and can
    be repeated.

    Raises ExecutionError on all ranks if any rank fails; if `stages_of` has not made the stages; if
    they have layers that the model's class does not have, such as those of LoRA; and if the copies
    of a tied parameter differ.
    """
    if not isinstance(executor, Executor):
        raise ExecutionError(
            "save_pretrained takes an executor; a plain model of transformers has a method of its "
            "own: model.save_pretrained(folder)"
        )
    target = Path(folder).resolve()  # a rename does not follow a link
    aside = target.with_name(f"{target.name}.saving")
    is_first = executor.pipeline == executor.rank == executor.slice == 0
    together = partial(everywhere, partial(executor.gather, what="save_pretrained"))
    accelerator_of(executor.device).synchronize()
    held = [one for one in held_by(executor) if one.section == "model"]
    together(lambda: _check(held, target, dtype))
    model = _origin(held[0])
    states: dict[int, dict[str, Tensor]] = {}
    told = list(chain(*together(lambda: _collect(held, model, states))))
    stages = {name: stage for name, stage, _ in sorted(told, reverse=True)}  # the first that has it
    own = {
        stage: {name: x for name, x in state.items() if stages[name] == stage}
        for stage, state in states.items()
    }

    def write() -> list[_File]:
        return [
            file
            for stage, state in own.items()
            for file in _write(aside, stage, state, model, max_shard_size, dtype)
        ]

    try:
        together(lambda: _prepare(aside, model, told) if is_first else None)
        files = sorted(chain(*together(write)))
        together(lambda: _finish(aside, target, model, files) if is_first else None)
    except ExecutionError:
        if is_first:
            shutil.rmtree(aside, ignore_errors=True)
        raise


def _origin(held: Held) -> Model:
    """The model that a stage is of. Raises ExecutionError if `stages_of` has not made the stage."""
    for module in held.module.modules():
        if isinstance(module, PretrainedStage) and module.origin is not None:
            return module.origin
    raise ExecutionError(f"save_pretrained writes the stages of stages_of; {held.place} is another")


def _check(held: Sequence[Held], target: Path, dtype: object) -> None:
    """Raise ExecutionError for other stages than those of `stages_of`, for a folder in use, and for
    a dtype of other numbers."""
    for one in held:
        _origin(one)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ExecutionError(f"{target} is there, and not empty; remove it, or name a new folder")
    if target == Path.cwd():
        raise ExecutionError(f"{target} is the current folder; name a new folder in it")
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ExecutionError(
            f"dtype must be a torch.dtype of floats, such as torch.bfloat16, not {dtype!r}"
        )


def _collect(
    held: Sequence[Held], model: Model, states: dict[int, dict[str, Tensor]]
) -> list[tuple[str, int, int | None]]:
    """Make whole what this process writes, one tensor after the other, on the CPU, by stage.

    Returns the name and stage of each, and the hash of a tied one.
    """
    ties = model.skeleton.all_tied_weights_keys
    told = []
    for one in held:
        for name, value in one.state().items():
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            if one.saves:
                states.setdefault(one.stage, {})[name] = whole.cpu()
                is_tied = name in ties or name in ties.values()
                told.append((name, one.stage, digest(whole) if is_tied else None))
    return told


def _prepare(aside: Path, model: Model, told: Sequence[tuple[str, int, int | None]]) -> None:
    """Make the folder for files. Raises ExecutionError for a model that its class can't read."""
    known = model.plain().state_dict()
    if unknown := [f"{name} of stage {stage}" for name, stage, _ in told if name not in known]:
        raise ExecutionError(
            f"{model.kind} does not have {some(unknown)}, so a folder of it can't: merge adapters "
            "into its layers first (peft's merge_and_unload), or save a Checkpoint"
        )
    for copied, first in model.skeleton.all_tied_weights_keys.items():
        copies = {content: name for name, _, content in told if name in (copied, first)}
        if len(copies) > 1:
            raise ExecutionError(
                f"{copied} and {first} are one parameter in the config, but their copies differ; "
                "pass ties=stages.ties to the executor"
            )
    shutil.rmtree(aside, ignore_errors=True)  # of a write that was interrupted
    aside.mkdir(parents=True)


def _write(
    aside: Path,
    stage: int,
    state: Mapping[str, Tensor],
    model: Model,
    max_shard_size: int | str,
    dtype: torch.dtype | None,
) -> list[_File]:
    """Write a stage's tensors, without second copies of tied ones."""
    from huggingface_hub import split_torch_state_dict_into_shards
    from safetensors.torch import save_file

    skeleton = model.skeleton
    left_out = {*skeleton.all_tied_weights_keys, *(skeleton._keys_to_ignore_on_save or ())}
    kept = {name: x for name, x in state.items() if name not in left_out}
    if dtype is not None:
        of = conversion.dtypes(skeleton, dtype)
        kept = {n: x.to(of(n)) if x.is_floating_point() else x for n, x in kept.items()}
    tensors = conversion.revert(skeleton, kept)
    pattern = f"{stage}{{suffix}}.safetensors"
    parts = split_torch_state_dict_into_shards(
        tensors, filename_pattern=pattern, max_shard_size=max_shard_size
    ).filename_to_tensors
    files: list[_File] = []
    for file, names in parts.items():
        part = {name: tensors[name].contiguous() for name in names}
        try:
            save_file(part, aside / file, {"format": "pt"})
            _sync(aside / file)
        except Exception as error:  # of safetensors
            raise ExecutionError(f"{aside / file} can't be written: {error}") from error
        sizes = {name: (x.nbytes, str(x.dtype).removeprefix("torch.")) for name, x in part.items()}
        files.append((stage, file, sizes))
    return files


def _finish(aside: Path, target: Path, model: Model, files: Sequence[_File]) -> None:
    """Name the files, write all else, and make it the folder."""
    index: dict[str, str] = {}
    dtypes = Counter[str]()
    for number, (_, file, tensors) in enumerate(files, 1):
        name = WHOLE if len(files) == 1 else f"model-{number:05}-of-{len(files):05}.safetensors"
        (aside / file).rename(aside / name)
        index.update(dict.fromkeys(tensors, name))
        for size, dtype in tensors.values():
            dtypes[dtype] += size
    if len(files) > 1:
        was = model.folder / INDEX if model.folder else None
        came = json.loads(was.read_text()) if was and was.exists() else {}
        metadata = {**came.get("metadata", {}), "total_size": dtypes.total()}
        _dump({**came, "metadata": metadata, "weight_map": index}, aside / INDEX)
    dtype = max((name for name in dtypes if "float" in name), key=dtypes.__getitem__)
    _dump({**_in_dtype(model.config, dtype), "architectures": [model.kind]}, aside / CONFIG)
    for name in _COPIED:
        if model.folder is not None and (model.folder / name).exists():
            shutil.copyfile(model.folder / name, aside / name)
    if model.folder is None and model.skeleton.can_generate():
        model.skeleton.generation_config.save_pretrained(aside)
    weights_of(aside, model.plain())
    for path in (*aside.iterdir(), aside):
        _sync(path)
    aside.replace(target)
    _sync(target.parent)


def _in_dtype(config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """A config with another dtype, as have the configs in it that had the same one."""
    keys = [key for key in ("dtype", "torch_dtype") if key in config] or ["dtype"]  # old and new
    before = config.get(keys[0])

    def changed(one: Mapping[str, Any]) -> dict[str, Any]:
        return {
            key: changed(x) if isinstance(x, dict) else dtype if key in keys and x == before else x
            for key, x in one.items()
        }

    return changed(config) | dict.fromkeys(keys, dtype)


def _dump(content: Mapping[str, Any], path: Path) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def _sync(path: Path) -> None:
    """Wait until a file or folder is on the disk."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
