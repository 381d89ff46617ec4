"""Closed forms of transformers, held to published figures and to real modules."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import schedir
from schedir import CostModel

GPT3: dict[str, Any] = {"hidden": 12288, "heads": 96, "vocabulary": 51200, "sequence": 2048}
FLOPS = 2**40  # so that no division rounds
MEGATRON = {
    # Narayanan et al. 2021, table 1: billions of parameters, heads, hidden size, layers.
    1.7: (24, 2304, 24),
    3.6: (32, 3072, 30),
    7.5: (32, 4096, 36),
    18.4: (48, 6144, 40),
    39.1: (64, 8192, 48),
    76.1: (80, 10240, 60),
    145.6: (96, 12288, 80),
    310.1: (128, 16384, 96),
    529.6: (128, 20480, 105),
    1008.0: (160, 25600, 128),
}


def costs(**sizes: Any) -> CostModel:
    """One parameter a byte, FLOPS a second."""
    given = {"microbatch": 1, "flops": FLOPS, "stages": 1, "weight_element": 1}
    return CostModel.of_transformer(**(given | sizes))


def total(value: Any) -> float:
    return float(sum(value))


def flops(seconds: Any) -> float:
    return total(seconds) * FLOPS


@pytest.mark.parametrize(("billions", "shape"), MEGATRON.items())
def test_parameters_of_megatron(billions: float, shape: tuple[int, int, int]) -> None:
    heads, hidden, layers = shape
    model = costs(layers=layers, hidden=hidden, heads=heads, vocabulary=51200, sequence=2048)
    assert total(model.weight_bytes) / 1e9 == pytest.approx(billions, abs=0.05)


@pytest.mark.parametrize(("hidden", "heads", "layers"), [(12288, 96, 96), (4096, 32, 36)])
@pytest.mark.parametrize("microbatch", [1, 8])
def test_flops_of_megatron(hidden: int, heads: int, layers: int, microbatch: int) -> None:
    """Equation 3: with all layers recomputed, 96 B s l h² (1 + s / (6 h) + V / (16 l h))."""
    b, s, h, v = microbatch, 2048, hidden, 51200
    model = costs(layers=layers, hidden=h, heads=heads, vocabulary=v, sequence=s, microbatch=b)
    found = 2 * flops(model.forward) - 2 * b * s * h * v + flops(model.backward)
    expected = 96 * b * s * layers * h**2 * (1 + s / (6 * h) + v / (16 * layers * h))
    assert found == pytest.approx(expected, rel=1e-12)


def test_gpt3_takes_about_a_month() -> None:
    """Section 5.1: 300 billion tokens on 1024 devices of 140 TFLOP/s each, 34 days."""
    model = costs(layers=96, **GPT3 | {"flops": 140e12})
    step = 2 * total(model.forward) + total(model.backward)
    assert step * 300e9 / 2048 / 1024 / 86400 == pytest.approx(34, rel=0.03)


def test_the_backward_is_split_as_in_zero_bubble() -> None:
    """Qi et al. 2023, table 1, of a layer: F s b h (24 h + 4 s), B (24 h + 8 s), W 24 h."""
    s, h, layers = GPT3["sequence"], GPT3["hidden"], 96
    model: Any = costs(layers=(0, layers, 0), **GPT3 | {"microbatch": 3, "stages": None})
    each = 3 * s * h * layers / FLOPS
    assert model.forward[1] == each * (24 * h + 4 * s)
    assert model.backward_input[1] == each * (24 * h + 8 * s)
    assert model.backward_weight[1] == each * 24 * h
    halves = zip(model.backward_input, model.backward_weight, strict=True)
    assert model.backward == tuple(map(sum, halves))
    head = 2 * 3 * s * h * GPT3["vocabulary"] / FLOPS
    assert (model.forward[0], model.forward[2], model.backward[2]) == (0, head, 2 * head)


@pytest.mark.parametrize(
    ("options", "form"),
    [
        # Korthikanti et al. 2022, table 2: bytes of a layer in s b h.
        ({"tensor": 1}, lambda t, scores: 34 + scores),
        ({"tensor": 8}, lambda t, scores: 10 + 24 / t + scores / t),
        ({"tensor": 8, "sequence_parallel": True}, lambda t, scores: 34 / t + scores / t),
        ({"tensor": 8, "selective": True}, lambda t, scores: 10 + 24 / t),
        ({"tensor": 8, "sequence_parallel": True, "selective": True}, lambda t, scores: 34 / t),
    ],
)
@pytest.mark.parametrize(("hidden", "heads"), [(6144, 64), (12288, 96), (20480, 128), (25600, 160)])
def test_activations_of_a_layer(
    options: dict[str, Any], form: Any, hidden: int, heads: int
) -> None:
    sizes = {"hidden": hidden, "heads": heads, "vocabulary": 51200, "sequence": 2048}
    model: Any = costs(layers=(0, 1, 0), stages=None, microbatch=4, **sizes, **options)
    scores = 5 * heads * 2048 / hidden
    expected = 2048 * 4 * hidden * form(options["tensor"], scores)
    assert model.activation_bytes[1] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("hidden", "heads", "scores", "saved"), [(12288, 96, 80, 0.70), (20480, 128, 64, 0.65)]
)
def test_what_selective_recomputation_saves(
    hidden: int, heads: int, scores: float, saved: float
) -> None:
    """Section 5: 5 a s / h is 80 for GPT-3 and 64 for MT-NLG, so 70 % and 65 % are saved."""
    sizes = {"hidden": hidden, "heads": heads, "vocabulary": 1, "sequence": 2048, "stages": None}
    whole: Any = costs(layers=(0, 1, 0), **sizes)
    less: Any = costs(layers=(0, 1, 0), selective=True, **sizes)
    each = 2048 * hidden
    assert whole.activation_bytes[1] / each == pytest.approx(34 + scores)
    kept = less.activation_bytes[1] / whole.activation_bytes[1]
    assert kept == pytest.approx(1 - saved, abs=5e-3)
    # The scores of the attention, computed once more: 4 b s² h.
    assert less.backward[1] - whole.backward[1] == 4 * each * 2048 / FLOPS
    assert less.backward_weight == whole.backward_weight
    assert less.forward == whole.forward


def test_the_ends_of_the_pipeline_keep_more() -> None:
    """Section 4.3: s b h for the embedding, 4 s b h (1 + V / h) for the last norm and the head."""
    given = {"stages": None, "tensor": 8, "sequence_parallel": True}
    model: Any = costs(layers=(1, 1, 1), **GPT3 | given)
    first, middle, last = model.activation_bytes
    each = GPT3["sequence"] * GPT3["hidden"]
    assert first - middle == pytest.approx(each / 8)
    assert last - middle == pytest.approx(4 * each / 8 * (1 + GPT3["vocabulary"] / GPT3["hidden"]))
    assert model.boundary_bytes == 2 * each / 8
    assert model.input_bytes == (8 * GPT3["sequence"], 2 * each / 8, 2 * each / 8)


@pytest.mark.parametrize(
    ("options", "form"),
    [
        ({}, 32),  # Qi et al. 2023, arXiv 2401.10241, table 1: 32 s b h
        # Inputs and output gradients that each device has whole: of queries, keys and values and of
        # the feed-forward part the input, of the projection and the feed-forward part the output's.
        ({"tensor": 8}, 2 * 4 + 2 * (3 + 1 + 4 + 4) / 8),
        ({"tensor": 8, "sequence_parallel": True}, 32 / 8),
        ({"tensor": 8, "sequence_parallel": True, "selective": True}, 32 / 8),
        ({"feed_forward": GPT3["hidden"]}, 2 * (4 + 3 + 1 + 1 + 1)),
        ({"activation_element": 4}, 64),
    ],
)
def test_what_a_layer_keeps_for_its_weights(options: dict[str, Any], form: float) -> None:
    model: Any = costs(layers=(0, 1, 0), **GPT3 | {"stages": None} | options)
    each = GPT3["sequence"] * GPT3["hidden"]
    assert model.deferred_bytes[1] == pytest.approx(each * form)
    assert model.deferred_bytes[1] < model.activation_bytes[1]
    # The head's input, and the gradient of logits in 32 bit.
    tensor, element = options.get("tensor", 1), options.get("activation_element", 2)
    around = tensor if "sequence_parallel" in options else 1
    logits = 4 * GPT3["sequence"] * GPT3["vocabulary"] / tensor
    assert model.deferred_bytes[::2] == (0, pytest.approx(element * each / around + logits))


def test_memory_of_a_parameter() -> None:
    """Rajbhandari et al. 2020, figure 1: 7.5 billion parameters take 120 GB, and 31.4 GB where 64
    copies share the optimiser's state."""
    sizes: dict[str, Any] = {"hidden": 4096, "heads": 32, "vocabulary": 51200, "sequence": 2048}
    for shard, expected in ((False, 120), (True, 31.4)):
        model = costs(layers=36, **sizes, weight_element=2, data=64, shard_optimizer=shard)
        parameters = total(model.weight_bytes) / 2
        kept = sum(map(total, (model.weight_bytes, model.gradient_bytes, model.optimizer_bytes)))
        assert kept / parameters * 7.5 == pytest.approx(expected, rel=2e-3)


