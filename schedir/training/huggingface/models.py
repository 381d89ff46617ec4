"""Make Hugging Face models, on meta or with weights that do not depend on the cut."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from schedir.errors import ExecutionError
from schedir.training.cutting.layers import seed_of
from schedir.training.huggingface.conversion import Lazy

CONFIG, ADAPTER = "config.json", "adapter_config.json"
_SHOWN = 5


@attrs.frozen(eq=False)
class Model:
    """A model on meta (`skeleton`), and the instance that was given (`real`), if any.

    `config` is the text of the model's config, as it came. `folder` has the weights, if they are to
    be read.
    """

    skeleton: Any
    real: nn.Module | None
    config: str
    folder: Path | None

    def plain(self) -> Any:
        """Make a model of its class on meta, without layers that were added to this one."""
        return _made(type(self.skeleton)._from_config, self.skeleton.config)


def model_of(
    model_or_config: Any,
    model_class: Any,
    weights: str | os.PathLike[str] | None,
    dtype: torch.dtype | None,
) -> Model:
    """Find the model that the user means, and the folder of its weights.

    Raises ExecutionError for an object that is no model, a folder without a config, and for models
    that can't be cut.
    """
    try:
        import transformers
    except ImportError:
        raise ExecutionError(
            "stages_of needs transformers: pip install 'schedir[examples]'"
        ) from None
    config, real, folder, text = model_or_config, None, None, None
    if isinstance(config, (str, os.PathLike)):
        folder = folder_at(config)
        if not (folder / CONFIG).exists():
            mend = "pass the folder of a model"
            if (folder / ".metadata").exists():
                mend = "it is a checkpoint, which Checkpoint(executor).load_weights reads"
            raise ExecutionError(f"{folder} has no {CONFIG}; {mend}")
        try:
            config = transformers.AutoConfig.from_pretrained(folder)
            text = (folder / CONFIG).read_text()
        except Exception as error:  # of transformers
            raise ExecutionError(f"{folder / CONFIG} can't be read: {error}") from error
    if weights is not None:
        folder = folder_at(weights)
    if isinstance(config, transformers.PreTrainedModel):
        options = {"model_class": model_class, "weights": weights, "dtype": dtype}
        for what, given in options.items():
            if given is not None:
                raise ExecutionError(f"{what}= is for a config, not for a model; leave it out")
        real, config = config, config.config
        skeleton: Any = on_meta(real)
    elif isinstance(config, transformers.PreTrainedConfig):
        skeleton = _skeleton(_class_of(config, model_class, transformers), config, dtype)
    else:
        raise ExecutionError(
            "stages_of takes a model of transformers, its config or its folder, not "
            f"{type(config).__name__}; partition cuts other models"
        )
    if getattr(config, "output_router_logits", False):
        raise uncuttable(
            skeleton,
            "output_router_logits adds a loss over the experts of all blocks, and no stage has "
            "them all; set it to False, to train without that loss",
        )
    if any(getattr(config, name, 0) for name in ("layerdrop", "encoder_layerdrop")):
        raise uncuttable(skeleton, "layerdrop leaves out blocks at random; set it to 0")
    # The model returns only its output, by name: no key-value cache, no hidden states.
    for each in configs_of(skeleton):
        each.use_cache = each.output_attentions = each.output_hidden_states = False
        each.return_dict = True
    return Model(skeleton, real, text or config.to_json_string(), folder)


def uncuttable(model: Any, reason: str) -> ExecutionError:
    """The error for a model that can't be cut."""
    return ExecutionError(f"{type(model).__name__} can't be cut: {reason}")


def folder_at(path: str | os.PathLike[str]) -> Path:
    """A Hugging Face folder. Raises ExecutionError if it is not there, or is an adapter's."""
    folder = Path(path)
    if not folder.is_dir():
        raise ExecutionError(
            f"there is no folder {folder}; a model of the hub must be downloaded first: "
            f"huggingface_hub.snapshot_download({str(path)!r}) returns its folder"
        )
    if (folder / ADAPTER).exists():
        raise ExecutionError(
            f"{folder} has an adapter ({ADAPTER}), not a model: merge it into its model, by peft's "
            "merge_and_unload(), and save that"
        )
    return folder


def small_inputs(model: Any) -> dict[str, Tensor]:
    """Make inputs of a small microbatch of a model, without values.

    Raises ExecutionError for a model that takes neither tokens nor images.
    """
    name = model.main_input_name
    rows = 5  # not 2 or 3: the model's code may unpack pairs
    if name == "input_ids":
        return {name: torch.empty(rows, 8, dtype=torch.long, device="meta")}
    if name == "pixel_values":
        configs = configs_of(model)  # its own may have no size
        config = next((one for one in configs if hasattr(one, "image_size")), model.config)
        size = getattr(config, "image_size", 224)
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        sizes = (rows, getattr(config, "num_channels", 3), height, width)
        return {name: torch.empty(sizes, dtype=model.dtype, device="meta")}
    only = "only models of tokens (input_ids) or of images (pixel_values) can be"
    raise uncuttable(model, f"it takes {name}, and {only}")


