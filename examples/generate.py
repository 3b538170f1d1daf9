"""Generate text: a batch, a stream, with prompt lookup, and how likely the model finds a text.

Run it anywhere: `python examples/generate.py [MODEL]`, where MODEL is a directory, `hf://...` or a registry
reference.
"""

import sys

import compress

model = sys.argv[1] if len(sys.argv) > 1 else "builtin://reference"
llm = compress.load(
    model, speculative="ngram"
)  # proposes tokens found earlier in the text; the text stays the same

params = compress.SamplingParams(max_tokens=32, stop=("\n\n",))
for output in llm.generate(["def add(a, b):", "import os\n\nclass "], params):
    print(repr(output.text), output.finish_reason, f"{output.tokens_per_s:.0f} tokens/s")

drawn = compress.SamplingParams(max_tokens=32, temperature=0.8, top_p=0.95, seed=1)
stream = llm.stream("def main():\n", drawn)
for piece in stream:
    print(piece, end="", flush=True)
print(f"\nfirst token after {stream.output.timing.ttft_ms:.0f} ms")

if llm.chat_template is not None:  # the bundled model has none: it continues text
    print(llm.generate([{"role": "user", "content": "What is a linear group?"}])[0].text)

for score in llm.score(["for i in range(10):", "for i range in (10):"]):
    print(f"{score.text!r}: perplexity {score.perplexity:.1f}")
