"""What is proved under `rank` runs on, wherever a rank waits for all that it has posted."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

import schedir
from schedir.runtime.transports import GlooTransport, NcclTransport
from tests.built_in import NAMES, SYNCHRONOUS, variants
from tests.runtime.impatient import impatient
from tests.runtime.kit import Twins, everyone, linear_stages, message_of, random_batches
from tests.runtime.lists import megatron
from tests.runtime.nccl_over_gloo import nccl_over_gloo
from tests.runtime.on_ranks import on_ranks
from tests.sweeps import sweep


@on_ranks(2, 4)
@pytest.mark.parametrize(("over", "likely"), [("gloo", 1.0), ("nccl", 0.3)])
@sweep("name", [*NAMES, "megatron"], quick=["interleaved-1f1b", "megatron"])
def test_what_is_posted_under_rank_runs_on(
    name: str, over: str, likely: float, ranks: int, rank: int
) -> None:
    if name == "megatron":  # in batches
        schedule = megatron(ranks, ranks + 1)
    else:
        schedule = schedir.build(name, ranks=ranks, microbatches=ranks + 1, **variants(name)[-1])
    twins = Twins(linear_stages(schedule.stages), schedule, rank)
    nccl = over == "nccl"
    with (
        nccl_over_gloo() if nccl else nullcontext(),
        impatient(NcclTransport if nccl else GlooTransport, likely, seed=rank) as waited,
        twins.executor(channel="rank", timeout=60) as executor,
    ):
        for x, y in random_batches(3, 2 * schedule.microbatches):
            found = executor.step(x, target=y).loss
            if name in (*SYNCHRONOUS, "megatron"):
                assert found == pytest.approx(twins.step((x, y)), rel=1e-5)
        executor.evaluate(x, target=y)
    assert waited


@on_ranks(2)
@sweep("name", ["1f1b", "fill-drain"], quick=["1f1b"])
def test_what_is_posted_under_async_hangs(name: str, rank: int) -> None:
    """Its receives are ahead of sends that the other rank needs before it sends."""
    schedule = schedir.build(name, ranks=2, microbatches=4)
    ((x, y),) = random_batches(1)
    with impatient(GlooTransport, 1.0, seed=0):
        executor = Twins(linear_stages(), schedule, rank).executor(timeout=3)
        executor.step(x, target=y)  # what the first one posts waits for nothing else
        message = message_of(executor.step, x, target=y)
    assert "waited 3 s in vain" in " ".join(everyone(message))
    executor.close()
