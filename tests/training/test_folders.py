"""Folders of Hugging Face models, read stage by stage, beside transformers' own reading."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from schedir.training import stages_of
from tests.runtime.kit import message_of
from tests.sweeps import sweep
from tests.training.model_classes import CLASSES
from tests.training.test_checkpoint import assert_same
from tests.training.test_partition import state_of
from tests.training.test_transformers import ON_TWO, SPARSE

MORE: dict[str, dict[str, Any]] = {
    "Qwen3MoeForCausalLM": SPARSE | {"num_experts": 4, "moe_intermediate_size": 16},
    "OlmoeForCausalLM": SPARSE | {"num_experts": 4},
    "GptOssForCausalLM": SPARSE | {"layer_types": None},
    # Its gates stay in float32.
    "Glm4MoeForCausalLM": SPARSE
    | {"n_routed_experts": 4, "moe_intermediate_size": 16, "first_k_dense_replace": 1},
}
QUICK = [
    *("LlamaForCausalLM", "GPT2LMHeadModel", "MixtralForCausalLM", "BertForMaskedLM"),
    *("ViTForImageClassification", "Glm4MoeForCausalLM"),
]


def config_of(name: str, **settings: Any) -> Any:
    return getattr(transformers, name).config_class(**{**CLASSES, **MORE}[name] | settings)


def folder_of(name: str, folder: Path, dtype: Any = torch.float32, **settings: Any) -> Path:
    """A folder with a model of other weights than those of any initialisation."""
    torch.manual_seed(7)
    model = getattr(transformers, name)._from_config(config_of(name, **settings), dtype=dtype)
    for tensor in model.state_dict().values():
        if tensor.is_floating_point():
            tensor.normal_()
    model.save_pretrained(folder, max_shard_size="30KB")
    return folder


def tensors_in(folder: Path) -> dict[str, Tensor]:
    """The tensors of a folder's files."""
    files = [load_file(file) for file in folder.glob("*.safetensors")]
    return {name: x for file in files for name, x in file.items()}


def refused(*arguments: Any, **options: Any) -> str:
    """What `stages_of` tells both ranks, which is the same."""
    told = {message_of(stages_of, *arguments, ON_TWO, rank=rank, **options) for rank in range(2)}
    (message,) = told
    return message


@sweep("name", [*CLASSES, *MORE], quick=QUICK)
def test_a_folder_is_read_as_from_pretrained_reads_it(name: str, tmp_path: Path) -> None:
    made = getattr(transformers, name)
    folder_of(name, tmp_path, torch.bfloat16)
    theirs = made.from_pretrained(tmp_path)
    stages = stages_of(tmp_path, 2, model_class=made)
    assert_same(state_of(stages), theirs.state_dict())
    buffers = dict(theirs.named_buffers())
    for stage in stages.values():
        held = dict(stage.named_buffers())
        assert_same(held, {key: buffers[key] for key in held})
        assert all(module.training for module in stage.modules())
        assert all(p.requires_grad for p in stage.parameters() if p.is_floating_point())
    # In float32 all are, whatever the files have.
    (whole,) = stages_of(tmp_path, 1, model_class=made, dtype=torch.float32).values()
    theirs = made.from_pretrained(tmp_path, dtype=torch.float32)
    assert list(whole.state_dict()) == list(theirs.state_dict())
    assert_same(whole.state_dict(), theirs.state_dict())


@pytest.mark.parametrize("name", ["MixtralForCausalLM", "GPT2LMHeadModel"])
def test_a_rank_reads_its_own_tensors(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = tensors_in(folder_of(name, tmp_path))
    read: list[str] = []
    opened = safetensors.safe_open

    class Counting:
        def __init__(self, *given: Any) -> None:
            self._file: Any = opened(*given)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._file, name)

        def get_tensor(self, name: str) -> Tensor:
            read.append(name)
            tensor: Tensor = self._file.get_tensor(name)
            return tensor

    monkeypatch.setattr(safetensors, "safe_open", Counting)
    own = []
    for rank in range(2):
        read.clear()
        stages_of(tmp_path, ON_TWO, rank=rank)
        assert len(read) == len(set(read))
        own.append(set(read))
    tied = {"transformer.wte.weight"} if name == "GPT2LMHeadModel" else set()
    assert own[0] & own[1] == tied
    assert own[0] | own[1] == whole.keys()
    assert all(one < whole.keys() for one in own)


