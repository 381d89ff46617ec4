"""The model classes of transformers that train in stages as they do uncut, each over a tiny config,
and the page of the docs that lists them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "models.md"
TOKENS, SIZE = 64, 8
"""Of the vocabulary, and of an image's side."""

_TOKENS: dict[str, Any] = {"vocab_size": TOKENS, "pad_token_id": 0}
_TOKENS |= {"bos_token_id": 1, "eos_token_id": 2}
_SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48}
_SIZES |= {"num_hidden_layers": 4, "num_attention_heads": 4}
_TEXT = _TOKENS | _SIZES | {"max_position_embeddings": 64}
_GROUPED = _TEXT | {"num_key_value_heads": 2}
_HEADS = _GROUPED | {"head_dim": 8}
_NO_DROPOUT = dict.fromkeys(
    ("hidden_dropout_prob", "attention_probs_dropout_prob", "attention_dropout", "hidden_dropout"),
    0.0,
)
_BERT, _IMAGES = _TEXT | _NO_DROPOUT, _SIZES | {"image_size": SIZE, "patch_size": 4}
_VIT = _IMAGES | _NO_DROPOUT
_OPENAI = _TOKENS | {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64}
_OPENAI |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
_DECODER = _TOKENS | {"d_model": 32, "decoder_layers": 4, "decoder_attention_heads": 4}
_DECODER |= {"decoder_ffn_dim": 48, "dropout": 0.0, "is_encoder_decoder": False}

CLASSES: dict[str, dict[str, Any]] = {
    # Decoders: the next token.
    "LlamaForCausalLM": _GROUPED,
    "MistralForCausalLM": _GROUPED,
    "MixtralForCausalLM": _GROUPED | {"num_local_experts": 4},
    "Qwen2ForCausalLM": _GROUPED,
    "Qwen2MoeForCausalLM": _GROUPED
    | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    | {"shared_expert_intermediate_size": 16},
    "Qwen3ForCausalLM": _HEADS,
    "GemmaForCausalLM": _HEADS,
    "Gemma2ForCausalLM": _HEADS,
    "Gemma3ForCausalLM": _HEADS,
    "PhiForCausalLM": _GROUPED | {"resid_pdrop": 0.0},
    "Phi3ForCausalLM": _GROUPED,
    "GPT2LMHeadModel": _OPENAI,
    "GPTNeoXForCausalLM": _BERT,
    "GPTJForCausalLM": _OPENAI | {"rotary_dim": 4},
    "GPTBigCodeForCausalLM": _OPENAI,
    "CodeGenForCausalLM": _OPENAI | {"rotary_dim": 4},
    "OPTForCausalLM": _TEXT | {"ffn_dim": 48, "word_embed_proj_dim": 16, "dropout": 0.0},
    "BloomForCausalLM": _TOKENS | {"hidden_size": 32, "n_layer": 4, "n_head": 4},
    "FalconForCausalLM": _TEXT | {"num_kv_heads": 2},
    "MptForCausalLM": _TOKENS | {"d_model": 32, "n_layers": 4, "n_heads": 4, "max_seq_len": 64},
    "StableLmForCausalLM": _GROUPED,
    "Starcoder2ForCausalLM": _GROUPED | {"residual_dropout": 0.0, "embedding_dropout": 0.0},
    "OlmoForCausalLM": _GROUPED,
    "Olmo2ForCausalLM": _GROUPED,
    "CohereForCausalLM": _GROUPED,
    "GraniteForCausalLM": _GROUPED,
    "NemotronForCausalLM": _HEADS,
    "HeliumForCausalLM": _HEADS,
    "SmolLM3ForCausalLM": _GROUPED,
    "Glm4ForCausalLM": _HEADS,
    "Ernie4_5ForCausalLM": _HEADS,
    "CTRLLMHeadModel": _OPENAI | {"dff": 48},
    "XGLMForCausalLM": _TOKENS
    | {"d_model": 32, "num_layers": 4, "attention_heads": 4, "ffn_dim": 48}
    | {"max_position_embeddings": 64, "dropout": 0.0, "attention_dropout": 0.0},
    "BioGptForCausalLM": _BERT | {"activation_dropout": 0.0, "layerdrop": 0.0},
    "MambaForCausalLM": _TOKENS | {"hidden_size": 32, "num_hidden_layers": 4, "state_size": 8},
    "BartForCausalLM": _DECODER | {"max_position_embeddings": 64},
    "WhisperForCausalLM": _DECODER | {"max_target_positions": 64, "decoder_start_token_id": 1},
    # Encoders, and heads other than the next token's.
    "BertForMaskedLM": _BERT,
    "BertForSequenceClassification": _BERT,
    "RobertaForMaskedLM": _BERT,
    "ElectraForMaskedLM": _BERT | {"embedding_size": 32},
    "DistilBertForMaskedLM": _TOKENS
    | {"dim": 32, "n_layers": 4, "n_heads": 4, "hidden_dim": 48, "max_position_embeddings": 64}
    | {"dropout": 0.0, "attention_dropout": 0.0},
    "ModernBertForMaskedLM": _TEXT | {"cls_token_id": 1, "sep_token_id": 2},
    "LlamaForSequenceClassification": _GROUPED,
    "LlamaForTokenClassification": _GROUPED | {"classifier_dropout": 0.0},
    "CLIPTextModelWithProjection": _TEXT | {"projection_dim": 8},
    # Images.
    "ViTForImageClassification": _VIT,
    "DeiTForImageClassification": _VIT,
    "BeitForImageClassification": _VIT | {"drop_path_rate": 0.0},
    "Dinov2ForImageClassification": _VIT,
    "IJepaForImageClassification": _VIT,
    "ViTMSNForImageClassification": _VIT,
    "ConvNextForImageClassification": {"hidden_sizes": [8] * 4, "depths": [1] * 4}
    | {"image_size": 32},
    "CLIPVisionModelWithProjection": _IMAGES | {"projection_dim": 8},
    "CLIPForImageClassification": {"vision_config": _IMAGES},
}
"""The settings of each class's config: as small as it can be, and without dropout."""

_BEFORE = """\
# Models of Hugging Face that can be cut

`stages_of(config, schedule, model_class=…)` cuts a model of transformers into stages. Each class
below trains in two stages exactly as it does uncut. A test takes a tiny config, runs a step of
1F1B, and compares the loss and all gradients with those of transformers' own model, bit for bit.
(The gradients of a parameter that two stages share, such as a tied embedding, are summed in another
order, and compared to rounding.) `stages_of` also tries other classes. If it cannot cut one, the
error gives the reason.

| class | config |
| --- | --- |
"""
_BEHIND = """
## What can't be cut

- **Encoder-decoders** (T5, BART, Whisper): each stage of the decoder needs the encoder's output.
  Cut a decoder alone, such as `BartForCausalLM`.
- **Two towers** (`CLIPModel`): each tower takes its own input. Cut one of them, such as
  `CLIPTextModelWithProjection`.
- **Blocks that share a result of one block**: the position bias of `T5EncoderModel`, DeBERTa's
  relative positions.
- **One block that runs many times** (ALBERT), and audio models.
"""


def page() -> str:
    """The text of docs/reference/models.md."""
    import transformers

    rows = [(name, getattr(transformers, name).config_class.__name__) for name in CLASSES]
    table = "".join(f"| `{name}` | `{config}` |\n" for name, config in rows)
    return f"{_BEFORE}{table}{_BEHIND}"
