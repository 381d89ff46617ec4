"""When does what run, and how much memory: Schedule × CostModel → Timeline."""

from schedir.simulator.costs import CostModel, Sizes, Unit
from schedir.simulator.run import simulate
from schedir.simulator.timeline import Measured, RankStats, Span, Timeline

__all__ = ["CostModel", "Measured", "RankStats", "Sizes", "Span", "Timeline", "Unit", "simulate"]
