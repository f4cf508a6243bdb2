"""Modules of the workers: imported once, in the process from which they are forked. No backend of
JAX starts here, so that each worker chooses its own."""

import host_extension

host_extension.pretend()

from . import memory, programs  # noqa: E402, F401
