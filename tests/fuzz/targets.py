"""Readers of what somebody else made, as fuzz targets: `run(data, directory)` puts the bytes of an input
where the reader finds them, below `directory`, and calls it.
"""

import base64
import contextlib
import io
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from compress.artifact.header import read_header
from compress.artifact.manifest import MANIFEST_NAME, Manifest
from compress.cli.inspect import as_text, describe
from compress.cli.output import emit
from compress.data.card import check_at_hand, documents, load_card
from compress.data.chat import load_chat_template
from compress.data.corpus import Document
from compress.data.tokenizer import load_tokenizer
from compress.data.tokens import load_token_set, tokenize
from compress.digest import digest_bytes
from compress.export import open_weights
from compress.models.arch import Arch
from compress.models.config_file import CONFIG_NAME, read_config
from compress.models.family import family_of
from compress.pipeline.steps import build_steps, estimates, lock_of
from compress.recipe import load_recipe
from compress.registry.image import EVIDENCE, IMAGE_MANIFEST, REF_NAME, SUBJECT
from compress.registry.model_source import ModelSource
from compress.registry.protocol import open_registry
from compress.registry.stored import list_tags, resolve
from compress.registry.transfer import pull, pull_evidence, verify
from compress.sign.bundle import parse_bundle
from compress.sign.key import KeyVerifier
from compress.sign.signature import check_made_by
from tests.fuzz import models
from tests.fuzz.documents import Form, Json, JsonLines, Safetensors, Template, Yaml

MESSAGES = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello\n"}]
TOKENIZER_CONFIG = "tokenizer_config.json"
PACKED = {b"\x1f\x8b": ".gz", b"\xfd7zXZ": ".xz", b"BZh": ".bz2", b"\x28\xb5\x2f\xfd": ".zst"}
"""First bytes of a packed file and the suffix by which the reader unpacks it."""
CARD = "kind: local\ntitle: t\nlicense: CC0-1.0\nsource: s\nformat: jsonl\npaths: [{name}]\n"
MAX_ROWS = 1000
"""Rows that are read of an input; a consumer stops when it has enough."""


@dataclass(frozen=True)
class Target:
    """A reader; `suffix` names the kind of its inputs."""

    name: str
    run: Callable[[bytes, Path], None]
    form: Form
    suffix: str


def header(data: bytes, directory: Path) -> None:
    """Read the header of a safetensors file."""
    path = directory / "model.safetensors"
    path.write_bytes(data)
    read_header(path)


def config(data: bytes, directory: Path) -> None:
    """Open a checkpoint with this `config.json` beside the weights of its format, and read a layer."""
    path = models.checkpoint(_kind_of(data), directory / "config")
    (path / CONFIG_NAME).write_bytes(data)
    raw = read_config(path)
    family_of(raw).read_config(raw)
    source = open_weights(path)
    source.outer()
    source.layer(0)


def _kind_of(data: bytes) -> str:
    """Return the model whose tensors fit a config best, by the words in it."""
    for name in models.FORMATS:
        if f'"{name}"'.encode() in data:
            return name
    return "qwen3" if b'"qwen3"' in data else "llama"


def manifest(data: bytes, directory: Path) -> None:
    """Parse a manifest and show it, as text and as JSON."""
    parsed = Manifest.from_bytes(data)
    with contextlib.redirect_stdout(io.TextIOWrapper(io.BytesIO(), encoding="utf-8")):
        document = describe(parsed, "target")
        text = as_text(parsed, "target", list_tensors=True)
        emit(document, text, as_json=True)
        emit(document, text, as_json=False)


def store(data: bytes, directory: Path) -> None:
    """Open an artifact of an earlier stage by this manifest, and read its first layer."""
    path = models.store(directory)
    (path / MANIFEST_NAME).write_bytes(data)
    source = open_weights(path)
    source.outer()
    source.layer(0)


def index(data: bytes, directory: Path) -> None:
    """List the tags of a registry with this `index.json`, and read what each of them points to."""
    place = models.registry(directory)
    url = f"layout://{place}"
    (place / "index.json").write_bytes(data)
    tags = list_tags(url)
    layout = open_registry(url)
    for tag in tags[:4]:
        layout.find(tag.manifest.digest)
        layout.attached(tag.manifest)
    resolve(f"{url}/{models.REF_NAME}:stable")
    verify(f"{url}/{models.REF_NAME}")


