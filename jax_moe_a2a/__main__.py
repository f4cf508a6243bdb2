"""Run the doctor: ``python -m jax_moe_a2a``."""

import sys

from ._doctor import main

if __name__ == "__main__":
    sys.exit(main())
