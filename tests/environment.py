"""Change the environment temporarily while other threads read it."""

import contextlib
import os


@contextlib.contextmanager
def restored():
    """Restore the environment variables that changed, and write no other variables.

    ``mock.patch.dict(os.environ)`` writes all variables. If a program still runs on CPUs, XLA (jax
    0.12) may call ``getenv`` at that moment, and crash.
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
