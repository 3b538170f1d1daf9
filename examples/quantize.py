"""Quantize a model to 4 bits, load the artifact, and compare its perplexity with the source's.

Run it anywhere: `python examples/quantize.py`. The bundled model and its calibration text need no download.
"""

import compress

MODEL = "builtin://reference"  # or "./model", or "hf://org/name@revision"
TEXT = "def area(width, height):\n    return width * height\n"

result = compress.quantize(
    MODEL,
    scheme="W4A16_G128",  # 4-bit weights, one scale for 128 of them
    preset="fast",  # "balanced" and "best" take longer and lose less; left out: GPTQ
    num_samples=8,  # calibration windows; 128 of 2,048 tokens for a real model
    seq_len=128,
    out="reference-w4",
)
print(f"{result.path}: {result.size_bytes / 1e6:.1f} MB, {result.digest}")

for name in (MODEL, result.path):
    llm = compress.load(name)
    print(f"{name}: perplexity {llm.score(TEXT)[0].perplexity:.2f}")
