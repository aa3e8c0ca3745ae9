"""`python -m torch_moe_mps`."""

import sys

from .commands import main

sys.exit(main())
