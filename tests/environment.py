"""Change the environment temporarily while other threads read it."""

import contextlib
import os


@contextlib.contextmanager
def restored():
    """At the end of the context, restore only the environment variables that changed.

    ``mock.patch.dict(os.environ)`` rewrites all variables, and XLA (jax 0.12) crashes if a CPU
    program calls ``getenv`` at that time.
    """
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        for name, value in before.items():
            if os.environ.get(name) != value:
                os.environ[name] = value
