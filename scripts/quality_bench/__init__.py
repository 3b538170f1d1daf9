"""The parts of `bench_quality.py`: methods and schemes, runs of this project and of other tools, and the
table."""
