"""Compression methods: `quantize` and `prune` are two rooms, and a method is one file in one of them."""
