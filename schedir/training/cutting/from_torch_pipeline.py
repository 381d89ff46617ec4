"""Make a schedule's stages from a model that `torch.distributed.pipelining.pipeline` has cut.

torch's stages take values of several earlier stages, and inputs of the whole model: a skip
connection, a mask. The executor's stages take only what the stage before returns. So each stage's
graph is rewritten: values that later stages need enter it, and leave it beside its own output.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import fx, nn

from schedir.errors import ExecutionError
from schedir.ir import Schedule
from schedir.runtime.arguments import whole_name
from schedir.training.cutting.cuts import cut
from schedir.training.cutting.stages import Holding, Part, Stages, Uncut

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
    graphs: list[Any] = [pipe.split_gm.get_submodule(str(call.target)) for call in calls]
    entering = _entering(pipe.split_gm.graph, calls)
    modules = list(map(_module, graphs, calls, entering, entering[1:]))
    known_as = _known_as(pipe, {str(call.target): at for at, call in enumerate(calls)}, modules)
    parts = []
    for graph, module in zip(graphs, modules, strict=True):
        layers = [str(node.target) for node in graph.graph.nodes if node.op == "call_module"]
        means = [each for each in module.named_buffers() if each[0].endswith("running_mean")]
        holdings, statistics = (
            tuple(
                Holding(known_as.get(whole, whole), name, tuple(tensor.shape))
                for name, tensor in named
                for whole in [whole_name(name)]
            )
            for named in (module.named_parameters(), means)
        )
        parts.append(Part("", dict.fromkeys(layers, ""), holdings, {}, statistics))
    model = Uncut(parts, lambda spans, stages: ((stage, modules[stage]) for stage in stages))
    return cut(model, schedule, None, None, range(1, len(parts)), rank)


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
    part: Any, call: fx.Node, before: Sequence[fx.Node], after: Sequence[fx.Node]
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


def _known_as(
    pipe: Pipe, numbers: Mapping[str, int], modules: Sequence[nn.Module]
) -> dict[str, str]:
    """The name that stands for all names of a parameter, by name; torch reports the shared ones.

    If a stage calls a module again, the second module gets the tensors of the first: torch.export
    lists it as another module, and torch's split may give it other parameters.
    """
    found: dict[str, str] = {}
    for shared in pipe.replicated_params:
        first, *others = sorted(
            (numbers[part], used)
            for part, name in shared.items()
            for used, own in modules[numbers[part]].named_parameters()
            if own is pipe.split_gm.get_parameter(f"{part}.{name}")
        )
        found |= {whole_name(name): whole_name(first[1]) for _, name in others}
    for module in modules:
        made: dict[str, nn.Module] = {}
        for name, part in [*module.named_modules(remove_duplicate=False)]:
            own = made.setdefault(whole_name(name), part)
            part._parameters.update(own._parameters)
            part._buffers.update(own._buffers)
    return found
