"""Tiny things of the project's own making that lie around an input: checkpoints in every format, the artifact
of one of them with its evidence, and a registry that holds both. Each is made once a process.
"""

from functools import cache
from pathlib import Path
from typing import Any

import torch
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, derive_private_key
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from torch import Tensor

from compress.artifact.manifest import Artifact, open_artifact
from compress.artifact.workspace import Workspace
from compress.artifact.writer import ArtifactWriter
from compress.export.format_writer import write_format
from compress.models.arch import Arch
from compress.models.canonical import OUTER_NAME, layer_name, save_weights
from compress.models.checkpoint_writer import write_checkpoint
from compress.models.family import family_of
from compress.models.initialise import fresh_decoder
from compress.models.weights import MemorySource
from compress.quant.model_scheme import ModelScheme
from compress.quant.numerics import nearest_weight
from compress.quant.scheme import SCHEMES, QuantizedWeight
from compress.registry.protocol import open_registry
from compress.registry.stored import list_tags
from compress.registry.transfer import push

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "eos_token_id": [2, 3],
    "dtype": "bfloat16",
}
QWEN3: dict[str, Any] = {
    **{key: value for key, value in LLAMA.items() if key != "rope_parameters"},
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_act": "silu",
    "use_sliding_window": True,
    "sliding_window": 16,
    "layer_types": ["full_attention", "sliding_attention"],
    "rope_theta": 10000.0,
    "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    "attention_bias": True,
    "tie_word_embeddings": False,
}
DENSE: dict[str, dict[str, Any]] = {"llama": LLAMA, "qwen3": QWEN3}
FORMATS = {
    "compressed-tensors": "W4A16_G128_ASYM",
    "gptq": "W4A16_G128",
    "awq": "W4A16_G128_ASYM",
    "fp8": "FP8_BLOCK",
    "modelopt": "NVFP4",
    "onnx": "W4A16_G64_ASYM",
}
"""The scheme in which a model of each export format is written."""
REF_NAME = "model"


class Coded:
    """A source whose linears are quantized to the nearest codes."""

    kv_format: str | None = None

    def __init__(self, source: MemorySource, scheme: str) -> None:
        self._source = source
        self._scheme = SCHEMES[scheme]

    @property
    def arch(self) -> Arch:
        return self._source.arch

    def outer(self) -> dict[str, Tensor | QuantizedWeight]:
        return self._source.outer()

    def layer(self, layer_idx: int) -> dict[str, Tensor | QuantizedWeight]:
        return {
            name: nearest_weight(value, self._scheme, torch.float16)
            if isinstance(value, Tensor) and value.dim() == 2
            else value
            for name, value in self._source.layer(layer_idx).items()
        }


def _source(config: dict[str, Any]) -> MemorySource:
    decoder = fresh_decoder(family_of(config).read_config(config), generator=torch.Generator().manual_seed(0))
    return MemorySource(decoder, dtype=torch.bfloat16)


@cache
def checkpoint(name: str, root: Path) -> Path:
    """Return the directory of a checkpoint below `root`: a family of `DENSE` or a format of `FORMATS`."""
    path = root / "checkpoints" / name
    path.mkdir(parents=True)
    if name in DENSE:
        write_checkpoint(path, _source(DENSE[name]))
    else:
        write_format(name, path, Coded(_source(LLAMA), FORMATS[name]), ModelScheme(SCHEMES[FORMATS[name]]))
    return path


@cache
def artifact(root: Path) -> Artifact:
    """Return an artifact with weights, facts of layers and a scheme, as stages describe theirs."""
    source = checkpoint("compressed-tensors", root)

    def build(writer: ArtifactWriter) -> None:
        for file in source.iterdir():
            (writer.path / file.name).write_bytes(file.read_bytes())
        (writer.path / "draft").mkdir()
        (writer.path / "draft" / "note.txt").write_text("a note\n")
        scheme = ModelScheme(SCHEMES["W4A16_G128_ASYM"], exceptions=(("layers.0.attn.q", None),))
        arch, layers = _source(LLAMA).arch.to_json()
        writer.describe(
            role="checkpoint",
            arch=arch,
            layers=layers,
            scheme=scheme.to_json(),
            facts={"format": "compressed-tensors", "mixed": {"budget": 4.5, "chosen": {"W8A16": 1}}},
        )

    key = Workspace.key("export", 1, {}, {}, 0)
    made = Workspace(root / "workspace").commit(key, "export", {"weights": "sha256:" + "0" * 64}, build)
    return open_artifact(made.path)


@cache
def store(root: Path) -> Path:
    """Return the directory of an artifact with the project's own store of quantized weights."""

    def build(writer: ArtifactWriter) -> None:
        source = Coded(_source(LLAMA), "W4A16_G128_ASYM")
        save_weights(writer.path / OUTER_NAME, source.outer())
        save_weights(writer.path / layer_name(0), source.layer(0))
        arch, layers = source.arch.to_json()
        scheme = ModelScheme(SCHEMES["W4A16_G128_ASYM"]).to_json()
        writer.describe(role="quantized", arch=arch, layers=layers, scheme=scheme, facts={"method": "rtn"})

    key = Workspace.key("quantize", 1, {}, {}, 0)
    return Workspace(root / "workspace").commit(key, "quantize", {}, build).path


@cache
def registry(root: Path) -> Path:
    """Return the directory of a registry with `model:latest`, `model:stable` and evidence."""
    evidence = root / "evidence"
    evidence.mkdir(parents=True)
    (evidence / "report.json").write_text('{"kl": 0.1}\n')
    place = root / "registry"
    url = open_registry(f"layout://{place}")
    push(url, artifact(root), name=REF_NAME, aliases=["stable"], evidence=evidence)
    _subject(root)
    return place


def subject(root: Path) -> dict[str, Any]:
    """Return the descriptor of the artifact in that registry."""
    registry(root)
    return _subject(root)


@cache
def _subject(root: Path) -> dict[str, Any]:
    return list_tags(f"layout://{root / 'registry'}")[0].manifest.to_json()


def private_key(root: Path) -> Path:
    """Return the file of a key that everybody knows."""
    path = root / "key.pem"
    if not path.exists():
        plain = (Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        path.write_bytes(derive_private_key(7, SECP256R1()).private_bytes(*plain))
    return path


def public_key(root: Path) -> Path:
    """Return the file of its public half."""
    path = root / "key.pub"
    if not path.exists():
        key = derive_private_key(7, SECP256R1()).public_key()
        path.write_bytes(key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    return path
