"""The seed of tests that draw their cases. It is fixed, so that a change passes or fails by itself; `make soak` draws
another, and `TEST_SEED` repeats one.
"""

import os

SEED = int(os.environ.get("TEST_SEED", 20261122))
