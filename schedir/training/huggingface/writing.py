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

from schedir.errors import ExecutionError
from schedir.runtime import Executor
from schedir.runtime.accelerator import accelerator_of
from schedir.runtime.session import digest
from schedir.training.collective import everywhere
from schedir.training.huggingface.conversion import in_dtype
from schedir.training.huggingface.models import CONFIG, Model, some
from schedir.training.huggingface.reading import INDEX, WHOLE, tensors_in, weights_of
from schedir.training.huggingface.stages import PretrainedStage
from schedir.training.whole_names import Held, held_by

_COPIED = (
    *("generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model"),
    *("special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt"),
    *("spiece.model", "sentencepiece.bpe.model", "sentencepiece.model", "spm.model", "bpe.codes"),
    *("chat_template.jinja", "chat_template.json", "additional_chat_templates"),
    *("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"),
)

_Name: TypeAlias = tuple[str, int, int | None]
"""A tensor that a process could write: its name, its stage, and its hash if it is tied."""


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
    were read, or the usual ones of the model's class. The config is written as it came, but for its
    dtype and architectures; of a folder that was read, the files of the tokenizer and of generation
    are copied. `dtype` is that of the files, by default that of the parameters. What the model
    keeps in float32 stays so.

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
    state: dict[str, Tensor] = {}
    told = list(chain(*together(lambda: _collect(held, model, state))))
    owner = {name: stage for name, stage, _ in sorted(told, reverse=True)}  # its first stage
    here = {one.stage for one in held if one.saves}
    own = {name: x for name, x in state.items() if owner[name] in here}
    pattern = f"{executor.rank}{{suffix}}.safetensors"
    try:
        together(lambda: _prepare(aside, model, told) if is_first else None)
        files = together(lambda: _write(aside / pattern, own, model, max_shard_size, dtype))
        together(lambda: _finish(aside, target, model, [*chain(*files)]) if is_first else None)
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


def _collect(held: Sequence[Held], model: Model, state: dict[str, Tensor]) -> list[_Name]:
    """Make whole what this process could write, one tensor after the other, on the CPU."""
    ties = model.skeleton.all_tied_weights_keys
    told = []
    for one in held:
        for name, value in one.whole():
            if one.saves:
                is_tied = name in ties or name in ties.values()
                told.append((name, one.stage, digest(value) if is_tied else None))
                state.setdefault(name, value.cpu())
    return told


def _prepare(aside: Path, model: Model, told: Sequence[_Name]) -> None:
    """Make the folder for files. Raises ExecutionError for a model that its class can't read."""
    plain = model.plain()
    known = plain.state_dict()
    if unknown := [f"{name} of stage {stage}" for name, stage, _ in told if name not in known]:
        raise ExecutionError(
            f"{type(plain).__name__} does not have {some(unknown)}, so a folder of it can't: merge "
            "adapters into its layers first (peft's merge_and_unload), or save a Checkpoint"
        )
    for copied, first in model.skeleton.all_tied_weights_keys.items():
        if len({content for name, _, content in told if name in (copied, first)}) > 1:
            raise ExecutionError(
                f"{copied} and {first} are one parameter in the config, but their copies differ; "
                "pass ties=stages.ties to the executor"
            )
    shutil.rmtree(aside, ignore_errors=True)  # of a write that was interrupted
    aside.mkdir(parents=True)


def _write(
    pattern: Path,
    state: Mapping[str, Tensor],
    model: Model,
    max_shard_size: int | str,
    dtype: torch.dtype | None,
) -> list[str]:
    """Write tensors, without second copies of tied ones. Returns the names of the files."""
    from huggingface_hub import split_torch_state_dict_into_shards
    from safetensors.torch import save_file
    from transformers.core_model_loading import revert_weight_conversion

    skeleton = model.skeleton
    left_out = {*skeleton.all_tied_weights_keys, *(skeleton._keys_to_ignore_on_save or ())}
    kept = {name: x for name, x in state.items() if name not in left_out}
    if dtype is not None:
        kept = in_dtype(skeleton, kept, dtype)
    tensors = revert_weight_conversion(skeleton, kept)
    files = split_torch_state_dict_into_shards(
        tensors, filename_pattern=pattern.name, max_shard_size=max_shard_size
    ).filename_to_tensors
    for file, names in files.items():
        path = pattern.with_name(file)
        try:
            save_file({name: tensors[name].contiguous() for name in names}, path, {"format": "pt"})
            _sync(path)
        except Exception as error:  # of safetensors
            raise ExecutionError(f"{path} can't be written: {error}") from error
    return list(files)


def _finish(aside: Path, target: Path, model: Model, files: Sequence[str]) -> None:
    """Name the files, write all else, and make it the folder."""
    plain = model.plain()
    index: dict[str, str] = {}
    sizes = Counter[torch.dtype]()
    for number, file in enumerate(files, 1):
        name = WHOLE if len(files) == 1 else f"model-{number:05}-of-{len(files):05}.safetensors"
        for tensor, x in tensors_in((aside / file).rename(aside / name)).items():
            index[tensor] = name
            sizes[x.dtype] += x.nbytes
    if len(files) > 1:
        was = model.folder / INDEX if model.folder is not None else aside / INDEX
        came = json.loads(was.read_text()) if was.exists() else {}
        totals = {"total_parameters": plain.num_parameters(), "total_size": sizes.total()}
        metadata = {**came.get("metadata", {}), **totals}
        _dump({**came, "metadata": metadata, "weight_map": index}, aside / INDEX)
    dtype = max((one for one in sizes if one.is_floating_point), key=sizes.__getitem__)
    config = _with_dtype(model.config, str(dtype).removeprefix("torch."))
    _dump({**config, "architectures": [type(plain).__name__]}, aside / CONFIG)
    if model.folder is not None:
        for name in _COPIED:
            if (had := model.folder / name).is_dir():
                shutil.copytree(had, aside / name)
            elif had.exists():
                shutil.copyfile(had, aside / name)
    elif model.skeleton.can_generate():
        model.skeleton.generation_config.save_pretrained(aside)
    weights_of(aside, plain)
    for path in (*aside.rglob("*"), aside):
        _sync(path)
    aside.replace(target)
    _sync(target.parent)


def _with_dtype(config: str, dtype: str) -> dict[str, Any]:
    """A config with another dtype, as have the configs in it that had the same one."""
    whole: dict[str, Any] = json.loads(config)
    keys = [key for key in ("dtype", "torch_dtype") if key in whole] or ["dtype"]  # old and new
    before = whole.get(keys[0])

    def changed(one: dict[str, Any]) -> dict[str, Any]:
        return one | {key: dtype for key in keys if key in one and one[key] == before}

    whole = json.loads(config, object_hook=changed)
    return whole | dict.fromkeys(keys, dtype)


def _dump(content: Mapping[str, Any], path: Path) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def _sync(path: Path) -> None:
    """Wait until a file or folder is on the disk."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
