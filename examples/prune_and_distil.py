"""Take two of a model's eight layers away, let the source teach the rest, then quantize: one recipe.

Run it anywhere: `python examples/prune_and_distil.py`. So little training only shows how; recovery takes
millions of tokens.
"""

import compress

recipe = {
    "version": 1,
    "model": "builtin://reference",
    "stages": [
        {"kind": "calibrate", "num_samples": 8, "seq_len": 64},
        {"kind": "prune", "depth": {"keep": 6}},  # and heads: {"keep": 0.75}, ffn: {"keep": 0.75}
        {"kind": "distill", "tokens": 2048, "seq_len": 64, "batch_size": 4, "lr": 1e-4, "eval_samples": 8},
        {"kind": "quantize", "scheme": "W8A16", "round": {"kind": "rtn"}},
        {"kind": "export"},
    ],
}
result = compress.run(recipe)
print(result.status, result.path)

curve = result.facts["distill"]["distillation"]["curve"]  # on text that was held out
print("KL to the source:", " -> ".join(f"{point['kl']:.3f}" for point in curve if "kl" in point))
print(compress.load(result.path).generate("def add(a, b):", compress.SamplingParams(max_tokens=16))[0].text)