def test_what_was_read_outlives_the_files(tmp_path: Path) -> None:
    (stage,) = stages_of(folder_of("LlamaForCausalLM", tmp_path), 1).values()
    expected = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    before = {key: value.clone() for key, value in expected.state_dict().items()}
    for file in tmp_path.glob("*.safetensors"):
        with file.open("r+b") as opened:
            opened.write(bytes(file.stat().st_size))
    assert_same(stage.state_dict(), before)
    assert all(x.untyped_storage().nbytes() == x.nbytes for x in stage.state_dict().values())


def test_names_of_the_base_model_alone_are_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As those of the hub's gpt2. A file of all wins over an index; old constants are silent."""
    folder_of("GPT2LMHeadModel", tmp_path)
    base = transformers.GPT2Model(config_of("GPT2LMHeadModel")).state_dict()
    constants = {"h.0.attn.bias": torch.ones(1, 1, 4, 4), "position_ids": torch.ones(2)}
    save_file(base | constants, tmp_path / "model.safetensors", {"format": "pt"})
    stages = stages_of(tmp_path, 2)
    assert stages.ties
    expected = {f"transformer.{key}": value for key, value in base.items()}
    assert_same(state_of(stages), expected | {"lm_head.weight": base["wte.weight"]})
    assert not caplog.records


@pytest.mark.parametrize("new", ["score", "score.weight"])
def test_what_is_new_is_made_from_the_seed_on_every_cut(
    new: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder_of("LlamaForCausalLM", tmp_path)
    auto = transformers.AutoModelForSequenceClassification
    found = []
    for boundaries in ([1], [3]):
        caplog.clear()
        options: Any = {"new": [new], "boundaries": boundaries, "seed": 4}
        found.append(state_of(stages_of(tmp_path, 2, model_class=auto, **options)))
        (record,) = caplog.records
        assert record.getMessage().endswith(
            "LlamaForSequenceClassification does not take: lm_head.weight"
        )
    assert_same(*found)
    assert 0.01 < float(found[0]["score.weight"].std()) < 0.04
    theirs = transformers.LlamaModel.from_pretrained(tmp_path).state_dict()
    assert_same(
        {f"model.{key}": found[0][f"model.{key}"] for key in theirs},
        {f"model.{key}": value for key, value in theirs.items()},
    )
    # What the folder has is read all the same, unless its shape is another.
    folder = folder_of("LlamaForSequenceClassification", tmp_path / "own")
    head = transformers.LlamaForSequenceClassification.from_pretrained(folder).score.weight
    assert torch.equal(stages_of(folder, 1, new=[new])[0].get_parameter("score.weight"), head)
    config = config_of("LlamaForSequenceClassification", num_labels=5)
    options = {"weights": folder, "model_class": auto}
    assert stages_of(config, 1, new=[new], **options)[0].get_parameter("score.weight").shape[0] == 5
    told = refused(config, **options)
    assert "score.weight is [2, 32] in " in told
    assert "and [5, 32] in LlamaForSequenceClassification" in told


def test_a_tied_parameter_is_read_under_any_of_its_names(tmp_path: Path) -> None:
    state = tensors_in(folder_of("GPT2LMHeadModel", tmp_path / "first", n_layer=2))
    embedding = state["lm_head.weight"] = state.pop("transformer.wte.weight")
    other = tmp_path / "other"
    other.mkdir()
    shutil.copy(tmp_path / "first/config.json", other)
    save_file(state, other / "model.safetensors", {"format": "pt"})
    stages = stages_of(other, 2)
    assert stages.ties == ([(0, "transformer.wte.weight"), (1, "lm_head.weight")],)
    for stage, name in stages.ties[0]:
        assert torch.equal(stages[stage].get_parameter(name), embedding)
    both = state | {"transformer.wte.weight": embedding.clone()}
    save_file(both, other / "model.safetensors", {"format": "pt"})
    assert stages_of(other, 2).ties
    save_file(both | {"transformer.wte.weight": embedding + 1}, other / "model.safetensors")
    told = refused(other)
    assert f"{other} has transformer.wte.weight and lm_head.weight with different" in told
    assert "tie_word_embeddings=False" in told
    config = transformers.AutoConfig.from_pretrained(other)
    config.tie_word_embeddings = False
    untied = stages_of(config, 2, weights=other)
    assert not untied.ties
    assert torch.equal(untied[0].get_parameter("transformer.wte.weight"), embedding + 1)


NORM = "model.layers.2.input_layernorm.weight"
INDEX = "model.safetensors.index.json"


def _tensors(change: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], None]:
    def changed(folder: Path) -> None:
        for file in folder.glob("*.safetensors"):
            state = load_file(file)
            change(state)
            save_file(state, file, {"format": "pt"})

    return changed


