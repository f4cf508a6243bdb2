"""Start the standard settings and the sweeps: ``python -m benchmarks``."""

from .standard import main

if __name__ == "__main__":
    raise SystemExit(main())
