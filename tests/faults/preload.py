"""Import the modules of the workers in their server process, without starting a JAX backend."""

import host_extension

host_extension.pretend()

from . import memory, programs  # noqa: E402, F401
