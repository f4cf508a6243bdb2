"""Run the doctor: ``python -m jax_moe_a2a``."""

import sys

from .doctor import main

sys.exit(main())
