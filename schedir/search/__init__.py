"""Which schedule is best: the same work under the same costs, compared."""

from schedir.search.comparing import compare
from schedir.search.comparison import Comparison, Problem, Row
from schedir.search.variants import SWEPT

__all__ = ["SWEPT", "Comparison", "Problem", "Row", "compare"]
