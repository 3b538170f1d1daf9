"""The operands of kernels: quantized rows, paged keys and values, block tables, e4m3 conversion."""
