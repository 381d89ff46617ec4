"""The model classes of docs/reference/models.md, in two stages and uncut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import schedir
from schedir.runtime import Executor
from schedir.training import stages_of
from tests.runtime.kit import MSE
from tests.sweeps import sweep
from tests.test_golden import compare
from tests.training.model_classes import CLASSES, PAGE, SIZE, TOKENS, page
from tests.training.test_transformers import Keeping

QUICK = ("LlamaForCausalLM", "MambaForCausalLM", "BartForCausalLM", "CLIPForImageClassification")


def output_of(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """The logits, or what comes first."""
    found = model(**inputs)
    output: Tensor = found["logits"] if "logits" in found else found[0]
    return output


def batch(model: Any, config: Any) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    if model.main_input_name == "pixel_values":
        size = getattr(config, "image_size", SIZE)
        return {"pixel_values": torch.randn(4, 3, size, size, generator=generator)}
    return {"input_ids": torch.randint(3, TOKENS, (4, 8), generator=generator)}


def by_name(output: Any, target: Tensor) -> Tensor:
    """Of a model without logits the stage gives all that it returns."""
    return MSE(next(iter(output.values())) if isinstance(output, dict) else output, target)


@sweep("name", CLASSES, quick=QUICK)
def test_a_class_trains_as_if_uncut(name: str) -> None:
    made = getattr(transformers, name)
    config = made.config_class(**CLASSES[name], use_cache=False)
    schedule = schedir.build("1f1b", ranks=2, microbatches=2)
    stages = stages_of(config, schedule, model_class=made)
    whole = made._from_config(config)
    (alone,) = stages_of(config, 1, model_class=made).values()
    whole.load_state_dict(alone.state_dict())
    inputs = batch(whole, config)
    with torch.no_grad():
        target = torch.randn_like(output_of(whole, inputs))
    total = 0.0
    for m in range(2):
        piece = {key: value.chunk(2)[m] for key, value in inputs.items()}
        loss = MSE(output_of(whole, piece), target.chunk(2)[m]) / 2
        loss.backward()
        total += loss.item()
    expected = {key: p.grad for key, p in whole.named_parameters(remove_duplicate=False)}
    shared = {key for tie in stages.ties for _, key in tie}
    with Executor(
        schedule, stages, by_name, Keeping, ties=stages.ties, in_process=True
    ) as executor:
        assert executor.step(inputs, target=target).loss == total
        for stage, module in stages.items():
            kept: Any = executor.optimizers[stage].kept  # type: ignore[attr-defined]
            for key, p in module.named_parameters():
                if key in shared:
                    torch.testing.assert_close(kept[p], expected[key])
                elif kept[p] is None or expected[key] is None:
                    assert kept[p] is expected[key], key
                else:
                    assert torch.equal(kept[p], expected[key]), key


def test_the_page_lists_them(request: pytest.FixtureRequest) -> None:
    assert len(CLASSES) >= 30
    compare(PAGE, page(), request)


def refusal(model_class: str, config: Any) -> str:
    with pytest.raises(schedir.ExecutionError) as caught:
        stages_of(config, 2, model_class=getattr(transformers, model_class))
    return str(caught.value)


def test_encoder_decoders_are_refused_with_the_classes_that_work() -> None:
    decoder = CLASSES["BartForCausalLM"] | {"is_encoder_decoder": True, "encoder_layers": 2}
    decoder |= {"encoder_attention_heads": 4, "encoder_ffn_dim": 48}
    bart = transformers.BartConfig(**decoder)
    whisper = transformers.WhisperConfig(**CLASSES["WhisperForCausalLM"] | decoder)
    t5 = transformers.T5Config(d_model=32, d_ff=48, num_layers=2, num_heads=4, vocab_size=TOKENS)
    for name in ("BartForConditionalGeneration", "BartModel", "BartForSequenceClassification"):
        said = refusal(name, bart)
        assert said.startswith(f"{name} can't be cut: it is an encoder-decoder")
        assert said.endswith("; of its family, BartForCausalLM can be")
    said = refusal("WhisperForConditionalGeneration", whisper)
    assert said.endswith("; of its family, WhisperForCausalLM can be")
    assert refusal("T5ForConditionalGeneration", t5).endswith("; nor can its family")


def test_an_encoder_whose_blocks_share_a_bias_says_so() -> None:
    t5 = transformers.T5Config(d_model=32, d_ff=48, num_layers=2, num_heads=4, vocab_size=TOKENS)
    said = refusal("T5EncoderModel", t5)
    assert said == (
        "T5EncoderModel can't be cut: block 1 of encoder.block takes more than the hidden states "
        "of what other stages compute: position_bias"
    )


def test_two_towers_are_refused_by_name() -> None:
    text, vision = CLASSES["CLIPTextModelWithProjection"], CLASSES["CLIPVisionModelWithProjection"]
    said = refusal("CLIPModel", transformers.CLIPConfig(text_config=text, vision_config=vision))
    assert "its towers take different inputs, text_model (input_ids) and vision_model" in said
    assert "CLIPTextModelWithProjection, CLIPVisionModel, CLIPVisionModelWithProjection" in said
