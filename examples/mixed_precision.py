"""Give each linear group the scheme that costs least accuracy within a budget of bytes.

Run it anywhere: `python examples/mixed_precision.py`.
"""

import compress

result = compress.quantize(
    "builtin://reference",
    scheme={
        "kind": "mixed",
        "schemes": ["W8A16", "W4A16_G128"],  # "dense" may be among them
        "budget": {"size_ratio": 0.4},  # of the linears in 16 bits; latency_ratio is a budget of time
        "num_samples": 2,  # samples that sensitivities are measured on; 32 by default
    },
    round={"kind": "rtn"},  # left out: GPTQ
    num_samples=2,
    seq_len=64,
)
scheme = result.artifact.manifest.scheme
assert scheme is not None
print(f"{result.path}: {result.size_bytes / 1e6:.1f} MB, most linears {scheme['name']}")
for exception in scheme.get("exceptions", []):
    print(exception["scheme"]["name"], *exception["linears"])
