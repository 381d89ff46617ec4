"""Folders that stages write after training, beside transformers' own reading of them."""

from __future__ import annotations

import json
import os
import signal
import sys
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import schedir
from schedir.runtime import Executor
from schedir.training import gathered_state, save_pretrained, stages_of
from schedir.training.huggingface import writing
from tests.runtime.kit import adamw, everyone, message_of
from tests.runtime.on_ranks import on_ranks
from tests.sweeps import sweep
from tests.training.killed_saves import EVENTS, forked
from tests.training.model_classes import CLASSES
from tests.training.test_checkpoint import assert_same
from tests.training.test_folders import MORE, folder_of, tensors_in
from tests.training.test_model_classes import batch, by_name, output_of
from tests.training.test_transformers import ON_TWO

QUICK = ("LlamaForCausalLM", "GPT2LMHeadModel", "MixtralForCausalLM")


def config_in(folder: Path) -> Any:
    return json.loads((folder / "config.json").read_text())


def train(executor: Executor, made: Any, config: Any, steps: int = 2) -> None:
    model = made._from_config(config)
    inputs = batch(model, config)
    with torch.no_grad():
        target = torch.ones_like(output_of(model(**inputs)))
    for _ in range(steps):
        executor.step(inputs, target=target)


def trained(folder: Path, made: Any, schedule: schedir.Schedule = ON_TWO) -> Executor:
    """An executor whose stages were read from a folder, and took two steps."""
    stages = stages_of(folder, schedule, model_class=made)
    executor = Executor(schedule, stages, by_name, adamw, ties=stages.ties)
    train(executor, made, made.config_class.from_pretrained(folder))
    return executor


def check(source: Path, written: Path, made: Any, state: dict[str, Tensor]) -> None:
    """What transformers reads from a written folder; its form is that of the source."""
    model = made.from_pretrained(written)
    assert_same(model.state_dict(), state)
    shapes = ({name: x.shape for name, x in tensors_in(of).items()} for of in (written, source))
    assert next(shapes) == next(shapes)
    assert config_in(written) == config_in(source)
    assert not [*written.parent.glob("*.saving")]


@on_ranks(2)
@sweep("name", [*CLASSES, *MORE], quick=QUICK)
def test_what_ranks_have_trained_is_read_by_transformers(
    rank: int, name: str, folder: Path
) -> None:
    made = getattr(transformers, name)
    # A tied embedding and head are on one rank, in two stages.
    v_shape = schedir.build("zbv", ranks=2, microbatches=4)
    schedule = v_shape if name == "GPT2LMHeadModel" else ON_TWO
    if rank == 0:
        folder_of(name, folder / "in")
        (folder / "in/tokenizer.json").write_text("{}")
        (folder / "in/additional_chat_templates").mkdir()
        (folder / "in/additional_chat_templates/tools.jinja").write_text("{{ tools }}")
    everyone("written")
    with trained(folder / "in", made, schedule) as executor:
        save_pretrained(executor, folder / "out", max_shard_size="30KB")
        state = gathered_state(executor)
    if state is not None:
        check(folder / "in", folder / "out", made, state)
        assert (folder / "out/tokenizer.json").read_text() == "{}"
        assert (folder / "out/additional_chat_templates/tools.jinja").exists()
        before = made.from_pretrained(folder / "in").state_dict()
        assert any(not torch.equal(value, state[key]) for key, value in before.items())


