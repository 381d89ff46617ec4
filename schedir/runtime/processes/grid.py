"""The process that runs each rank of the schedule, in one pipeline or in several parallel ones.

    mesh dims      pp ──▶                    pipeline 0     rank 0   rank 1
      dp     process 0   process 1           pipeline 1     rank 0   rank 1
       ▼     process 2   process 3

Every pipeline runs the whole schedule on its own data; REDUCE_GRAD sums over the pipelines.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

import attrs
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from schedir.errors import ExecutionError


@attrs.frozen
class Grid:
    """This process's place among the processes that train.

    `processes[pipeline][rank]` is the process's rank in the default process group; one process may
    run all ranks.
    """

    processes: tuple[tuple[int, ...], ...] = ((0,),)
    pipeline: int = 0
    rank: int = 0

    @property
    def pipelines(self) -> int:
        """How many pipelines there are."""
        return len(self.processes)

    @property
    def ranks(self) -> int:
        """How many ranks each pipeline has."""
        return len(self.processes[0])

    @property
    def everyone(self) -> tuple[int, ...]:
        """All processes, as a process group numbers them."""
        return tuple(sorted({process for row in self.processes for process in row}))

    @property
    def alone(self) -> bool:
        """Whether this process runs everything."""
        return len(self.everyone) == 1

    def number(self, rank: int, pipeline: int | None = None) -> int:
        """The number of a process in a group of `everyone`."""
        row = self.processes[self.pipeline if pipeline is None else pipeline]
        return self.everyone.index(row[rank])

    def name(self, rank: int, pipeline: int) -> str:
        """The name of a rank in messages."""
        return f"rank {rank}" + (f" of pipeline {pipeline}" if self.pipelines > 1 else "")

    def holders(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """The processes that run any of these ranks, in all pipelines."""
        return tuple(sorted({row[rank] for row in self.processes for rank in ranks}))


def grid(ranks: int, mesh: DeviceMesh | None) -> Grid:
    """The grid of a mesh, or of one pipeline over all processes.

    Raises ExecutionError if the number of processes is not the schedule's number of `ranks`.
    """
    if mesh is not None:
        return _of_mesh(ranks, mesh)
    if dist.is_initialized():
        rank, world = dist.get_rank(), dist.get_world_size()
    elif "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    elif ranks == 1:
        return Grid()
    else:
        raise ExecutionError(
            f"the schedule has {ranks} ranks, but this process has no rank; start it with "
            f"torchrun --nproc-per-node {ranks}, or pass in_process=True and all stages"
        )
    if world != ranks:
        run = "one process runs" if world == 1 else f"{world} processes run"
        write = (
            "for several pipelines, pass mesh= with dimensions named dp and pp"
            if world % ranks == 0
            else f"start them with torchrun --nproc-per-node {ranks}"
        )
        if 1 in (world, ranks):
            write += ", or pass in_process=True and all stages"
        raise ExecutionError(f"the schedule has {ranks} ranks, but {run}; {write}")
    return Grid((tuple(range(world)),), 0, rank)


def _of_mesh(ranks: int, mesh: DeviceMesh) -> Grid:
    names = mesh.mesh_dim_names or ()
    if not names or not set(names) <= {"dp", "pp"}:
        raise ExecutionError(
            f"mesh: its dimensions must be named dp and pp, not {names or 'left without a name'}; "
            'of a larger mesh, pass mesh["dp", "pp"]'
        )
    layout = mesh.mesh
    if "dp" not in names:
        layout = layout.unsqueeze(0)
    elif "pp" not in names:
        layout = layout.unsqueeze(1)
    elif names == ("pp", "dp"):
        layout = layout.t()
    if layout.shape[1] != ranks:
        raise ExecutionError(
            f"the schedule has {ranks} ranks, but the mesh {layout.shape[1]} in its dimension pp; "
            f"make the mesh with {ranks}, or build the schedule for {layout.shape[1]} ranks"
        )
    # By the place in the mesh: get_local_rank is the rank in a group, which torch sorts.
    places = (layout == dist.get_rank()).nonzero().tolist()
    if not places:
        raise ExecutionError(
            f"process {dist.get_rank()} is not in the mesh {layout.tolist()}; make executors only "
            "on the mesh's processes"
        )
    return Grid(tuple(map(tuple, layout.tolist())), *places[0])
