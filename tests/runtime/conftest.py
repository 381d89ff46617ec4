"""What lets tests run on ranks."""

from tests.runtime.on_ranks import (  # noqa: F401
    pytest_collection_modifyitems,
    pytest_generate_tests,
    pytest_pyfunc_call,
    pytest_runtest_logreport,
    pytest_sessionfinish,
    rank,
)
