"""Quantized weights as data: schemes, codes and scales, packing, and the formats of KV caches."""
