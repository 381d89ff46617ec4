"""What a profile of a step shows, and that profiling disturbs nothing that is under way."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import schedir
from schedir.runtime import Executor
from tests.runtime.kit import MSE, adamw, linear_stages, random_batch
from tests.runtime.on_ranks import on_ranks


class Slow(nn.Linear):
    """Computes for a while, so that the next rank waits."""

    def forward(self, x: Tensor) -> Tensor:
        large = torch.ones(700, 700)
        for _ in range(8):
            large = large @ large / 700
        return super().forward(x) * large[0, 0]


@on_ranks(2)
def test_waiting_and_computing_are_apart_in_a_profile(rank: int) -> None:
    schedule = schedir.build("fill-drain", ranks=2, microbatches=2)
    stage = nn.Linear(4, 4) if rank else Slow(4, 4)
    x, y = random_batch(rows=4)
    with Executor(schedule, {rank: stage}, MSE, adamw) as executor:
        executor.step(x, target=y)
        with torch.profiler.profile() as profile:
            executor.step(x, target=y)
    spans = {event.name: event.time_range for event in profile.events()}
    for name in ("1F0", "1F1") if rank else ("0B0", "0B1"):
        assert spans[f"wait for {name}"].end <= spans[name].start
    # Rank 1 has nothing to do while the first forward runs but to wait for it.
    if rank:
        assert spans["wait for 1F1"].elapsed_us() >= spans["1F1"].elapsed_us()


@on_ranks(2)
def test_what_is_under_way_outlives_a_profile(rank: int) -> None:
    """Sends, and receives posted ahead; work that a profiler knew of would end the process."""
    schedule = schedir.build("1f1b", ranks=2, microbatches=4)
    x, y = random_batch()
    with Executor(schedule, {rank: linear_stages()[rank]}, MSE, adamw) as executor:
        for _ in range(5):
            with torch.profiler.profile():
                executor.step(x, target=y)
