"""Models of transformers, cut by their configs, beside the same models uncut."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import schedir
from schedir.runtime import Executor
from schedir.training import Stages, causal_lm_loss, causal_lm_tokens, stages_of
from tests.runtime.on_ranks import on_ranks
from tests.sweeps import sweep

TOKENS = 64
_SIZES: dict[str, Any] = {
    "vocab_size": TOKENS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
_GROUPED = _SIZES | {"num_key_value_heads": 2}
_IMAGES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "image_size": 8,
    "patch_size": 4,
}
_SPARSE = _GROUPED | {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2}
_SPARSE |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
CONFIGS: dict[str, Any] = {
    "llama": (transformers.LlamaConfig, _GROUPED),
    "llama-tied": (transformers.LlamaConfig, _GROUPED | {"tie_word_embeddings": True}),
    "qwen3": (transformers.Qwen3Config, _GROUPED | {"head_dim": 8}),
    "mistral": (transformers.MistralConfig, _GROUPED | {"sliding_window": 4}),
    "gemma": (transformers.GemmaConfig, _GROUPED | {"head_dim": 8}),
    "gpt2": (
        transformers.GPT2Config,
        {"vocab_size": TOKENS, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64}
        | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    ),
    "gpt-neox": (transformers.GPTNeoXConfig, _SIZES),
    # Its embedding is narrower than its blocks, so that layers stand between them on both sides.
    "opt": (
        transformers.OPTConfig,
        _SIZES | {"ffn_dim": 48, "word_embed_proj_dim": 16, "dropout": 0.0},
    ),
    "phi": (transformers.PhiConfig, _SIZES),
    "mixtral": (transformers.MixtralConfig, _GROUPED | {"num_local_experts": 4}),
    # What stands for its embedding is multiplied in place.
    "ctrl": (
        transformers.CTRLConfig,
        {"vocab_size": TOKENS, "n_embd": 32, "dff": 48, "n_layer": 4, "n_head": 4}
        | {"n_positions": 64, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
    ),
    "vit": (transformers.ViTConfig, _IMAGES),
}
TIED = {
    "llama-tied": ("model.embed_tokens.weight", "lm_head.weight"),
    "gemma": ("model.embed_tokens.weight", "lm_head.weight"),
    "gpt2": ("transformer.wte.weight", "lm_head.weight"),
    "ctrl": ("transformer.w.weight", "lm_head.weight"),
    "opt": ("model.decoder.embed_tokens.weight", "lm_head.weight"),
}


def config_of(name: str) -> Any:
    kind, settings = CONFIGS[name]
    return kind(**settings)


def made(config: Any) -> Any:
    """The whole model, as transformers makes it."""
    if isinstance(config, transformers.ViTConfig):
        return transformers.AutoModelForImageClassification.from_config(config)  # type: ignore[no-untyped-call]
    return transformers.AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]


def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, -2), target.flatten())


class Keeping(torch.optim.SGD):
    """Keeps the gradients of its step, and changes nothing."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.0)
        self.kept: dict[nn.Parameter, Tensor | None] = {}

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            self.kept |= {p: p.grad for p in group["params"]}


def batch(name: str) -> tuple[dict[str, Tensor], Tensor]:
    """Four rows, two of them padded: one behind, one in front."""
    torch.manual_seed(2)
    if name == "vit":
        return {"pixel_values": torch.randn(4, 3, 8, 8)}, torch.randint(0, 2, (4,))
    mask = torch.ones(4, 8, dtype=torch.long)
    mask[1, 6:] = mask[2, :2] = 0
    ids = torch.randint(3, TOKENS, (4, 8))
    return {"input_ids": ids, "attention_mask": mask}, torch.randint(0, TOKENS, (4, 8))


@cache
def uncut(name: str) -> Any:
    """The model of `stages_of(config, 1)`'s weights, made by transformers alone."""
    whole = made(config_of(name))
    (state,) = (stage.state_dict() for stage in stages_of(config_of(name), 1).values())
    assert list(state) == list(whole.state_dict())
    whole.load_state_dict(state)
    return whole


