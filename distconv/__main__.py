"""``python -m distconv``: the same as the command ``distconv``."""

import sys

from distconv.cli import main

sys.exit(main())
