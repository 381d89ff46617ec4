"""Models of transformers, cut by their configs, beside the same models uncut."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import schedir
from schedir import ExecutionError
from schedir.runtime import Executor
from schedir.training import Stages, causal_lm_loss, causal_lm_tokens, stages_of
from tests.runtime.kit import assert_equal_gradients, message_of
from tests.runtime.on_ranks import on_ranks
from tests.sweeps import sweep
from tests.training.model_classes import CLASSES, TOKENS
from tests.training.test_checkpoint import assert_same
from tests.training.test_partition import state_of

SPARSE = CLASSES["MixtralForCausalLM"] | {"head_dim": 8, "num_experts_per_tok": 2}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "llama-tied": ("LlamaForCausalLM", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3ForCausalLM", {}),
    "mistral": ("MistralForCausalLM", {"sliding_window": 4}),
    "gemma": ("GemmaForCausalLM", {}),
    "gpt2": ("GPT2LMHeadModel", {}),
    "gpt-neox": ("GPTNeoXForCausalLM", {}),
    # Its embedding is narrower than its blocks, so that layers stand between them on both sides.
    "opt": ("OPTForCausalLM", {}),
    "phi": ("PhiForCausalLM", {}),
    "mixtral": ("MixtralForCausalLM", {}),
    # What stands for its embedding is multiplied in place.
    "ctrl": ("CTRLLMHeadModel", {}),
    "vit": ("ViTForImageClassification", {}),
}
ON_TWO = schedir.build("1f1b", ranks=2, microbatches=2)
TIED = {
    "llama-tied": ("model.embed_tokens.weight", "lm_head.weight"),
    "gemma": ("model.embed_tokens.weight", "lm_head.weight"),
    "gpt2": ("transformer.wte.weight", "lm_head.weight"),
    "ctrl": ("transformer.w.weight", "lm_head.weight"),
    "opt": ("model.decoder.embed_tokens.weight", "lm_head.weight"),
}


def config_of(name: str) -> Any:
    made, settings = CONFIGS[name]
    return getattr(transformers, made).config_class(**CLASSES[made] | settings)


def made(name: str) -> Any:
    """The whole model, as transformers makes it."""
    return getattr(transformers, CONFIGS[name][0])._from_config(config_of(name))


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
    whole = made(name)
    (state,) = (stage.state_dict() for stage in stages_of(config_of(name), 1).values())
    assert list(state) == list(whole.state_dict())
    whole.load_state_dict(state)
    return whole


def compare(
    whole: Any,
    schedule: schedir.Schedule,
    stages: Stages,
    inputs: Any,
    target: Tensor,
    loss_fn: Any = loss_fn,
    output_of: Callable[[Any], Any] = lambda output: output.logits,
    **options: Any,
) -> None:
    """One step of the stages beside the uncut model's, which accumulates over two microbatches."""
    whole.zero_grad()
    total = 0.0
    named = inputs if isinstance(inputs, dict) else {whole.main_input_name: inputs}
    for m in range(2):
        output = output_of(whole(**{key: value.chunk(2)[m] for key, value in named.items()}))
        loss = loss_fn(output, target.chunk(2)[m]) / 2
        loss.backward()
        total += loss.item()
    grads = {name: p.grad for name, p in whole.named_parameters(remove_duplicate=False)}
    tied = {name for tie in stages.ties for _, name in tie}
    with Executor(schedule, stages, loss_fn, Keeping, ties=stages.ties, **options) as executor:
        assert executor.step(inputs, target=target).loss == total
        for stage, module in stages.items():
            kept = executor.optimizers[stage].kept  # type: ignore[attr-defined]
            for name, p in module.named_parameters():
                if name in tied:  # summed up in another order
                    torch.testing.assert_close(kept[p], grads[name])
                else:
                    assert_equal_gradients([kept[p]], [grads[name]])


