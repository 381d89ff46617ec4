"""What lets tests run on a device that is made up."""

from tests.runtime.far import far, far_meta  # noqa: F401
