"""The examples at a size that a test can afford, and what they are made of."""

from __future__ import annotations

import argparse
import os
import pickle
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pytest
import torch
import torch.distributed as dist
from alexnet import alexnet
from common import verify
from images import cifar, digits
from masked import HIDDEN, IGNORED, PADDING, Config, counted, hide, lines, masked_model
from reference import Reference
from resnet import resnet
from torch import nn
from vit import vit

import schedir
from schedir.training import partition
from tests.runtime.kit import MSE
from tests.runtime.on_ranks import on_ranks
from tests.sweeps import long

Run: TypeAlias = Callable[[str], str]

ALEXNET = "train_alexnet.py --width 4 --batch 256 --epochs 1"


@pytest.mark.parametrize(
    "example",
    [
        "train_images.py --depth 14 --width 4 --batch 256 --epochs 1",
        "train_images.py --model vit --depth 2 --width 16 --batch 256 --epochs 1",
        ALEXNET,
        "train_masked.py --layers 2 --width 16 --batch 64 --lines 512 --epochs 1",
    ],
)
@on_ranks(2)
def test_an_example_equals_its_baseline(example: str, run: Run) -> None:
    if out := run(example):
        assert re.search(r"all \d+ losses and \d+ tensors equal, bit for bit\n$", out)
        assert re.search(r"^stage 1: .* parameters$", out, re.MULTILINE)
        assert re.search(r"^epoch 1  loss .*accuracy 0\.\d+", out, re.MULTILINE)
    assert not dist.is_initialized()  # a process group that is left would be in others' way


@on_ranks(4)
def test_two_pipelines_equal_one_process(run: Run) -> None:
    if out := run(ALEXNET):
        assert "tensors equal, bit for bit" in out


@on_ranks(4)
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("", "pp 2 x fsdp 2 x tp 1: loss .*equal, bit for bit"),
        ("--tp 2", "pp 2 x fsdp 1 x tp 2: loss .*equal, to 0.0001"),
    ],
    ids=["fsdp", "tp"],
)
def test_a_sharded_or_split_llama_equals_one_process(
    rank: int, options: str, said: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "destroy_process_group", dist.barrier)  # the test's own group
    sizes = "--layers 2 --width 16 --heads 2 --context 16 --batch 8 --steps 6"
    if out := run(f"train_llama.py {sizes} {options}"):
        assert re.search(said, out, re.DOTALL)


@long
@on_ranks(8)
def test_a_llama_in_three_dimensions_equals_one_process(
    rank: int, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = "pp 2 x fsdp 2 x tp 2: loss .*equal, to 0.0001"
    test_a_sharded_or_split_llama_equals_one_process(rank, "--tp 2", said, run, monkeypatch)


def test_verify_tells_what_differs(capsys: pytest.CaptureFixture[str]) -> None:
    def training(lr: float) -> Reference:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        sched = schedir.build("1f1b", ranks=1, microbatches=2)
        return Reference(sched, [model], MSE, partial(torch.optim.SGD, lr=lr))

    batches = [(torch.ones(4, 2), torch.ones(4, 1)) for _ in range(2)]
    trained = training(0.1)
    losses = [trained.step(*batch) for batch in batches]
    weights = trained.stages[0].state_dict()
    assert verify(training(0.1), batches, losses, weights)
    assert not verify(training(0.1001), batches, losses, weights)
    printed = capsys.readouterr().out
    assert re.search(r"the loss of step 2 is .*, not .*; 0.weight differs, by up to", printed)
    assert verify(training(0.1001), batches, losses, weights, tolerance=1e-2)
    assert not verify(training(0.1), batches, losses, {"1.weight": torch.ones(1, 2)})
    assert "only one of the two has 0.bias, 0.weight, 1.bias" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("layers", "published"),
    [
        # of torchvision's models of these names
        (resnet(50, 64, 3, 1000, 224), 25_557_032),
        (resnet(101, 64, 3, 1000, 224), 44_549_160),
        (vit(12, 768, 12, 16, 3, 1000, 224), 86_567_656),
        (alexnet(64, 3, 1000, 224), 61_100_840),
    ],
    ids=["ResNet-50", "ResNet-101", "ViT-B/16", "AlexNet"],
)
def test_flags_alone_scale_a_model_to_the_published_one(layers: object, published: int) -> None:
    model = partition(layers, 1, device="meta")[0]  # type: ignore[arg-type]
    assert sum(weight.numel() for weight in model.parameters()) == published


def test_padding_is_not_looked_at() -> None:
    (train, held_out), context = lines(40, 24), 24
    assert (len(train), len(held_out)) == (40, 4)
    tokens, target = hide(train, context)
    config = Config(layers=2, width=16, heads=2, context=context)
    model = partition(masked_model(config), 1)[0]
    real = tokens != PADDING
    assert not real.all()
    before = model(tokens)
    with torch.no_grad():
        model.get_parameter("embedding.weight")[PADDING] += 1
    after = model(tokens)
    assert torch.equal(before[real][:, :PADDING], after[real][:, :PADDING])
    assert not torch.equal(before[~real], after[~real])

    hidden = tokens == HIDDEN
    assert torch.equal(hidden, target != IGNORED)
    assert hidden.any(1).all()
    assert counted(target) == hidden.sum()
    for line, row, answer in zip(train, tokens, target, strict=True):
        shown = torch.where(answer == IGNORED, row, answer)
        assert bytes(shown[: len(line)].tolist()) == line
        assert (shown[len(line) :] == PADDING).all()


def test_cifar_is_read_from_disk(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    pixels = np.arange(2 * 3072, dtype=np.uint8).reshape(2, 3072)
    content = pickle.dumps({b"data": pixels, b"labels": [3, 9]}, protocol=2)
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        (folder / name).write_bytes(content)
    for given in (tmp_path, folder):
        found = cifar(str(given))
        assert (len(found.train), len(found.test)) == (10, 2)
        assert (found.channels, found.size) == (3, 32)
        image, label = found.test[1]
        assert label == 9
        # Its second row of red: value 32 of 0..255, about a mean of 0.4 and a deviation of 0.3.
        assert image[0, 1, 0].item() == pytest.approx((32 / 255 - 0.4) / 0.3)


def test_a_pickle_runs_no_code(tmp_path: Path) -> None:
    class Wicked:
        def __reduce__(self) -> tuple[object, ...]:
            return os.system, ("touch wicked",)

    for content, message in (
        ({b"data": Wicked(), b"labels": []}, r"data_batch_1 holds .*system"),
        ([1], "holds no batch of CIFAR-10"),
    ):
        (tmp_path / "data_batch_1").write_bytes(pickle.dumps(content, protocol=2))
        with pytest.raises(argparse.ArgumentTypeError, match=message):
            cifar(str(tmp_path))
    with pytest.raises(argparse.ArgumentTypeError, match="No such file"):
        cifar(str(tmp_path / "nowhere"))


def test_the_digits_are_shared_out_once() -> None:
    data = digits()
    assert (len(data.train), len(data.test)) == (1438, 359)
    assert (data.channels, data.size) == (1, 8)
    assert set(data.test.tensors[1].tolist()) == set(range(10))
