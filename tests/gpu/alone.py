"""Run a function of a test module in a separate process."""

import os
import subprocess
import sys

import harness


def run_alone(function, *, timeout=60, **environment):
    """Return the printed text of a call that must succeed within about `timeout` seconds."""
    timeout *= harness.TIMES_SLOWER
    module, name = function.__module__, function.__name__
    environment = {
        **os.environ,
        # JAX must not preallocate: the current process has most of the GPUs' memory.
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
        **environment,
    }
    command = [sys.executable, "-P", "-c", f"import {module}; {module}.{name}()"]
    try:
        done = subprocess.run(
            command, env=environment, timeout=timeout, capture_output=True, text=True
        )
    except subprocess.TimeoutExpired as expired:
        output = [
            text.decode(errors="replace") for text in (expired.stdout, expired.stderr) if text
        ]
        raise AssertionError(f"{name} hung for {timeout} s:\n{''.join(output)[-3000:]}") from None
    assert done.returncode == 0, f"{name}:\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    return done.stdout
