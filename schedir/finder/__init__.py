"""Which schedule is best: the same work under the same costs, compared."""

from schedir.finder.comparing import compare
from schedir.finder.comparison import Comparison, Problem, Row
from schedir.finder.variants import SWEPT

__all__ = ["SWEPT", "Comparison", "Problem", "Row", "compare"]
