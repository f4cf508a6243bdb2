"""Change the environment temporarily while other threads read it."""

import contextlib
import os


@contextlib.contextmanager
def restored():
    """Restore the variables of the environment that changed, and write no others.

    ``mock.patch.dict(os.environ)`` writes all of them, while the last program may still run. XLA on
    CPUs (jax 0.12) calls ``getenv`` when it runs a fusion for the first time, and crashes.
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
