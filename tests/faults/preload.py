"""Modules of the workers: imported once, in the process from which they are forked. No backend of
JAX starts here, so that each worker chooses its own."""

import os

import host_extension

if os.environ.get("MOE_A2A_TEST_GPU") != "1":
    host_extension.pretend()

from . import memory, programs  # noqa: E402, F401
