"""`python -m moe_train VERB` and `torchrun -m moe_train VERB`: the same program as the console script."""

import sys

from moe_train.cli import main

sys.exit(main())