@on_ranks(4)
@pytest.mark.parametrize("layout", ["dp", "tp"])
def test_what_is_split_is_written_whole(rank: int, layout: str, folder: Path) -> None:
    name = "GPT2LMHeadModel" if layout == "dp" else "LlamaForCausalLM"
    made = getattr(transformers, name)
    if rank == 0:
        folder_of(name, folder / "in")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=(layout, "pp"))
    everyone("written")
    schedule = schedir.shard(ON_TWO) if layout == "dp" else ON_TWO
    stages = stages_of(folder / "in", schedule, rank=mesh.get_local_rank("pp"))
    for stage in stages.values():
        if layout == "dp":
            fully_shard(stage, mesh=mesh["dp"])
        for module in stage.modules():
            if type(module).__name__ == "LlamaMLP":
                plan: Any = {"gate_proj": ColwiseParallel(), "up_proj": ColwiseParallel()}
                parallelize_module(module, mesh["tp"], plan | {"down_proj": RowwiseParallel()})
    with Executor(schedule, stages, by_name, adamw, mesh=mesh, ties=stages.ties) as executor:
        train(executor, made, made.config_class.from_pretrained(folder / "in"))
        save_pretrained(executor, folder / "out")
        state = gathered_state(executor)
        if stages.ties:
            (stage,) = stages.values()
            with torch.no_grad():
                tied = dict(stage.named_parameters())[stages.ties[0][executor.rank][1]]
                tied.add_(executor.rank)
            said = message_of(save_pretrained, executor, folder / "differs")
            assert "lm_head.weight and transformer.wte.weight are one parameter" in said
    if state is not None:
        check(folder / "in", folder / "out", made, state)
        assert not (folder / "differs").exists()


def executor_at(folder: Path, **options: Any) -> Executor:
    stages = stages_of(folder, ON_TWO, **options)
    return Executor(ON_TWO, stages, by_name, adamw, in_process=True, ties=stages.ties)


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Glm4MoeForCausalLM"])
def test_a_folder_keeps_its_dtype_through_training_in_another(name: str, tmp_path: Path) -> None:
    """Where the model keeps gates in float32, the files do too."""
    made = getattr(transformers, name)
    source = folder_of(name, tmp_path / "in", torch.bfloat16)
    made.from_pretrained(source).save_pretrained(source)
    settings = {"unknown": {"kept": 1}, "torch_dtype": "bfloat16", **config_in(source)}
    (source / "config.json").write_text(json.dumps(settings))
    with executor_at(source, dtype=torch.float32) as executor:
        train(executor, made, made.config_class.from_pretrained(source))
        save_pretrained(executor, tmp_path / "out", dtype=torch.bfloat16)
        save_pretrained(executor, tmp_path / "float", dtype=None)
        state = gathered_state(executor)
    assert state is not None
    theirs = made.from_pretrained(source).state_dict()
    check(source, tmp_path / "out", made, {k: v.to(theirs[k].dtype) for k, v in state.items()})
    wide = settings | dict.fromkeys(("dtype", "torch_dtype"), "float32")
    assert config_in(tmp_path / "float") == wide
    assert_same(made.from_pretrained(tmp_path / "float").state_dict(), state)


@pytest.mark.parametrize("as_before", [True, False])
def test_the_layout_that_was_read_is_kept(as_before: bool, tmp_path: Path) -> None:
    """Experts stand one by one, or fused as in the model."""
    made = transformers.MixtralForCausalLM
    model = made.from_pretrained(folder_of("MixtralForCausalLM", tmp_path / "first"))
    model.save_pretrained(tmp_path / "in", save_original_format=as_before)
    with executor_at(tmp_path / "in") as executor:
        save_pretrained(executor, tmp_path / "out")
    check(tmp_path / "in", tmp_path / "out", made, model.state_dict())
    assert any("experts.gate_up_proj" in name for name in tensors_in(tmp_path / "out")) != as_before


def test_a_model_from_a_config_is_written_as_transformers_writes_it(tmp_path: Path) -> None:
    """With a changed class, and ready to generate."""
    config = transformers.MixtralConfig(**CLASSES["MixtralForCausalLM"])
    stages = stages_of(config, ON_TWO)
    with Executor(ON_TWO, stages, by_name, in_process=True) as executor:
        save_pretrained(executor, tmp_path / "mine")
        state = gathered_state(executor)
    whole: Any = transformers.MixtralForCausalLM(config)
    whole.load_state_dict(state)
    whole.save_pretrained(tmp_path / "theirs")
    check(tmp_path / "theirs", tmp_path / "mine", transformers.AutoModelForCausalLM, state or {})
    mine, theirs = ((tmp_path / of / "generation_config.json") for of in ("mine", "theirs"))
    assert mine.read_text() == theirs.read_text()


