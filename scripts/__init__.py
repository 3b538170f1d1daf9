"""Benchmarks and checks that a person runs: `python -m scripts.NAME --help`."""
