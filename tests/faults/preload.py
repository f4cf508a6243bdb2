"""Import the modules of the workers once, in the process that forks the workers. This module starts
no JAX backend, so that each worker chooses its backend."""

import host_extension

host_extension.pretend()

from . import memory, programs  # noqa: E402, F401
