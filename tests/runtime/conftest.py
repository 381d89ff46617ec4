"""What lets tests run on ranks, and on a device that is made up."""

from tests.runtime.far import far, far_meta  # noqa: F401
from tests.runtime.on_ranks import (  # noqa: F401
    pytest_collection_modifyitems,
    pytest_generate_tests,
    pytest_pyfunc_call,
    pytest_runtest_logreport,
    pytest_sessionfinish,
    rank,
)
