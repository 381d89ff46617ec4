"""When does what run, and how much memory: Schedule × CostModel → Timeline."""

from schedir.simulator.beside import UNITS, factor, in_unit, median_step
from schedir.simulator.costs import CostModel
from schedir.simulator.forecasting import Band, forecast
from schedir.simulator.idle import CAUSES, Cause, Idle, IdleColumns
from schedir.simulator.recut import recut
from schedir.simulator.simulation import simulate
from schedir.simulator.timeline import (
    RankStats,
    Span,
    Timeline,
    load_timelines,
    save_timelines,
)
from schedir.simulator.times import Measured
from schedir.simulator.unmeasured import how_derived, unmeasured
from schedir.simulator.values import Sizes, Unit

__all__ = [
    "CAUSES",
    "UNITS",
    "Band",
    "Cause",
    "CostModel",
    "Idle",
    "IdleColumns",
    "Measured",
    "RankStats",
    "Sizes",
    "Span",
    "Timeline",
    "Unit",
    "factor",
    "forecast",
    "how_derived",
    "in_unit",
    "load_timelines",
    "median_step",
    "recut",
    "save_timelines",
    "simulate",
    "unmeasured",
]
