"""Which schedule is best: compare schedules of the same work under the same costs, or find one."""

from schedir.finder.comparing import SWEPT, Comparison, Problem, Row, compare
from schedir.finder.optimum import EXACT_SECONDS, exact, exactly
from schedir.finder.planning import ReplicaPlan, plan_replicas, stage_costs
from schedir.finder.searching import Found, find, search
from schedir.finder.terms import DEFAULT_SECONDS, OBJECTIVES, PLACEMENT_NAMES

__all__ = [
    "DEFAULT_SECONDS",
    "EXACT_SECONDS",
    "OBJECTIVES",
    "PLACEMENT_NAMES",
    "SWEPT",
    "Comparison",
    "Found",
    "Problem",
    "ReplicaPlan",
    "Row",
    "compare",
    "exact",
    "exactly",
    "find",
    "plan_replicas",
    "search",
    "stage_costs",
]
