"""When does what run, and how much memory: Schedule × CostModel → Timeline."""

from schedir.simulator.beside import in_unit, median_step
from schedir.simulator.costs import CostModel, Sizes, Unit
    "forecast",