def test_gradients_are_summed_in_a_ring() -> None:
    model: Any = costs(layers=4, **GPT3 | {"stages": 2, "data": 4, "bandwidth": 1e9})
    assert model.reduce_grad == tuple(2 * 3 / 4 * many / 1e9 for many in model.gradient_bytes)
    assert costs(layers=4, **GPT3 | {"data": 4}).reduce_grad == (0,)


class Model(nn.Module):
    def __init__(self, sizes: dict[str, Any], layers: int) -> None:
        super().__init__()
        h = sizes["hidden"]
        self.tokens = nn.Embedding(sizes["vocabulary"], h)
        self.positions = nn.Embedding(sizes["sequence"], h)
        form: dict[str, Any] = {"dropout": 0, "batch_first": True, "norm_first": True}
        shape = h, sizes["heads"], sizes["feed_forward"]
        each = (
            nn.TransformerEncoderLayer(*shape, activation="gelu", **form) for _ in range(layers)
        )
        self.layers = nn.Sequential(*each)
        self.norm = nn.LayerNorm(h)
        self.head = nn.Linear(h, sizes["vocabulary"], bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        found: torch.Tensor = self.head(self.norm(self.layers(x)))
        return found


SMALL: list[dict[str, Any]] = [
    {"hidden": 32, "heads": 4, "vocabulary": 50, "sequence": 16, "feed_forward": 128},
    {"hidden": 48, "heads": 3, "vocabulary": 77, "sequence": 9, "feed_forward": 80},
]


@pytest.mark.parametrize("sizes", SMALL)
@pytest.mark.parametrize("layers", [1, 3])
def test_parameters_and_flops_of_a_module(sizes: dict[str, Any], layers: int) -> None:
    module = Model(sizes, layers)
    model = costs(layers=layers, microbatch=5, **sizes)
    parameters = sum(each.numel() for each in module.parameters())
    assert total(model.weight_bytes) == parameters
    tokens = torch.randint(sizes["vocabulary"], (5, sizes["sequence"]))
    with sdpa_kernel(SDPBackend.MATH):  # its products written out, as torch counts them
        with FlopCounterMode(display=False) as forward:
            out = module(tokens)
        with FlopCounterMode(display=False) as backward:
            out.sum().backward()
    assert forward.get_total_flops() == flops(model.forward)
    assert backward.get_total_flops() == flops(model.backward)


@pytest.mark.parametrize("sizes", SMALL)
def test_parameters_of_stages(sizes: dict[str, Any]) -> None:
    """The first has the embeddings, the last one the last norm, and a copy for the head."""
    module = Model(sizes, 3)
    tokens, positions, norm = (
        sum(p.numel() for p in part.parameters())
        for part in (module.tokens, module.positions, module.norm)
    )
    layer = sum(p.numel() for p in module.layers[0].parameters())
    model = costs(layers=(1, 2, 0), stages=None, **sizes)
    assert model.weight_bytes == (layer + tokens + positions, 2 * layer, norm + tokens)


def test_more_stages_are_parts_of_fewer() -> None:
    """A finer cut summed up is the coarser one, but for the last bits of floats."""
    two, eight = (costs(layers=8, **GPT3 | {"stages": stages}) for stages in (2, 8))
    summed = attrs.asdict(schedir.simulator.recut(eight, 2, of=2), recurse=False)
    for name, value in attrs.asdict(two, recurse=False).items():
        assert summed[name] == (pytest.approx(value) if isinstance(value, tuple) else value), name


def test_it_can_be_compared_and_saved(tmp_path: Any) -> None:
    def of(stages: int) -> CostModel:
        sizes = GPT3 | {"stages": stages, "flops": 312e12, "utilisation": 0.5, "tensor": 8}
        return costs(layers=96, sequence_parallel=True, **sizes | {"weight_element": 2})

    of(8).save(tmp_path / "gpt3.json")
    assert CostModel.load(tmp_path / "gpt3.json") == of(8)
    names, limit = ["1f1b", "interleaved-1f1b"], 80 * 2**30
    table = schedir.compare(names, ranks=8, microbatches=32, costs=of, memory_limit=limit)
    assert table.unit == "s"
    assert table.best is not None
    assert table.best.target == "1f1b"  # the interleaved one is quicker, but above the limit
    assert [row.target for row in table.rows] == ["interleaved-1f1b", "1f1b"]


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"layers": 5, "stages": 2}, "5 layers can't be split evenly into 2 stages"),
        ({"layers": (1, 2), "stages": 3}, "layers are given for 2 stages, not 3"),
        ({"layers": 4, "stages": None}, "pass `stages`"),
        ({"layers": (), "stages": None}, "layers must be one number >= 0 for each stage"),
        ({"layers": (1, -1), "stages": None}, "layers must be one number >= 0 for each stage"),
        ({"layers": 4, "stages": 0}, "stages must be an int >= 1"),
        ({"heads": 0}, "heads must be an int >= 1, not 0"),
        ({"hidden": 12.5}, "hidden must be an int >= 1, not 12.5"),
        ({"tensor": 5}, "hidden must be a multiple of tensor, 5"),
        ({"flops": 0}, "flops must be a finite number > 0"),
        ({"utilisation": 1.5}, "utilisation must be above 0 and at most 1"),
        ({"data": 0}, "data must be an int >= 1"),
        ({"weight_element": -1}, "weight_bytes of stage 0 must be"),
        ({"latency": -1}, "latency must be"),
        ({"bandwidth": 0}, "bandwidth must be above 0"),
    ],
)
def test_bad_sizes(wrong: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        costs(**{"layers": 4} | GPT3 | wrong)
