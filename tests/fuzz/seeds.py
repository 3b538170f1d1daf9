"""Writes the corpus: small inputs of the project's own making that mutations start from.

python -m tests.fuzz.seeds
"""

import base64
import bz2
import gzip
import json
import lzma
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers import models as tokenizer_models

from compress.artifact.manifest import MANIFEST_NAME
from compress.artifact.tensors import save_tensors
from compress.data.tokens import TokenSet, save_token_set
from compress.models.config_file import CONFIG_NAME
from compress.registry.protocol import open_registry
from compress.registry.stored import list_tags
from compress.sign.key import KeySigner
from compress.sign.signature import make_bundle
from tests.fuzz import models
from tests.fuzz.targets import TARGETS

CORPUS = Path(__file__).parent / "corpus"
RECIPES = {
    "small": """version: 1
model: builtin://reference
stages:
  - {kind: calibrate, num_samples: 8, seq_len: 32}
  - {kind: quantize, scheme: W4A16_G128, smooth: {kind: awq, num_ratios: 4}}
  - kind: export
push:
  to: layout://registry
  name: model
  aliases: [stable, "v1"]
""",
    "full": """version: 1
model: builtin://reference
seed: 7
stages:
  - kind: calibrate
    data: builtin://python
    num_samples: 8
    seq_len: 64
  - kind: prune
    heads: {keep: 0.5}
    ffn: {keep: 0.5}
  - kind: distill
    tokens: 4096
    seq_len: 64
    batch_size: 4
    optimizer: muon
    lr: 2e-4
    eval_samples: 8
  - kind: quantize
    scheme: W4A16_G64
    smooth: {kind: awq}
    round: {kind: gptq}
    kv_cache: fp8
  - kind: draft
    init: {keep_layers: 1}
    tokens: 4096
    seq_len: 64
    batch_size: 2
    quantize: {scheme: W4A16_G64, preset: fast}
    eval_samples: 8
  - kind: export
    formats: compressed-tensors
  - kind: validate
    against: source
    data: builtin://python-eval
    num_samples: 4
    seq_len: 64
    latency: {batch_sizes: [1, 2], prompt_tokens: 8, output_tokens: 4, repeats: 2, warmups: 0}
    speculative: {output_tokens: 24}
    gates:
      ppl_ratio: 1.35
      acceptance_length: 1.3
""",
    "fp8": """# a comment
version: 1
model: hf://org/name@main
stages:
- kind: quantize
  scheme: FP8_DYNAMIC
- kind: export
- kind: validate
  seq_len: 64
  gates:
    ppl_ratio: 2.0
""",
}
CARDS = {
    "local": """kind: local
title: Rows
license: CC0-1.0
source: made up
format: jsonl
paths: ["*.jsonl", some.jsonl]
text_field: text
where: {lang: en}
part: all
limit: 10
""",
    "builtin": """kind: builtin
name: python
part: evaluation
category: prose
title: "Python"
license: PSF-2.0
source: https://www.python.org
""",
    "hub": """kind: huggingface
dataset: org/name
config: default
split: train
revision: a123456789012345678901234567890123456789
title: A dataset
license: MIT
source: the hub
language: de
packing: first_tokens
""",
}
ROWS: list[dict[str, Any]] = [
    {"id": "a", "text": "One.\n", "lang": "en"},
    {"id": 2, "text": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]},
    {"text": "Drei \u00fc"},
]
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'system' %}<<{{ message['content'] | trim }}>>"
    "{% else %}{{ message.role }}: {{ message['content'] }}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)


def inputs() -> Iterator[tuple[str, str, bytes]]:
    """Yield the target, the name and the bytes of every input of the corpus."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        for kind in (*models.DENSE, *models.FORMATS):
            yield "config", kind, (models.checkpoint(kind, root) / CONFIG_NAME).read_bytes()
        yield "header", "tensors", _tensors(root)
        yield "header", "empty", (8 * b"\0").replace(b"\0", b"\x02", 1) + b"{}"
        yield "tokens", "tokens", _token_set(root)
        yield "manifest", "checkpoint", models.artifact(root).manifest.to_bytes()
        yield "manifest", "quantized", (models.store(root) / MANIFEST_NAME).read_bytes()
        yield "store", "quantized", (models.store(root) / MANIFEST_NAME).read_bytes()
        place = models.registry(root)
        yield "index", "index", (place / "index.json").read_bytes()
        url = f"layout://{place}"
        subject = list_tags(url)[0].manifest
        for kind, descriptor in (
            ("artifact", subject),
            ("evidence", open_registry(url).attached(subject)[0]),
        ):
            with open_registry(url).get(descriptor) as stream:
                yield "image", kind, stream.read()
    for target, texts in (("recipe", RECIPES), ("card", CARDS)):
        for kind, text in texts.items():
            yield target, kind, text.encode()
    plain = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS).encode()
    yield "rows", "plain", plain
    yield "rows", "gz", gzip.compress(plain, mtime=0)
    yield "rows", "xz", lzma.compress(plain)
    yield "rows", "bz2", bz2.compress(plain)
    yield "rows", "zst", pyarrow.compress(plain, codec="zstd", asbytes=True)
    special = {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}, "add_bos_token": True}
    yield "chat", "one", json.dumps({**special, "chat_template": TEMPLATE}).encode()
    named = [{"name": "default", "template": TEMPLATE}, {"name": "tools", "template": "{{ tools }}"}]
    yield "chat", "named", json.dumps({**special, "chat_template": named}).encode()
    yield "tokenizer", "bytes", _tokenizer().encode()
    yield "bundle", "key", _bundle()


def _bundle() -> bytes:
    """Return a signature by the key of models.py, with its statement as JSON in the place of base64."""
    with tempfile.TemporaryDirectory() as scratch:
        signer = KeySigner(models.private_key(Path(scratch)))
        document = json.loads(make_bundle({"a/b.txt": "sha256:" + "1" * 64}, "model", signer).data)
    payload = document["dsseEnvelope"].pop("payload")
    return json.dumps({**document, "statement": json.loads(base64.b64decode(payload))}, indent=1).encode()


def _tensors(root: Path) -> bytes:
    path = root / "tensors.safetensors"
    save_tensors(
        path, {"a": torch.zeros(2, 3), "b.weight": torch.ones(4, dtype=torch.bfloat16), "c": torch.tensor(1)}
    )
    return path.read_bytes()


def _token_set(root: Path) -> bytes:
    path = root / "tokens.safetensors"
    source = {"title": "t", "text_digest": "sha256:" + "0" * 64, "packing": "concatenate", "seed": 1}
    save_token_set(TokenSet(torch.arange(12, dtype=torch.int32).view(3, 4), 48, 45, source), path)
    return path.read_bytes()


def _tokenizer() -> str:
    vocabulary = {
        char: idx
        for idx, char in enumerate(["<unk>", "H", "e", "l", "o", ",", "w", "r", "d", "\u0120", "ll"])
    }
    tokenizer = Tokenizer(tokenizer_models.BPE(vocab=vocabulary, merges=[("l", "l")], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<unk>"])
    return tokenizer.to_str()


def main() -> None:
    """Write every input of the corpus."""
    for target, name, data in inputs():
        path = CORPUS / target / (name + TARGETS[target].suffix)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


if __name__ == "__main__":
    main()
