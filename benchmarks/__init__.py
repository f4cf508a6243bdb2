"""Benchmarks of this package: ``python -m benchmarks`` times dispatch and combine."""
