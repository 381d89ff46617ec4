"""Models of transformers, cut by their configs, beside the same models uncut."""

from __future__ import annotations

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
    "vit": (
        transformers.ViTConfig,
        {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
        | {"num_attention_heads": 4, "image_size": 8, "patch_size": 4},
    ),
}
TIED = {
    "llama-tied": ("model.embed_tokens.weight", "lm_head.weight"),
    "gemma": ("model.embed_tokens.weight", "lm_head.weight"),
    "gpt2": ("transformer.wte.weight", "lm_head.weight"),
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
    given, target = batch(name)
    with Executor(
        options.pop("schedule"), stages, loss_fn, Keeping, ties=stages.ties, **options
    ) as executor:
        found = executor.step(inputs, target=target).loss
        loss, grads = plain(
            name, inputs if isinstance(inputs, dict) else {_main(given): inputs}, target
        )
        assert found == loss
        for stage, module in stages.items():
            kept = executor.optimizers[stage].kept  # type: ignore[attr-defined]
            for parameter, p in module.named_parameters():
                if parameter in TIED.get(name, ()):  # summed up in another order
                    torch.testing.assert_close(kept[p], grads[parameter])
                else:
                    assert torch.equal(kept[p], grads[parameter]), parameter


def _main(given: Mapping[str, Tensor]) -> str:
    return next(iter(given))


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_trains_as_if_uncut(name: str, ranks: int, padded: bool) -> None:
    schedule = schedir.build("1f1b", ranks=ranks, microbatches=2)
    stages = stages_of(config_of(name), schedule)
    inputs, _ = batch(name)
    if padded and name == "vit":
        pytest.skip("images are not padded")
    given = inputs if padded else inputs[_main(inputs)]
    compare(name, stages, given, schedule=schedule, in_process=True)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", CONFIGS)
def test_weights_do_not_depend_on_the_cut(name: str, ranks: int) -> None:
    whole = uncut(name)
    expected = whole.state_dict()
    buffers = dict(whole.named_buffers())
    together: set[str] = set()
    for rank in range(ranks):  # each as if alone
        schedule = schedir.build("fill-drain", ranks=ranks, microbatches=2)
        stages = stages_of(config_of(name), schedule, rank=rank)
        assert list(stages) == [rank]
        for key, value in stages[rank].state_dict().items():
            assert torch.equal(value, expected[key]), key
            together.add(key)
        for key, value in stages[rank].named_buffers():
            assert torch.equal(value, buffers[key]), key
        ties = [[(0, TIED[name][0]), (ranks - 1, TIED[name][1])]] if name in TIED else []
        assert list(stages.ties) == ties
    assert together == set(expected)


@on_ranks(2)
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_each_rank_holds_its_own(rank: int, name: str) -> None:
    schedule = schedir.build("1f1b", ranks=2, microbatches=2)
    stages = stages_of(config_of(name), schedule)
    held = [name for name, p in stages[rank].named_parameters() if not p.is_meta]
    assert ("embed" in " ".join(held) or "wte" in " ".join(held)) == (rank == 0)
    compare(name, stages, batch(name)[0], schedule=schedule)


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
