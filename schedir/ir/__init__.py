"""What a schedule is: typed actions, one list per rank, and their text form."""

from schedir.ir.actions import (
    BACKWARDS,
    COMMUNICATION,
    COMPLETES_GRADIENTS,
    COMPUTE,
    READS_WEIGHTS,
    RECEIVES,
    SENDS,
    Action,
    Kind,
    backward,
    backward_input,
    backward_weight,
    forward,
    is_number,
    optim_step,
    recv_act,
    recv_grad,
    reduce_grad,
    send_act,
    send_grad,
)
from schedir.ir.activations import peak_activations
from schedir.ir.channels import CHANNELS, expect_channel, queues
from schedir.ir.clock import TEXTBOOK, Exchanges, Time, Times, run
from schedir.ir.collectives import collective_turns, reduces_by_stage, sums_of_steps
from schedir.ir.columns import KIND_INDEX, KINDS, Bools, Columns, Ints, columns_of
from schedir.ir.dataflow import Dataflow, Transfers, first_places
from schedir.ir.plan import Plan, plan
from schedir.ir.schedule import (
    Placement,
    Schedule,
    Source,
    Sources,
    expect_schedule,
    stages_by_rank,
    starts_of,
)
from schedir.ir.text import dumps, loads
from schedir.ir.ties import Ties, tied_steps, ties_of
from schedir.ir.tokens import decode, parse_action
from schedir.ir.torch_csv import dumps_torch_csv, loads_torch_csv
from schedir.ir.versions import StageVersions, weight_versions

__all__ = [
    "BACKWARDS",
    "CHANNELS",
    "COMMUNICATION",
    "COMPLETES_GRADIENTS",
    "COMPUTE",
    "KINDS",
    "KIND_INDEX",
    "READS_WEIGHTS",
    "RECEIVES",
    "SENDS",
    "TEXTBOOK",
    "Action",
    "Bools",
    "Columns",
    "Dataflow",
    "Exchanges",
    "Ints",
    "Kind",
    "Placement",
    "Plan",
    "Schedule",
    "Source",
    "Sources",
    "StageVersions",
    "Ties",
    "Time",
    "Times",
    "Transfers",
    "backward",
    "backward_input",
    "backward_weight",
    "collective_turns",
    "columns_of",
    "decode",
    "dumps",
    "dumps_torch_csv",
    "expect_channel",
    "expect_schedule",
    "first_places",
    "forward",
    "is_number",
    "loads",
    "loads_torch_csv",
    "optim_step",
    "parse_action",
    "peak_activations",
    "plan",
    "queues",
    "recv_act",
    "recv_grad",
    "reduce_grad",
    "reduces_by_stage",
    "run",
    "send_act",
    "send_grad",
    "stages_by_rank",
    "starts_of",
    "sums_of_steps",
    "tied_steps",
    "ties_of",
    "weight_versions",
]
