"""`python -m schedir`: the command line."""

import sys

from schedir.cli import main

sys.exit(main())