def materialise(
    model: Any,
    owned: Collection[str],
    tensors: Mapping[str, Lazy],
    seed: int,
    device: torch.device,
) -> None:
    """Give the owned tensors of a model on meta, by name, memory on `device` and values.

    Values are those of `tensors`, in memory of their own: a file that is mapped may change. Where
    there are none, the model's own code initialises. A module's random values depend only on the
    seed and its name. All buffers get values, because every stage may read them.

    Raises ExecutionError if the model's code leaves a tensor without values.
    """
    real: dict[int, Tensor] = {}
    made: dict[str, Tensor] = {}
    buffers = dict(model.named_buffers(remove_duplicate=False))
    for name, tensor in [*buffers.items(), *model.named_parameters(remove_duplicate=False)]:
        if not tensor.is_meta or id(tensor) in real or not (name in buffers or name in owned):
            continue
        if name in tensors and name in owned:
            real[id(tensor)] = like(tensor, tensors[name].compute().to(device, copy=True))
            real[id(tensor)]._is_hf_initialized = True  # type: ignore[attr-defined]
        else:
            real[id(tensor)] = made[name] = empty_like(tensor, device)
            if tensor.is_floating_point():  # NaN shows which tensors stay unwritten
                torch.nn.init.constant_(made[name], torch.nan)
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            held.update((key, real[id(x)]) for key, x in held.items() if id(x) in real)
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices), _seeding(model, seed):
        model.initialize_weights()
    for name, tensor in made.items():
        if tensor.is_floating_point() and bool(tensor.isnan().any()):
            raise ExecutionError(
                f"{type(model).__name__} can't be made stage by stage: its code does not "
                f"initialise {name}; pass stages_of a model in place of a config"
            )


def on_meta(model: nn.Module) -> nn.Module:
    """Copy a model without memory for its tensors, and without hooks."""
    tensors = [*model.parameters(), *model.buffers()]
    copied = copy.deepcopy(model, {id(t): empty_like(t, torch.device("meta")) for t in tensors})
    for module in copied.modules():
        for name in ("_forward_hooks", "_forward_pre_hooks"):
            getattr(module, name).clear()
    return copied


def empty_like(tensor: Tensor, device: torch.device) -> Tensor:
    """Make an unset tensor or parameter like another, with the other's attributes."""
    return like(tensor, torch.empty_like(tensor, device=device, requires_grad=False))


def like(tensor: Tensor, values: Tensor) -> Tensor:
    """Make a tensor or parameter of some values, with the attributes of another tensor."""
    if isinstance(tensor, nn.Parameter):
        values = nn.Parameter(values, tensor.requires_grad)
    values.__dict__.update(tensor.__dict__)
    return values


def within(name: str, parts: Iterable[str]) -> bool:
    """Whether a name is one of some parts of a model, or lies in one of them."""
    return f"{name}.".startswith(tuple(f"{part}." for part in parts))


def some(names: Collection[str]) -> str:
    """Name the first few of many."""
    more = len(names) - _SHOWN
    return ", ".join([*names][:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _skeleton(model_class: Any, config: Any, dtype: torch.dtype | None) -> Any:
    """Make a model of a class on meta. Raises ExecutionError if transformers makes none."""
    make = getattr(model_class, "_from_config", None) or getattr(model_class, "from_config", None)
    if make is None:
        raise ExecutionError(
            f"model_class must be a model class of transformers, not {model_class!r}"
        )
    try:
        return _made(make, config, **({} if dtype is None else {"dtype": dtype}))
    except Exception as error:  # transformers refuses the config
        raise ExecutionError(
            f"transformers makes no {model_class.__name__} of this {type(config).__name__} "
            f"({type(error).__name__}: {error}); change the config, model_class= or dtype="
        ) from error


def _made(make: Callable[..., Any], config: Any, **options: Any) -> Any:
    with torch.device("meta"):
        model = make(copy.deepcopy(config), **options)
    model.tie_weights()  # transformers 5.0 does not, on meta
    return model


def _class_of(config: Any, model_class: Any, transformers: Any) -> Any:
    if model_class is not None:
        return model_class
    for name in config.architectures or ():
        if hasattr(transformers, name):
            return getattr(transformers, name)
        raise ExecutionError(
            f"config.architectures names {name}, which transformers does not have; pass "
            "model_class="
        )
    for kind in (transformers.AutoModelForCausalLM, transformers.AutoModelForImageClassification):
        if type(config) in kind._model_mapping:
            return kind
    raise ExecutionError(
        f"{type(config).__name__} does not say which model to make; pass model_class=, or set "
        "config.architectures"
    )


def configs_of(model: nn.Module) -> list[Any]:
    """The configs of a model and its parts."""
    held = [module.config for module in model.modules() if hasattr(module, "config")]
    return list({id(config): config for config in held}.values())


@contextmanager
def _seeding(model: nn.Module, seed: int) -> Iterator[None]:
    """Inside, the model's code initialises each module with memory from random numbers of its
    own."""
    names = {id(module): name for name, module in model.named_modules()}

    def seeded(init: Callable[[nn.Module], object], module: nn.Module) -> None:
        if not all(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
            torch.manual_seed(seed_of(f"{seed} {names[id(module)]}"))
            init(module)

    models: list[Any] = [one for one in model.modules() if hasattr(one, "_init_weights")]
    for one in models:
        one._init_weights = partial(seeded, one._init_weights)
    try:
        yield
    finally:
        for one in models:
            del one._init_weights
