"""schedir: write, prove and run pipeline-parallel training schedules.

>>> import schedir
>>> schedule = schedir.build("1f1b", ranks=2, microbatches=2)
>>> schedir.check(schedule)
<Report clean under rank and every other channel model>
>>> schedir.simulate(schedule).makespan
9

`CHANNELS` names the channel models, the strictest first. `Placement` is the type of
`Schedule.placement`, which names the ranks of each stage:

>>> schedir.CHANNELS
('host', 'rank', 'pair', 'edge', 'direction', 'async')
>>> schedule.placement
((0,), (1,))
"""

from typing import TYPE_CHECKING

from schedir.checker import CHANNELS, Diagnostic, Report, check
from schedir.errors import (
    ExecutionError,
    LoadError,
    ParseError,
    SchedirError,
    ScheduleError,
    UnsoundError,
)
from schedir.ir import (
    Action,
    Kind,
    Placement,
    Schedule,
    Source,
    Together,
    backward,
    backward_input,
    backward_weight,
    dumps,
    forward,
    loads,
    offload_activation,
    optim_step,
    recompute_forward,
    recv_act,
    recv_grad,
    reduce_grad,
    reload_activation,
    reshard,
    send_act,
    send_grad,
    together,
    unshard,
)
from schedir.lazy import on_demand
from schedir.library import (
    Generator,
    Pipeline,
    build,
    equal_groups,
    mirrored,
    schedule,
    slots_in_groups,
    wave,
    wrapped,
)
from schedir.passes import (
    advance_receives,
    append_steps,
    batch_communication,
    insert_communication,
    offload,
    recompute,
    shard,
)

if TYPE_CHECKING:
    from schedir.diagnosis import Diagnosis
    from schedir.diagnosis.verdict import Position, diagnose
    from schedir.finder import Comparison, ReplicaPlan, compare, plan_replicas, search
    from schedir.finder.comparing import steady_state
    from schedir.library.blocks import repeat_block
    from schedir.library.from_torch import from_torch
    from schedir.passes.rerouting import without
    from schedir.simulator import Band, CostModel, Timeline, forecast, simulate
    from schedir.simulator.steady_state import SteadyState

__version__ = "0.1.0"

__all__ = [
    "CHANNELS",
    "Action",
    "Band",
    "Comparison",
    "CostModel",
    "Diagnosis",
    "Diagnostic",
    "ExecutionError",
    "Generator",
    "Kind",
    "LoadError",
    "ParseError",
    "Pipeline",
    "Placement",
    "Position",
    "ReplicaPlan",
    "Report",
    "SchedirError",
    "Schedule",
    "ScheduleError",
    "Source",
    "SteadyState",
    "Timeline",
    "Together",
    "UnsoundError",
    "__version__",
    "advance_receives",
    "append_steps",
    "backward",
    "backward_input",
    "backward_weight",
    "batch_communication",
    "build",
    "check",
    "compare",
    "diagnose",
    "dumps",
    "equal_groups",
    "forecast",
    "forward",
    "from_torch",
    "insert_communication",
    "loads",
    "mirrored",
    "offload",
    "offload_activation",
    "optim_step",
    "plan_replicas",
    "recompute",
    "recompute_forward",
    "recv_act",
    "recv_grad",
    "reduce_grad",
    "reload_activation",
    "repeat_block",
    "reshard",
    "schedule",
    "search",
    "send_act",
    "send_grad",
    "shard",
    "simulate",
    "slots_in_groups",
    "steady_state",
    "together",
    "unshard",
    "wave",
    "without",
    "wrapped",
]

_ON_DEMAND = {
    "schedir.diagnosis": ("Diagnosis",),
    "schedir.diagnosis.verdict": ("Position", "diagnose"),
    "schedir.finder": ("Comparison", "ReplicaPlan", "compare", "plan_replicas", "search"),
    "schedir.finder.comparing": ("steady_state",),
    "schedir.library.blocks": ("repeat_block",),
    "schedir.library.from_torch": ("from_torch",),
    "schedir.passes.rerouting": ("without",),
    "schedir.render": (),
    "schedir.simulator": ("Band", "CostModel", "Timeline", "forecast", "simulate"),
    "schedir.simulator.steady_state": ("SteadyState",),
}

if not TYPE_CHECKING:  # to which a misspelt name is an error
    __getattr__ = on_demand(__name__, _ON_DEMAND)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "finder", "render", "simulator"})
