"""From a target to a schedule: generator_of its generator, run it, and name the line at fault.

A target is a built-in or installed name, `path.py[:function]`, `module:function`, a callable, or a
`.sched` or `.csv` file. Built-in schedules are loaded exactly as a user's file is.
"""

from schedir.library.authoring import (
    Generator,
    GeneratorFunction,
    Parameter,
    Pipeline,
    equal_groups,
    mirrored,
    schedule,
    slots_in_groups,
    wave,
    wrapped,
)
from schedir.library.generate import Costs
from schedir.library.targets import (
    DEFAULT_MICROBATCHES,
    DEFAULT_RANKS,
    build,
    built_in,
    expect_fewer,
    generator_of,
    installed,
    is_list,
    load,
    name_of,
)