def image(data: bytes, directory: Path) -> None:
    """Pull and verify an artifact of this image manifest, or its evidence where it is a manifest of that."""
    place = models.registry(directory / "image")
    blob = place / "blobs" / "sha256" / digest_bytes(data).removeprefix("sha256:")
    known = blob.exists()
    blob.write_bytes(data)
    entry = {"mediaType": IMAGE_MANIFEST, "digest": digest_bytes(data), "size": len(data)}
    subject = models.subject(directory / "image")
    if EVIDENCE.encode() in data:
        entries = [{**subject, **_named("latest")}, {**entry, "annotations": {SUBJECT: subject["digest"]}}]
    else:
        entries = [{**entry, **_named("latest")}]
    (place / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": entries}))
    ref = f"layout://{place}/{models.REF_NAME}:latest"
    pulled = directory / "pulled"
    try:
        verify(ref)
        pull_evidence(ref, pulled) if EVIDENCE.encode() in data else pull(ref, pulled)
    finally:
        shutil.rmtree(pulled, ignore_errors=True)
        if not known:
            blob.unlink()


def _named(tag: str) -> dict[str, Any]:
    return {"annotations": {REF_NAME: f"{models.REF_NAME}:{tag}"}}


def recipe(data: bytes, directory: Path) -> None:
    """Check a recipe and plan it for a tiny model, as `compress plan` does."""
    path = directory / "recipe.yaml"
    path.write_bytes(data)
    loaded = load_recipe(path)
    steps = build_steps(loaded)
    lock_of(
        loaded, steps, ModelSource(models.checkpoint("llama", directory), "tiny", None, "sha256:" + "0" * 64)
    )
    estimates(steps, _planned_arch(), "cpu")


def _planned_arch() -> Arch:
    config = {
        **models.LLAMA,
        "max_position_embeddings": 8192,
        "intermediate_size": 512,
        "num_key_value_heads": 4,
    }
    config |= {"num_attention_heads": 4, "num_hidden_layers": 2}
    return family_of(config).read_config(config)


def card(data: bytes, directory: Path) -> None:
    """Load a data card and look whether its files are there."""
    path = directory / "card.yaml"
    path.write_bytes(data)
    (directory / "some.jsonl").touch()
    check_at_hand(load_card(str(path)), offline=True)


def rows(data: bytes, directory: Path) -> None:
    """Read the rows of a local data file, packed or not."""
    name = "rows.jsonl" + next((suffix for first, suffix in PACKED.items() if data.startswith(first)), "")
    (directory / name).write_bytes(data)
    path = directory / "rows.yaml"
    path.write_text(CARD.format(name=name))
    for _ in islice(documents(load_card(str(path))), MAX_ROWS):
        pass


def tokens(data: bytes, directory: Path) -> None:
    """Load a token set."""
    path = directory / "tokens.safetensors"
    path.write_bytes(data)
    load_token_set(path).digest()


def chat(data: bytes, directory: Path) -> None:
    """Load the chat template of a tokenizer and render a conversation."""
    path = directory / "chat"
    path.mkdir(exist_ok=True)
    (path / TOKENIZER_CONFIG).write_bytes(data)
    template = load_chat_template(path)
    if template is not None:
        template.render(MESSAGES)


def tokenizer(data: bytes, directory: Path) -> None:
    """Load a tokenizer and tokenize a text."""
    path = directory / "tokenizer"
    path.mkdir(exist_ok=True)
    (path / "tokenizer.json").write_bytes(data)
    loaded, _ = load_tokenizer(path)
    texts = [Document("a", "Hello, world " * 9)]
    tokenize(texts, loaded, num_samples=2, seq_len=4, seed=None, bos=None)


def bundle(data: bytes, directory: Path) -> None:
    """Read a signature whose statement is given as JSON under the key `statement`, and check who made it."""
    with contextlib.suppress(ValueError, RecursionError):  # no JSON is read as it is
        document = json.loads(data)
        if isinstance(document, dict) and isinstance(envelope := document.get("dsseEnvelope"), dict):
            statement = json.dumps(document.pop("statement", None), indent=2).encode()
            envelope["payload"] = base64.b64encode(statement).decode()
            data = json.dumps(document).encode()
    read = parse_bundle(data, "model.sig")
    check_made_by(read, KeyVerifier(models.public_key(directory)))


TARGETS = {
    target.name: target
    for target in (
        Target("header", header, Safetensors(), ".safetensors"),
        Target("config", config, Json(), ".json"),
        Target("manifest", manifest, Json(canonical=True), ".json"),
        Target("store", store, Json(canonical=True), ".json"),
        Target("index", index, Json(), ".json"),
        Target("image", image, Json(), ".json"),
        Target("recipe", recipe, Yaml(), ".yaml"),
        Target("card", card, Yaml(), ".yaml"),
        Target("rows", rows, JsonLines(), ".jsonl"),
        Target("tokens", tokens, Safetensors(), ".safetensors"),
        Target("chat", chat, Template(), ".json"),
        Target("tokenizer", tokenizer, Json(), ".json"),
        Target("bundle", bundle, Json(), ".json"),
    )
}
