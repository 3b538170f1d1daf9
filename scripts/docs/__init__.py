"""The pages and pictures of the documentation that a program writes: `python -m scripts.docs`, or `--check` to compare only."""
