"""Make a schedule's stages from a model that `torch.distributed.pipelining.pipeline` has cut.

torch's stages take values of several earlier stages, and inputs of the whole model: a skip
connection, a mask. The executor's stages take only what the stage before returns. So each stage's
graph is rewritten: values that later stages need enter it, and leave it beside its own output.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from torch import fx, nn

from schedir.errors import ExecutionError
from schedir.ir import Schedule
from schedir.runtime.arguments import TieOf, whole_name
from schedir.training.cutting.stages import Stages, StageSummary, held_stages, ties_of

if TYPE_CHECKING:
    from torch.distributed.pipelining import Pipe


def stages_of_pipe(pipe: Pipe, schedule: Schedule, *, rank: int | None = None) -> Stages:
    """Make the stages of a model that torch's `pipeline(…)` has traced and split.

    >>> import torch
    >>> from torch import nn
    >>> from torch.distributed.pipelining import SplitPoint, pipeline
    >>> from schedir import build
    >>> from schedir.training import stages_of_pipe
    >>> model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    >>> pipe = pipeline(model, (torch.ones(2, 4),), split_spec={"1": SplitPoint.BEGINNING})
    >>> print(stages_of_pipe(pipe, build("1f1b", ranks=2, microbatches=2)))
    stage 0: 0; 20 parameters
    stage 1: 1; 5 parameters

    The stages compute what `pipe` computes, from the inputs of the model, in their order or by
    name. If the model was traced in training mode, dropout and batch statistics apply in `evaluate`
    too. Parameters have the names of the whole model; a module that is called again has an @1 in
    its name. A value that skips stages is carried along through them. Parameters that stages share
    are the result's `ties`. `rank` is this process's rank in the schedule, by default the rank that
    torchrun gave it; without torchrun all stages are made.

    Raises ExecutionError if the schedule has another number of stages, if the model returns
    constants, or if stages share running statistics.
    """
    if not isinstance(getattr(pipe, "split_gm", None), fx.GraphModule):
        raise ExecutionError(
            f"stages_of_pipe takes what torch's pipeline(…) returns, not {type(pipe).__name__}"
        )
    calls = [node for node in pipe.split_gm.graph.nodes if node.op == "call_module"]
    if len(calls) != schedule.stages:
        raise ExecutionError(
            f"the model was split into {len(calls)} stages, but the schedule has {schedule.stages}"
            "; change split_spec, or the schedule"
        )
    parts = [cast(fx.GraphModule, pipe.split_gm.get_submodule(str(call.target))) for call in calls]
    entering = _entering(pipe.split_gm.graph, calls)
    modules = [
        _module(part, call, before, after)
        for part, call, before, after in zip(parts, calls, entering, entering[1:], strict=False)
    ]
    ties = _ties(pipe, {str(call.target): stage for stage, call in enumerate(calls)}, modules)
    _check_statistics(modules)
    summaries = tuple(
        StageSummary(
            tuple(str(node.target) for node in part.graph.nodes if node.op == "call_module"),
            sum(p.numel() for p in module.parameters()),
        )
        for part, module in zip(parts, modules, strict=True)
    )
    return Stages({stage: modules[stage] for stage in held_stages(schedule, rank)}, ties, summaries)


def _entering(graph: fx.Graph, calls: Sequence[fx.Node]) -> list[list[fx.Node]]:
    """Find the values that enter each stage, for it or for later ones, and the model's outputs.

    A value is an input of the model, the output of a stage, or an entry of that output.
    """
    number = {call: stage for stage, call in enumerate(calls)}
    for node in graph.nodes:
        if node.target is operator.getitem and node.args[0] in number:
            number[node] = number[node.args[0]]
    (returned,) = (node.args[0] for node in graph.nodes if node.op == "output")
    wanted = returned if isinstance(returned, (tuple, list)) else (returned,)
    if any(not isinstance(node, fx.Node) for node in wanted):
        raise ExecutionError(
            "the model returns constants, which no stage computes; return tensors only"
        )
    entering = [list(wanted)]
    for stage in reversed(range(len(calls))):
        later = [node for node in entering[0] if number.get(node) != stage]
        entering.insert(0, list(dict.fromkeys([*calls[stage].all_input_nodes, *later])))
    # The first stage takes all inputs of the model, in their order.
    entering[0] = [node for node in graph.nodes if node.op == "placeholder"]
    return entering


def _module(
    part: fx.GraphModule, call: fx.Node, before: Sequence[fx.Node], after: Sequence[fx.Node]
) -> fx.GraphModule:
    """Make a stage that takes the values before it, and returns those after it."""
    graph = fx.Graph()
    values: dict[fx.Node, Any] = {node: graph.placeholder(node.name) for node in before}
    own = [node for node in part.graph.nodes if node.op == "placeholder"]
    given: Any = fx.map_arg(tuple(call.args), values.__getitem__)
    returned: Any = graph.graph_copy(part.graph, dict(zip(own, given, strict=True)))
    for node in after:
        if node is call:
            values[node] = returned
        elif node not in values:
            values[node] = returned[node.args[1]]
    leaving = tuple(values[node] for node in after)
    graph.output(leaving[0] if len(leaving) == 1 else leaving)
    return fx.GraphModule(part, graph)


def _check_statistics(modules: Sequence[nn.Module]) -> None:
    """Raise ExecutionError if several stages would keep running statistics of one module."""
    kept: dict[str, int] = {}
    for stage, module in enumerate(modules):
        for name, _ in module.named_buffers():
            whole = whole_name(name)
            if whole.endswith("running_mean") and kept.setdefault(whole, stage) != stage:
                raise ExecutionError(
                    f"{whole.rpartition('.')[0]} is called in stages {kept[whole]} and {stage}, "
                    "and each would keep its own running statistics; put both calls on one stage"
                )


def _ties(
    pipe: Pipe, numbers: Mapping[str, int], modules: Sequence[nn.Module]
) -> tuple[TieOf, ...]:
    """Find the parameters that stages share: those of one name, and those that torch reports.

    If a stage calls a module again, the second module gets the tensors of the first: torch.export
    lists it as another module, and torch's split may give it other parameters.
    """
    told = [
        sorted(
            (numbers[part], used)
            for part, name in shared.items()
            for used, own in modules[numbers[part]].named_parameters()
            if own is pipe.split_gm.get_parameter(f"{part}.{name}")
        )
        for shared in pipe.replicated_params
    ]
    for module in modules:
        first: dict[str, nn.Module] = {}
        for name, part in [*module.named_modules(remove_duplicate=False)]:
            own = first.setdefault(whole_name(name), part)
            part._parameters.update(own._parameters)
            part._buffers.update(own._buffers)
    same: dict[str, str] = {}
    for tie in told:
        for _, name in tie:
            same[whole_name(name)] = whole_name(tie[0][1])
    return ties_of(
        (stage, same.get(whole_name(name), whole_name(name)), name)
        for stage, module in enumerate(modules)
        for name, _ in module.named_parameters()
    )
