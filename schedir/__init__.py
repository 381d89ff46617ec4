"""schedir: write, prove and run pipeline-parallel training schedules."""

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
    optim_step,
    recv_act,
    recv_grad,
    reduce_grad,
    send_act,
    send_grad,
    together,
)
from schedir.library import Generator, Pipeline, build, schedule
from schedir.passes import advance_receives, insert_communication
from schedir.simulator import CostModel, Timeline, simulate

__version__ = "0.1.0"

__all__ = [
    "CHANNELS",
    "Action",
    "CostModel",
    "Diagnostic",
    "ExecutionError",
    "Generator",
    "Kind",
    "LoadError",
    "ParseError",
    "Pipeline",
    "Placement",
    "Report",
    "SchedirError",
    "Schedule",
    "ScheduleError",
    "Source",
    "Timeline",
    "Together",
    "UnsoundError",
    "__version__",
    "advance_receives",
    "backward",
    "backward_input",
    "backward_weight",
    "build",
    "check",
    "dumps",
    "forward",
    "insert_communication",
    "loads",
    "optim_step",
    "recv_act",
    "recv_grad",
    "reduce_grad",
    "schedule",
    "send_act",
    "send_grad",
    "simulate",
    "together",
]
