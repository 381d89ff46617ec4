"""The tests of schedir."""

import os

# Workers on all cores whose torch has a thread for each core wait for each other. torch reads this
# when it is imported, which is later.
os.environ.setdefault("OMP_NUM_THREADS", "1")