def plain(name: str, inputs: Mapping[str, Tensor], target: Tensor) -> tuple[float, Any]:
    """The loss and gradients of accumulation over two microbatches."""
    whole = uncut(name)
    whole.zero_grad()
    total = 0.0
    for m in range(2):
        logits = whole(**{key: value.chunk(2)[m] for key, value in inputs.items()}).logits
        loss = loss_fn(logits, target.chunk(2)[m]) / 2
        loss.backward()
        total += loss.item()
    return total, {n: p.grad for n, p in whole.named_parameters(remove_duplicate=False)}


def compare(name: str, stages: Stages, inputs: Any, **options: Any) -> None:
    """One step of the stages beside the uncut model's."""
    _, target = batch(name)
    loss, grads = plain(name, inputs if isinstance(inputs, dict) else given_alone(name), target)
    schedule = options.pop("schedule")
    with Executor(schedule, stages, loss_fn, Keeping, ties=stages.ties, **options) as executor:
        assert executor.step(inputs, target=target).loss == loss
        for stage, module in stages.items():
            kept = executor.optimizers[stage].kept  # type: ignore[attr-defined]
            for parameter, p in module.named_parameters():
                if parameter in TIED.get(name, ()):  # summed up in another order
                    torch.testing.assert_close(kept[p], grads[parameter])
                else:
                    assert torch.equal(kept[p], grads[parameter]), parameter


def given_alone(name: str) -> dict[str, Tensor]:
    """The main input, without a mask."""
    key = uncut(name).main_input_name
    return {key: batch(name)[0][key]}


@sweep("ranks", [2, 4], quick=[2])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_trains_as_if_uncut(name: str, ranks: int) -> None:
    """Padded rows in two stages, and the bare tensor in four."""
    schedule = schedir.build("1f1b", ranks=ranks, microbatches=2)
    stages = stages_of(config_of(name), schedule)
    check_weights(name, stages, ranks)
    inputs, _ = batch(name)
    given = inputs if ranks == 2 else inputs[uncut(name).main_input_name]
    compare(name, stages, given, schedule=schedule, in_process=True)


def check_weights(name: str, stages: Stages, number: int) -> None:
    """The stages have the uncut model's weights and buffers, and nothing else."""
    expected = uncut(name).state_dict()
    buffers = dict(uncut(name).named_buffers())
    together: set[str] = set()
    for stage in stages.values():
        for key, value in stage.state_dict().items():
            assert torch.equal(value, expected[key]), key
            together.add(key)
        for key, value in stage.named_buffers():
            assert torch.equal(value, buffers[key]), key
    if len(stages) == number:
        assert together == set(expected)
    ties = [[(0, TIED[name][0]), (number - 1, TIED[name][1])]] if name in TIED else []
    assert list(stages.ties) == ties


@pytest.mark.parametrize("name", ["llama-tied", "gpt2"])
@pytest.mark.parametrize("boundaries", [[1], [3]])
def test_weights_depend_on_no_cut_and_no_rank(name: str, boundaries: list[int]) -> None:
    schedule = schedir.build("1f1b", ranks=2, microbatches=2)
    for rank in range(2):  # each as if alone
        stages = stages_of(config_of(name), schedule, rank=rank, boundaries=boundaries)
        assert list(stages) == [rank]
        check_weights(name, stages, 2)


@pytest.mark.parametrize("name", CONFIGS)
def test_weights_are_drawn_as_transformers_draws_them(name: str) -> None:
    theirs = made(config_of(name)).state_dict()
    for key, value in uncut(name).state_dict().items():
        spread = float(theirs[key].std()) if value.numel() > 1 else 0.0
        if spread == 0:
            assert torch.equal(value, theirs[key]), key
        elif value.numel() > 500:
            assert float(value.std()) == pytest.approx(spread, rel=0.2), key


def test_another_seed_or_block_has_other_weights() -> None:
    one, other = (stages_of(config_of("gpt2"), 1, seed=seed)[0] for seed in (0, 1))
    name = "transformer.h.0.attn.c_attn.weight"
    assert not torch.equal(one.get_parameter(name), other.get_parameter(name))
    assert not torch.equal(one.get_parameter(name), one.get_parameter(name.replace("0", "1")))