@sweep("ranks", [2, 4], quick=[2])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_trains_as_if_uncut(name: str, ranks: int) -> None:
    """Padded rows in two stages, and the bare tensor in four."""
    schedule = schedir.build("1f1b", ranks=ranks, microbatches=2)
    stages = stages_of(config_of(name), schedule)
    check_weights(name, stages, ranks)
    inputs, target = batch(name)
    given = inputs if ranks == 2 else inputs[uncut(name).main_input_name]
    compare(uncut(name), schedule, stages, given, target, in_process=True)


def check_weights(name: str, stages: Stages, number: int) -> None:
    """The stages have the uncut model's weights and buffers, and nothing else."""
    expected, found = uncut(name).state_dict(), state_of(stages)
    assert_same(found, {key: expected[key] for key in found})
    assert len(stages) < number or found.keys() == expected.keys()
    buffers = dict(uncut(name).named_buffers())
    for stage in stages.values():
        held = dict(stage.named_buffers())
        assert_same(held, {key: buffers[key] for key in held})
    ties = [[(0, TIED[name][0]), (number - 1, TIED[name][1])]] if name in TIED else []
    assert list(stages.ties) == ties


@pytest.mark.parametrize("name", ["llama-tied", "gpt2"])
@pytest.mark.parametrize("boundaries", [[1], [3]])
def test_weights_depend_on_no_cut_and_no_rank(name: str, boundaries: list[int]) -> None:
    for rank in range(2):  # each as if alone
        stages = stages_of(config_of(name), ON_TWO, rank=rank, boundaries=boundaries)
        assert list(stages) == [rank]
        check_weights(name, stages, 2)


@pytest.mark.parametrize("name", CONFIGS)
def test_weights_are_drawn_as_transformers_draws_them(name: str) -> None:
    theirs = made(name).state_dict()
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
    stages = stages_of(config_of(name), ON_TWO)
    check_weights(name, stages, 2)
    compare(uncut(name), ON_TWO, stages, *batch(name))


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
    (first, last) = stages_of(config, 2, by="type:decoderlayer|linear").summaries
    assert (first.cost, last.cost) == (3, 2)  # the last one has the head
    layout = stages_of(config, 3, by="Et|tt|tL").summaries
    assert [s.layers[-1] for s in layout] == ["model.layers.0", "model.layers.2", "lm_head"]
    assert str(uniform).startswith("stage 0: model.embed_tokens Embedding, model.layers.0 to mod")


