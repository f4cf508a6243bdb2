"""Import the workers' modules in the server process, which forks the workers. No JAX backend starts
here, so that each worker chooses its backend."""

import host_extension

host_extension.pretend()

from . import memory, programs  # noqa: E402, F401