class Adapted(nn.Module):
    """A linear layer with LoRA."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.lora_A = nn.Linear(base.in_features, 2, bias=False)
        self.lora_B = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base_layer(x) + self.lora_B(self.lora_A(x))
        return y


def test_what_can_not_be_written_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = folder_of("LlamaForCausalLM", tmp_path / "in")
    model = transformers.LlamaForCausalLM.from_pretrained(source)
    for layer in model.model.layers:
        layer.mlp.up_proj = Adapted(layer.mlp.up_proj)
    stages = stages_of(model, ON_TWO)
    with Executor(ON_TWO, stages, by_name, adamw, in_process=True) as executor:
        train(executor, transformers.LlamaForCausalLM, model.config)
        said = message_of(save_pretrained, executor, tmp_path / "out")
    assert "does not have model.layers.0.mlp.up_proj.base_layer.weight of stage 0" in said
    assert "merge_and_unload" in said
    with executor_at(source) as executor:
        said = message_of(save_pretrained, executor, source)
        assert said == f"{source} is there, and not empty; remove it, or name a new folder"
        assert "own: model.save_pretrained" in message_of(save_pretrained, model, tmp_path / "x")
        for dtype in (torch.int8, "bfloat16"):
            said = message_of(save_pretrained, executor, tmp_path / "x", dtype=dtype)
            assert said.startswith("dtype must be a torch.dtype of floats, such as torch.bfloat16,")
        (tmp_path / "empty").mkdir()
        with monkeypatch.context() as patched:
            patched.chdir(tmp_path / "empty")
            said = message_of(save_pretrained, executor, ".")
            assert said == f"{tmp_path}/empty is the current folder; name a new folder in it"
        (tmp_path / "link").symlink_to("empty")
        save_pretrained(executor, tmp_path / "link")
        assert config_in(tmp_path / "empty") == config_in(source)
        (tmp_path / "link").unlink()
    others = {stage: nn.Linear(1, 1) for stage in range(2)}
    with Executor(ON_TWO, others, by_name, in_process=True) as executor:
        said = message_of(save_pretrained, executor, tmp_path / "out")
    assert said == "save_pretrained writes the stages of stages_of; stage 0 is another"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["empty", "in"]


@on_ranks(2)
def test_a_full_disk_on_one_rank_fails_all_and_can_be_mended(
    rank: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path) -> None:
        raise OSError(28, "No space left on device", str(path))

    if rank == 0:
        folder_of("LlamaForCausalLM", folder / "in")
    everyone("written")
    with trained(folder / "in", transformers.LlamaForCausalLM) as executor:
        with monkeypatch.context() as patched:
            if rank == 1:
                patched.setattr(writing, "_sync", full)
            said = message_of(save_pretrained, executor, folder / "out")
        assert "process 1 of 2: " in said
        assert "/out.saving/1.safetensors can't be written: [Errno 28] No space" in said
        everyone("seen")
        assert sorted(file.name for file in folder.iterdir()) == ["in"]
        everyone("seen")
        save_pretrained(executor, folder / "out")
        state = gathered_state(executor)
    if state is not None:
        check(folder / "in", folder / "out", transformers.LlamaForCausalLM, state)


def test_a_killed_write_leaves_no_folder_or_a_whole_one(tmp_path: Path) -> None:
    """Before each time that the write touches a file, in a process of its own."""
    source = folder_of("LlamaForCausalLM", tmp_path / "in")
    with executor_at(source) as executor:
        for moment in count():
            target = tmp_path / f"out{moment}"
            ended = forked(lambda: killed(executor, target, moment))  # noqa: B023
            if target.exists():
                model = transformers.LlamaForCausalLM.from_pretrained(target)
                assert_same(model.state_dict(), gathered_state(executor) or {})
            elif moment % 4 == 0:  # what is left is in nobody's way
                save_pretrained(executor, target)
                assert not [*tmp_path.glob(f"{target.name}.saving")]
            if ended == 0:
                break
            assert ended == -signal.SIGKILL
    assert moment > 7


def killed(executor: Executor, target: Path, moment: int) -> None:
    numbers = count()

    def touched(event: str, given: tuple[object, ...]) -> None:
        if event in EVENTS and str(target) in str(given) and next(numbers) == moment:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(touched)
    save_pretrained(executor, target)
