"""When does what run, and how much memory: Schedule × CostModel → Timeline."""

from schedir.simulator.costs import CostModel
from schedir.simulator.run import simulate
from schedir.simulator.timeline import RankStats, Span, Timeline

__all__ = ["CostModel", "RankStats", "Span", "Timeline", "simulate"]
