"""The process that runs each rank of the schedule, in one pipeline or in several parallel ones.

    mesh dims      pp ──▶                    pipeline 0     rank 0   rank 1
      dp     process 0   process 1           pipeline 1     rank 0   rank 1
       ▼     process 2   process 3

Every pipeline runs the whole schedule on its own data; REDUCE_GRAD sums over the pipelines. Along
any other dimension of the mesh processes run the same lists on the same data, side by side: each
index there is a slice, with pipelines and sums of its own.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import TypeAlias

import attrs
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from schedir.errors import ExecutionError

Layout: TypeAlias = tuple[tuple[int, ...], ...]
"""Processes by pipeline and rank."""


@attrs.frozen
class Grid:
    """This process's place among the processes that train.

    `slices[slice][pipeline][rank]` is the process's rank in the default process group; one process
    may run all ranks. Processes with other `draws` draw other random numbers. `where` is the slice
    in words, empty if there is one.
    """

    slices: tuple[Layout, ...] = (((0,),),)
    slice: int = 0
    pipeline: int = 0
    rank: int = 0
    draws: int = 0
    where: str = ""

    @property
    def processes(self) -> Layout:
        """Those of this slice, by pipeline and rank."""
        return self.slices[self.slice]

    @property
    def pipelines(self) -> int:
        """How many pipelines there are."""
        return len(self.processes)

    @property
    def ranks(self) -> int:
        """How many ranks each pipeline has."""
        return len(self.processes[0])

    @cached_property
    def everyone(self) -> tuple[int, ...]:
        """All processes of all slices, as a process group numbers them."""
        return tuple(sorted({p for layout in self.slices for row in layout for p in row}))

    @property
    def alone(self) -> bool:
        """Whether this process runs everything."""
        return len(self.everyone) == 1

    def number(self, rank: int, pipeline: int | None = None) -> int:
        """The number of a process of this slice in a group of `everyone`."""
        row = self.processes[self.pipeline if pipeline is None else pipeline]
        return self.everyone.index(row[rank])

    def name(self, rank: int, pipeline: int) -> str:
        """The name of a rank in messages."""
        return f"rank {rank}" + (f" of pipeline {pipeline}" if self.pipelines > 1 else "")

    def holders(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """The processes that run any of these ranks, in all pipelines."""
        return tuple(sorted({row[rank] for row in self.processes for rank in ranks}))


def grid(
    ranks: int,
    mesh: DeviceMesh | None,
    pipeline_dim: str = "pp",
    data_dims: Sequence[str] = ("dp",),
    seed_dims: Sequence[str] = (),
) -> Grid:
    """The grid of a mesh, or of one pipeline over all processes.

    Each index of the `data_dims` is one pipeline. Each index of the mesh's other dimensions is a
    slice; along the `seed_dims` these draw different random numbers.

    Raises ExecutionError if the number of processes is not the schedule's number of `ranks`.
    """
    if mesh is not None:
        return _of_mesh(ranks, mesh, pipeline_dim, data_dims, seed_dims)
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
    return Grid(((tuple(range(world)),),), rank=rank)


def _of_mesh(
    ranks: int,
    mesh: DeviceMesh,
    pipeline_dim: str,
    data_dims: Sequence[str],
    seed_dims: Sequence[str],
) -> Grid:
    slices, names = slices_of(mesh, pipeline_dim, data_dims), mesh.mesh_dim_names or ()
    _, pipelines, found = slices.shape
    if found != ranks:
        raise ExecutionError(
            f"the schedule has {ranks} ranks, but the mesh {found} in its dimension "
            f"{pipeline_dim}; make the mesh with {ranks}, or build the schedule for {found} ranks"
        )
    rank, number = dist.get_rank(), 0
    place = dict(zip(names, (mesh.mesh == rank).nonzero().tolist()[0], strict=True))
    others = {name: at for name, at in place.items() if name not in (pipeline_dim, *data_dims)}
    for name in seed_dims:
        if name not in others:
            raise ExecutionError(
                f"seed_dims: {name!r} is not one of the mesh's other dimensions; it has {names}, "
                f"of which {pipeline_dim} and {', '.join(data_dims)} draw numbers of their own"
            )
        number = number * mesh.mesh.shape[names.index(name)] + others[name]
    where = ", ".join(f"{name} {at}" for name, at in others.items())
    # By the place in the mesh: get_local_rank is the rank in a group, which torch sorts.
    at, pipeline, own = (slices == rank).nonzero().tolist()[0]
    layouts = tuple(tuple(map(tuple, layout)) for layout in slices.tolist())
    return Grid(layouts, at, pipeline, own, number * pipelines + pipeline, where)


def slices_of(mesh: DeviceMesh, pipeline_dim: str, data_dims: Sequence[str]) -> Tensor:
    """The processes of a mesh, shape [slices, pipelines, ranks].

    Raises ExecutionError if the mesh has none of the dimensions, or not this process.
    """
    names, rank = mesh.mesh_dim_names or (), dist.get_rank()
    data = [name for name in names if name in data_dims]
    lacks = {pipeline_dim, *data_dims} - {*names}
    if not {pipeline_dim, *data} & {*names} or lacks - {"pp", "dp"}:
        raise ExecutionError(
            f"mesh: its dimensions are {names or 'left without a name'}, but the pipeline's is "
            f"{pipeline_dim}, and gradients are summed over {tuple(data_dims)}: name them so, or "
            "pass pipeline_dim= and data_dims="
        )
    if not (mesh.mesh == rank).any():
        raise ExecutionError(
            f"process {rank} is not in the mesh {mesh.mesh.tolist()}; make executors only on the "
            "mesh's processes"
        )
    others = [name for name in names if name not in (pipeline_dim, *data)]
    pipeline = [pipeline_dim] if pipeline_dim in names else []
    along = [names.index(name) for name in (*others, *data, *pipeline)]
    ranks = mesh.mesh.shape[along[-1]] if pipeline else 1
    pipelines = math.prod(mesh.mesh.shape[names.index(name)] for name in data)
    return mesh.mesh.permute(along).reshape(-1, pipelines, ranks)
