"""What a schedule is: typed actions, one list per rank, and their text form."""

from schedir.ir.action import (
    Action,
    Entry,
    Together,
    backward,
    backward_input,
    backward_weight,
    flat,
    forward,
    is_number,
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
from schedir.ir.channels import (
    CHANNELS,
    CHANNELS_IN_WORDS,
    DEFAULT_CHANNEL,
    TRANSPORTS,
    channel_model,
    enforces,
)
from schedir.ir.columns import KIND_INDEX, KINDS, Bools, Columns, Ints, columns_of
from schedir.ir.kinds import (
    BACKWARDS,
    CARRIES_GRADIENTS,
    COMMUNICATION,
    COMPLETES_GRADIENTS,
    COMPUTE,
    CONSUMES,
    COPIES,
    COUNTERPARTS,
    GATHERS,
    GROUPS,
    HOMES,
    NAMES_VERSION,
    READS_WEIGHTS,
    RECEIVES,
    RELEASES,
    SENDS,
    STEPS,
    SUMS,
    VALUES,
    Kind,
)
from schedir.ir.schedule import (
    Placed,
    Placement,
    Schedule,
    Source,
    Sources,
    Ties,
    expect_schedule,
    starts_of,
    tied_steps,
    ties_of,
)
from schedir.ir.text import dumps, loads
from schedir.ir.tokens import decode, parse_action, printable
from schedir.ir.torch_csv import dumps_torch_csv, loads_torch_csv