@on_ranks(2)
@sweep("name", ["gpt2", "llama"], quick=["gpt2"])
def test_each_rank_makes_its_own(rank: int, name: str) -> None:
    schedule = schedir.build("1f1b", ranks=2, microbatches=2)
    stages = stages_of(config_of(name), schedule)
    check_weights(name, stages, 2)
    compare(name, stages, batch(name)[0], schedule=schedule)


def test_stages_are_balanced_and_say_what_they_got() -> None:
    config = config_of("llama")
    config.vocab_size = 400
    schedule = schedir.build("fill-drain", ranks=3, microbatches=3)
    stages = stages_of(config, schedule)  # the embedding and the head weigh more than two blocks
    assert [len([n for n in s.layers if "layers." in n]) for s in stages.summaries] == [1, 2, 1]
    assert stages.summaries[2].layers == ("model.layers.3", "model.norm", "lm_head")
    counted = [sum(p.numel() for p in stages[i].parameters()) for i in range(3)]
    assert [s.parameters for s in stages.summaries] == counted
    uniform = stages_of(config, 2, by="uniform")
    assert uniform.summaries[0].layers[-2:] == ("model.layers.0", "model.layers.1")


@pytest.mark.parametrize("name", ["llama-tied", "opt", "vit"])
def test_the_stages_of_a_model_are_its_own_modules(name: str) -> None:
    torch.manual_seed(5)
    model = made(config_of(name))
    own = dict(model.named_parameters())
    before = {key: value.clone() for key, value in model.state_dict().items()}
    schedule = schedir.build("1f1b", ranks=2, microbatches=2)
    stages = stages_of(model, schedule)
    copied = []
    for stage in stages.values():
        for key, p in stage.named_parameters():
            if own.get(key) is not p:
                copied.append(key)
    assert copied == ([TIED[name][1]] if name in TIED else [])
    inputs, target = batch(name)
    with Executor(
        schedule, stages, loss_fn, torch.optim.SGD, ties=stages.ties, in_process=True
    ) as executor:
        expected = loss_fn(model.train()(**inputs).logits, target).item()
        assert executor.step(inputs, target=target).loss == pytest.approx(expected, rel=1e-5)
    assert list(model.state_dict()) == list(before)
    assert model.config.use_cache if name != "vit" else True
    assert any(not torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_a_classifier_pools_the_last_token_that_is_no_padding() -> None:
    """Its end reads the tokens, so they travel from stage to stage."""
    config = config_of("llama")
    config.pad_token_id = 0
    stages = stages_of(
        config, 2, model_class=transformers.AutoModelForSequenceClassification, seed=3
    )
    whole: Any = transformers.LlamaForSequenceClassification(config)  # type: ignore[no-untyped-call]
    whole.load_state_dict({k: v for s in stages.values() for k, v in s.state_dict().items()})
    inputs, _ = batch("llama")
    inputs["input_ids"] = inputs["input_ids"] * inputs["attention_mask"]
    schedule = schedir.build("fill-drain", ranks=2, microbatches=1)
    with Executor(schedule, stages, loss_fn, in_process=True) as executor:
        found = executor.infer(inputs)
    assert found is not None
    assert torch.equal(found[0], whole(**inputs).logits)


def test_a_checkpointed_model_trains_as_before() -> None:
    """Gradient checkpointing is a setting of the modules, which the stages keep."""
    torch.manual_seed(5)
    model = made(config_of("llama"))
    given, target = batch("llama")
    loss_fn(model(**given).logits, target).backward()
    expected = {key: p.grad for key, p in model.named_parameters()}
    model.zero_grad()
    model.activation_checkpointing_enable()
    schedule = schedir.build("1f1b", ranks=2, microbatches=1)
    with Executor(schedule, stages_of(model, schedule), loss_fn, in_process=True) as executor:
        executor.step(given, target=target)
    for key, p in model.named_parameters():
        assert torch.equal(p.grad, expected[key]), key


REFUSED: dict[str, Any] = {
    "blocks that are one": (
        lambda: transformers.AlbertConfig(**_SIZES),
        transformers.AlbertForMaskedLM,
        "AlbertForMaskedLM can't be cut: the 1 blocks of .*albert_layer_groups do not run",
    ),
    "relative positions of parameters": (
        lambda: transformers.DebertaV2Config(**_SIZES, relative_attention=True),
        transformers.DebertaV2ForMaskedLM,
        "DebertaV2ForMaskedLM can't be cut: block 0 of .* takes more .*rel_embeddings",
    ),
    "what a block hands the next one beside its output, without a gradient": (
        lambda: transformers.HYV4Config(**_SPARSE),
        None,
        "HYV4ForCausalLM can't be cut: block 1 of model.layers takes more .*prev_topk_indices",
    ),
    "embeddings that are taken apart": (
        lambda: transformers.Data2VecVisionConfig(**_IMAGES),
        transformers.AutoModelForImageClassification,
        "Data2VecVisionForImageClassification can't be cut: stage 1 of 2 does not run without",
    ),
    "the loss of routers": (
        lambda: transformers.MixtralConfig(**_GROUPED, output_router_logits=True),
        None,
        "MixtralForCausalLM can't be cut: output_router_logits",
    ),
    "blocks left out": (
        lambda: transformers.OPTConfig(**_SIZES, layerdrop=0.1),
        None,
        "OPTForCausalLM can't be cut: layerdrop",
    ),
    "sound": (
        lambda: transformers.Wav2Vec2Config(**_SIZES, layerdrop=0.0),
        transformers.Wav2Vec2ForCTC,
        "Wav2Vec2ForCTC can't be cut: it takes input_values",
    ),
    "what is no model": (lambda: nn.Linear(1, 1), None, "not Linear; partition cuts other models"),
    "a config of no such model": (
        lambda: config_of("vit"),
        transformers.AutoModelForCausalLM,
        "transformers makes no AutoModelForCausalLM of this ViTConfig",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_can_not_be_cut_is_refused(what: str) -> None:
    make, model_class, message = REFUSED[what]
    with pytest.raises(schedir.ExecutionError, match=message):
        stages_of(make(), 2, model_class=model_class)


def test_bad_arguments_are_said() -> None:
    config = config_of("llama")
    with pytest.raises(schedir.ExecutionError, match=r"5 stages .* 4 blocks .*\(model.layers\)"):
        stages_of(config, 5)
    with pytest.raises(schedir.ExecutionError, match=r"boundaries: .* 1 to 3 at most.*\[4\]"):
        stages_of(config, 2, boundaries=[4])
    with pytest.raises(schedir.ExecutionError, match=r'"parameters" or "uniform", not \'cost\''):
        stages_of(config, 2, by="cost")
    with pytest.raises(schedir.ExecutionError, match="config, not for a model"):
        stages_of(made(config), 2, model_class=transformers.LlamaForCausalLM)
    stage = stages_of(config, 2)[0]
    ids = batch("llama")[0]["input_ids"]
    with pytest.raises(schedir.ExecutionError, match="labels go into target="):
        stage({"input_ids": ids, "labels": ids})
    with pytest.raises(schedir.ExecutionError, match="takes no mask, only input_ids"):
        stage({"input_ids": ids, "mask": ids})
    with pytest.raises(schedir.ExecutionError, match="not tuple"):
        stage((ids, ids))


def test_without_transformers_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(schedir.ExecutionError, match=r"schedir\[examples\]"):
        stages_of(None, 2)


def test_the_loss_is_that_of_transformers() -> None:
    torch.manual_seed(3)
    schedule = schedir.build("1f1b", ranks=2, microbatches=3)
    stages = stages_of(config_of("llama"), schedule)
    given, _ = batch("llama")
    labels = given["input_ids"].masked_fill(given["attention_mask"] == 0, -100)
    labels[3] = -100  # a microbatch of nothing
    whole = uncut("llama")
    expected = whole(**given, labels=labels).loss
    assert torch.equal(causal_lm_loss(whole(**given).logits, labels), expected)
    with Executor(
        schedule, stages, causal_lm_loss, Keeping, count=causal_lm_tokens, in_process=True
    ) as executor:
        found = executor.step(given, target=labels).loss
    assert found == pytest.approx(float(expected.detach()), rel=1e-6)
