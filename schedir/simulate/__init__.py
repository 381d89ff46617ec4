"""When does what run, and how much memory: Schedule × CostModel → Timeline."""

from schedir.simulate.costs import CostModel
from schedir.simulate.timeline import RankStats, Span, Timeline, simulate

__all__ = ["CostModel", "RankStats", "Span", "Timeline", "simulate"]
