"""Dispatch and combine timed on this machine's GPUs: ``python -m benchmarks``."""