@pytest.mark.parametrize("name", ["llama-tied", "opt", "vit"])
def test_the_stages_of_a_model_are_its_own_modules(name: str) -> None:
    torch.manual_seed(5)
    model = made(name)
    own = dict(model.named_parameters())
    before = copy.deepcopy(model.state_dict())
    stages = stages_of(model, ON_TWO)
    held = [named for stage in stages.values() for named in stage.named_parameters()]
    copied = [key for key, p in held if own.get(key) is not p]
    assert copied == ([TIED[name][1]] if name in TIED else [])
    inputs, target = batch(name)
    options: Any = {"ties": stages.ties, "in_process": True}
    with Executor(ON_TWO, stages, loss_fn, torch.optim.SGD, **options) as executor:
        expected = loss_fn(model.train()(**inputs).logits, target).item()
        assert executor.step(inputs, target=target).loss == pytest.approx(expected, rel=1e-5)
    assert list(model.state_dict()) == list(before)
    assert model.config.use_cache if name != "vit" else True
    assert any(not torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_a_classifier_pools_the_last_token_that_is_no_padding() -> None:
    """Its end reads the tokens, so they travel from stage to stage."""
    config = config_of("llama")
    auto = transformers.AutoModelForSequenceClassification
    stages = stages_of(config, 2, model_class=auto, seed=3, boundaries=["model.layers.1"])
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
    model = made("llama")
    whole = copy.deepcopy(model)
    model.activation_checkpointing_enable()
    compare(whole, ON_TWO, stages_of(model, ON_TWO), *batch("llama"), in_process=True)


BERT, VIT = CLASSES["BertForMaskedLM"], CLASSES["ViTForImageClassification"]
T5 = {"d_model": 32, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": TOKENS}
CLIP = {"text_config": CLASSES["CLIPTextModelWithProjection"]}
CLIP |= {"vision_config": CLASSES["CLIPVisionModelWithProjection"]}
_ENCODER = {"is_encoder_decoder": True, "encoder_layers": 2}
_ENCODER |= {"encoder_attention_heads": 4, "encoder_ffn_dim": 48}
BART = CLASSES["BartForCausalLM"] | _ENCODER
WHISPER = CLASSES["WhisperForCausalLM"] | BART
BOTH = "it is an encoder-decoder, and its decoder needs the encoder's output in each stage$"
CLIP_TOWERS = r"its towers take different inputs, text_model \(input_ids\) and vision_model.*"
CLIP_TOWERS += "; cut one of them$"
T5_BIAS = "block 1 of encoder.block takes more than the hidden states of what other stages compute"


@pytest.mark.parametrize(
    ("model", "settings", "message"),
    [
        ("BartForConditionalGeneration", BART, BOTH),
        ("BartModel", BART, BOTH),
        ("BartForSequenceClassification", BART, BOTH),
        ("WhisperForConditionalGeneration", WHISPER, BOTH),
        ("T5ForConditionalGeneration", T5, BOTH),
        ("T5EncoderModel", T5, f"{T5_BIAS}: position_bias$"),
        ("CLIPModel", CLIP, CLIP_TOWERS),
        ("AlbertForMaskedLM", BERT, "the 1 blocks of .*albert_layer_groups do not run"),
        # Relative positions are parameters.
        ("DebertaV2ForMaskedLM", BERT | {"relative_attention": True}, "block 0 .*rel_embeddings"),
        # A block hands the next one something beside its output, without a gradient.
        ("HYV4ForCausalLM", SPARSE, "block 1 of model.layers takes more .*prev_topk_indices"),
        # The embeddings are taken apart.
        ("Data2VecVisionForImageClassification", VIT, "stage 1 of 2 does not run without"),
        ("MixtralForCausalLM", SPARSE | {"output_router_logits": True}, "output_router_logits"),
        ("Wav2Vec2ForCTC", BERT | {"layerdrop": 0.0}, "it takes input_values"),
    ],
)
def test_what_can_not_be_cut_is_refused(model: str, settings: Any, message: str) -> None:
    made = getattr(transformers, model)
    with pytest.raises(ExecutionError, match=f"^{model} can't be cut: .*{message}"):
        stages_of(made.config_class(**settings), 2, model_class=made)


def test_bad_arguments_are_said() -> None:
    config = config_of("llama")
    llama, auto = transformers.LlamaForCausalLM, transformers.AutoModelForCausalLM
    stage = stages_of(config, 2)[0]
    ids = batch("llama")[0]["input_ids"]
    opt = transformers.OPTConfig(**BERT, layerdrop=0.1)
    for call, message in (
        (lambda: stages_of(opt, 2), "^OPTForCausalLM can't be cut: layerdrop"),
        (lambda: stages_of(nn.Linear(1, 1), 2), "not Linear; partition cuts other models"),
        (lambda: stages_of(config_of("vit"), 2, model_class=auto), "no .*CausalLM of this ViTC"),
        (lambda: stages_of(config, 5), r"5 stages .* of 4 layers"),
        (lambda: stages_of(config, 2, boundaries=[4]), r"boundaries: there is no layer 4, only m"),
        (lambda: stages_of(config, 2, by="cost"), r'by= is "parameters", .*, not \'cost\''),
        (lambda: stages_of(made("llama"), 2, model_class=llama), "config, not for a model"),
        (lambda: stage({"input_ids": ids, "labels": ids}), "labels go into target="),
        (lambda: stage({"input_ids": ids, "mask": ids}), "takes no mask, only input_ids"),
        (lambda: stage((ids, ids)), "not tuple"),
    ):
        with pytest.raises(ExecutionError, match=message):
            call()


def test_without_transformers_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert "schedir[examples]" in message_of(stages_of, None, 2)


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
    options: Any = {"count": causal_lm_tokens, "in_process": True}
    with Executor(schedule, stages, causal_lm_loss, Keeping, **options) as executor:
        found = executor.step(given, target=labels).loss
    assert found == pytest.approx(float(expected.detach()), rel=1e-6)
