"""When each action runs, and how much memory it takes: Schedule × CostModel → Timeline."""

from schedir.simulator.costs import CostModel, how_derived, recut, unmeasured
from schedir.simulator.forecasting import Band, forecast
from schedir.simulator.idle import CAUSES, Cause, Idle, IdleColumns
from schedir.simulator.simulation import simulate
from schedir.simulator.timeline import (
    RankStats,
    Span,
    Timeline,
    in_unit,
    load_timelines,
    median_step,
    save_timelines,
)
from schedir.simulator.values import UNITS, Measured, Sizes, Unit, factor

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