def _json(name: str, change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def changed(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        change(content)
        (folder / name).write_text(json.dumps(content))

    return changed


def _narrow(state: dict[str, Tensor]) -> None:
    if NORM in state:
        state[NORM] = state[NORM].to(torch.float8_e4m3fn)


def _bins(folder: Path) -> None:
    for file in folder.glob("model*"):
        file.unlink()
    (folder / "pytorch_model.bin").touch()


def _first(folder: Path) -> Path:
    return min(folder.glob("*.safetensors"))


def _quantised(config: dict[str, Any]) -> None:
    config["quantization_config"] = {"quant_method": "fp8"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            _tensors(lambda state: state.pop(NORM, None)),
            rf"FOLDER lacks {NORM} \[32\], which LlamaForC.*name in new=",
        ),
        (
            _json("config.json", lambda it: it.update(hidden_size=16)),
            r"\w+.weight is \[\d+, 32\] in FOLDER and \[\d+, 16\] in Lla",
        ),
        (_json("config.json", _quantised), "^FOLDER is quantised"),
        (_tensors(_narrow), rf"^FOLDER is quantised \({NORM} is torch.float8_e4m3fn"),
        (lambda at: (at / "adapter_config.json").touch(), "FOLDER has an adapter .*merge it"),
        (_bins, "no weights in FOLDER: it has no model.*only pytorch_model.bin, a pickle"),
        (lambda at: _first(at).unlink(), r"FOLDER/model-00001-of-\d+.safetensors is missing"),
        (
            lambda at: _first(at).write_bytes(_first(at).read_bytes()[:-9]),
            r"FOLDER/model-00001-of-\d+.safetensors is no whole safetensors file",
        ),
        (_json(INDEX, lambda it: it["weight_map"].update(x="../x")), r"elsewhere: '\.\./x"),
        (_json(INDEX, lambda it: it.pop("weight_map")), "index.json is no index"),
        (lambda at: (at / "config.json").unlink(), "FOLDER has no config.json; pass the folder"),
        (lambda at: (at / INDEX).unlink(), f"and no {INDEX}, which says what model-00001"),
        (lambda at: shutil.rmtree(at), r"no folder FOLDER; .*snapshot_download\("),
    ],
)
def test_what_can_not_be_read_is_refused(
    change: Callable[[Path], object], message: str, tmp_path: Path
) -> None:
    folder = folder_of("LlamaForCausalLM", tmp_path / "folder")
    change(folder)
    assert re.search(message.replace("FOLDER", str(folder)), refused(folder))


def test_bad_arguments_for_a_folder_are_said(tmp_path: Path) -> None:
    folder = folder_of("LlamaForCausalLM", tmp_path)
    config = config_of("LlamaForCausalLM")
    model = transformers.LlamaForCausalLM(config)
    calls: list[tuple[Any, dict[str, Any], str]] = [
        ("openai/gpt2", {}, "snapshot_download('openai/gpt2')"),
        (config, {"weights": "no/where"}, "there is no folder no/where"),
        (model, {"weights": folder}, "weights= is for a config, not for a model"),
        (model, {"dtype": torch.bfloat16}, "dtype= is for a config, not for a model"),
        (config, {"new": ["lm_head"]}, "new= is for a folder's weights"),
        (folder, {"new": ["head"]}, "new= names head, which LlamaForCausalLM does"),
    ]
    for given, options, message in calls:
        assert message in message_of(stages_of, given, 2, **options)
