"""torchtitan's trainer with schedir's schedules and executor, by one line of its config.

Written for torchtitan 0.3. Its private names stand in this module, which imports it inside
functions alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from schedir.errors import ExecutionError
from schedir.ir import Schedule
from schedir.library import build

if TYPE_CHECKING:
    from schedir.runtime import TorchSchedule

_LOSS_FIRST = "ZBVZeroBubble"
"""Of torchtitan's schedules the one whose loss it expects on rank 0; else on the last rank."""


def pipelining_fn(
    own: Callable[..., Any], schedule: Schedule | str | None = None, **options: Any
) -> Callable[..., tuple[TorchSchedule, list[Any], bool, bool]]:
    """A model's `pipelining_fn` for torchtitan, whose schedule is run by schedir's executor.

    ```python
    config.model_spec.pipelining_fn = pipelining_fn(config.model_spec.pipelining_fn, "hanayo")
    ```

    - `own`: the model's own function, which cuts the model and wraps its parts.
    - `schedule`: the schedule to run: a Schedule, or the name of a built-in one. It says how many
      stages there are, and on which ranks. By default the config's, with the config's stages.
    - `options`: those of `schedir.runtime.TorchSchedule`.

    The mesh is that of torchtitan's `parallel_dims`. torchtitan's chunked loss, its default, runs
    backwards of its own; stages that fully_shard has wrapped then gather by `gathers="free"`.

    It warns if torchtitan would look for the loss on another rank than the schedule's last stage
    has. The function that it returns raises ExecutionError if the schedule does not fit the
    config's numbers of ranks and microbatches, or its `module_fqns_per_model_part`.
    """

    def pipelined(
        model: Any,
        *,
        parallel_dims: Any,
        parallelism: Any,
        training: Any,
        loss_fn: Any,
        **rest: Any,
    ) -> tuple[TorchSchedule, list[Any], bool, bool]:
        from torchtitan.components.loss import ChunkedLossWrapper

        from schedir.runtime import TorchSchedule

        made = None
        if schedule is not None:
            made = _made(schedule, parallelism, training)
            parallelism = _config_for(made, parallelism)
        with _stages_of(made):
            theirs, parts, has_first, has_last = own(
                model,
                parallel_dims=parallel_dims,
                parallelism=parallelism,
                training=training,
                loss_fn=loss_fn,
                **rest,
            )
        free = {"gathers": "free"} if isinstance(loss_fn, ChunkedLossWrapper) else {}
        data = _data_dims(parallel_dims)
        others = ("tp",) if parallel_dims.tp > 1 else ()
        mesh = parallel_dims.get_mesh(["pp", *data, *others])
        ours = TorchSchedule(theirs, schedule=made, mesh=mesh, data_dims=data, **free | options)
        return ours, parts, has_first, has_last

    return pipelined


def _data_dims(parallel_dims: Any) -> tuple[str, ...]:
    """The dimensions of torchtitan's dense mesh along which processes have data of their own; that
    of fully_shard is there even if it has one process alone."""
    parallel_dims.get_mesh("pp")  # made here at the latest
    known = parallel_dims._single_axis_meshes
    names = ("dp_replicate", "fsdp") if "fsdp" in known else ("dp_replicate", "dp_shard", "cp")
    return tuple(name for name in names if parallel_dims.get_optional_mesh(name) is not None)


def _made(given: Schedule | str, parallelism: Any, training: Any) -> Schedule:
    """The schedule for the numbers of ranks and microbatches in a config."""
    ranks = parallelism.pipeline_parallel_degree
    microbatches = training.local_batch_size // parallelism.pipeline_parallel_microbatch_size
    made = build(given, ranks=ranks, microbatches=microbatches) if isinstance(given, str) else given
    if (made.ranks, made.microbatches) != (ranks, microbatches):
        raise ExecutionError(
            f"{made.name} is for {made.ranks} ranks and {made.microbatches} microbatches, but "
            f"torchtitan's config has {ranks} and {microbatches}: pipeline_parallel_degree, and "
            "local_batch_size by pipeline_parallel_microbatch_size"
        )
    named = parallelism.module_fqns_per_model_part
    if named is not None and len(named) != made.stages:
        raise ExecutionError(
            f"{made.name} has {made.stages} stages, but module_fqns_per_model_part in torchtitan's "
            f"config names the modules of {len(named)}"
        )
    if ranks > 1:
        _check_loss(made, parallelism.pipeline_parallel_schedule)
    return made


def _check_loss(made: Schedule, name: str) -> None:
    """Say by which schedule in its config torchtitan finds the loss: metrics read it from there."""
    (holder, *_) = made.placement[-1]
    found = 0 if name == _LOSS_FIRST else made.ranks - 1
    if holder == found:
        return
    fits = {0: f'"{_LOSS_FIRST}"', made.ranks - 1: '"1F1B"'}.get(holder)
    mend = f"set it to {fits}" if fits else "which has it on no other rank than the first or last"
    logging.getLogger("schedir").warning(
        "%s has the loss on rank %s of the pipeline, but with pipeline_parallel_schedule=%r "
        "torchtitan's metrics read it on rank %s: %s",
        *(made.name, holder, name, found, mend),
    )


def _config_for(made: Schedule, parallelism: Any) -> Any:
    """The config of a schedule of torch's that holds as many stages a rank; it never runs."""
    name = "1F1B" if made.stages == made.ranks else "LoopedBFS"
    return replace(
        parallelism,
        pipeline_parallel_schedule=name,
        pipeline_parallel_schedule_csv=None,
        pipeline_parallel_layers_per_stage=None,
    )


@contextmanager
def _stages_of(made: Schedule | None) -> Iterator[None]:
    """Inside, torchtitan makes the stages of a schedule; it knows the loop and the V alone."""
    if made is None:
        yield
        return
    from torchtitan.distributed import pipeline_parallel as theirs

    metadata = theirs._get_pipeline_metadata
    mapping = theirs._get_pp_rank_to_stage_indices_mapping

    def with_stages(*given: Any) -> tuple[Any, ...]:
        return made.stages, *metadata(*given)[1:]

    def stages_on(rank: int, *_: Any) -> tuple[int, ...]:
        return tuple(s for s, ranks in enumerate(made.placement) if rank in ranks)

    theirs._get_pipeline_metadata = with_stages
    theirs._get_pp_rank_to_stage_indices_mapping = stages_on
    try:
        yield
    finally:
        theirs._get_pipeline_metadata = metadata
        theirs._get_pp_rank_to_stage_indices_mapping = mapping
