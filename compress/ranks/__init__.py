"""Several processes as the ranks of one job (`group.py`), and the form in which they exchange values."""
