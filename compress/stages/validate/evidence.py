"""Facts of the report that are read, not measured: the artifact's manifest, its bytes, the data it was made
with.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from compress.artifact.header import read_header
from compress.artifact.manifest import MANIFEST_NAME, open_artifact
from compress.data.card import TEXT, shape_of
from compress.data.corpus import Document
from compress.data.model_tokens import TOKENS_NAME
from compress.data.overlap import overlap
from compress.data.tokenizer import decode, load_tokenizer
from compress.data.tokens import TokenSet, load_token_set
from compress.errors import StorageError
from compress.kernels.operands.paged import DENSE_FORMATS
from compress.models.recurrences import PREFIXES
from compress.quant.model_scheme import ModelScheme
from compress.quant.scheme import name_of
from compress.runtime.engine import Engine
from compress.stages import Input, Inputs, Port
from compress.stages.validate.candidate import CandidateFacts
from compress.untrusted.files import check_within, read_text
from compress.validate.display import ranges

MODEL_CARD = "README.md"
MAX_CARD_BYTES = 1 << 20
_MIXERS = ("attn", *(f".{prefix}" for prefix in PREFIXES))
"""Parts of the names of weights of attention, or of what is in its place."""


def served_cache(stated: Mapping[str, Any], engine: Engine) -> dict[str, Any] | None:
    """Return facts of the candidate's KV cache if it is quantized; those stated by its manifest if that
    format was served.
    """
    if engine.kv_format in DENSE_FORMATS.values():
        return None
    return {**(stated if stated.get("format") == engine.kv_format else {}), "format": engine.kv_format}


def quantization(inputs: Inputs) -> Mapping[str, Any]:
    """Return the facts of the quantize stage; none if the recipe has no such stage."""
    quantized = inputs.ports.get(Port.QUANTIZED)
    return {} if quantized is None else open_artifact(quantized.path).manifest.facts


def dense_facts(inputs: Inputs) -> dict[str, Any]:
    """Return facts of how the dense weights had been pruned (`pruning`) and trained (`distillation`)."""
    dense = inputs.ports.get(Port.DENSE)
    if dense is None or not (dense.path / MANIFEST_NAME).exists():
        return {}
    facts = open_artifact(dense.path).manifest.facts
    return {key: facts[key] for key in ("pruning", "distillation") if key in facts}


def layer_rows(inputs: Inputs, scheme: ModelScheme | None) -> list[dict[str, Any]]:
    """Return the quantization's row of every linear, with its scheme where linears differ in it; none where
    rounding read no activation."""
    rows = quantization(inputs).get("layers", [])
    if scheme is None or not scheme.exceptions:
        return rows
    return [
        {**row, "scheme": name_of(scheme.for_linear(f"layers.{row['layer']}.{row['linear']}"))}
        for row in rows
    ]


def exceptions_of(scheme: ModelScheme | None) -> dict[str, str] | None:
    """Return scheme -> the linears that have it instead of the model's, as `ffn.down of 0–3`."""
    layers_of: dict[str, dict[str, list[int]]] = {}
    for linear, other in scheme.exceptions if scheme is not None else ():
        _, layer_idx, name = linear.split(".", 2)
        layers_of.setdefault(name_of(other), {}).setdefault(name, []).append(int(layer_idx))
    texts = {
        other: "; ".join(f"{name} of {ranges(idxs)}" for name, idxs in linears.items())
        for other, linears in layers_of.items()
    }
    return texts or None


def sizes_of(source: Path, candidate: Path) -> list[dict[str, Any]]:
    """Return the bytes on disk of source and candidate by kind of tensor."""
    before, after = (_bytes_by_kind(path) for path in (source, candidate))
    kinds = sorted(before.keys() | after.keys())
    return [
        {"kind": kind, "source_bytes": before.get(kind, 0), "candidate_bytes": after.get(kind, 0)}
        for kind in kinds
    ]


def size_of(path: Path) -> int:
    """Return the bytes on disk of all tensors of a model without its draft."""
    return sum(_bytes_by_kind(path).values())


def _bytes_by_kind(path: Path) -> dict[str, int]:
    kinds: dict[str, int] = {}
    for file in (each for each in sorted(path.glob("*.safetensors")) if each.name != TOKENS_NAME):
        for header in read_header(file):
            kind = _kind(header.name)
            kinds[kind] = kinds.get(kind, 0) + header.end - header.begin
    return kinds


def _kind(name: str) -> str:
    if "norm" in name:
        return "norms"
    if "embed" in name or "head" in name or name.startswith("positions"):
        return "embedding and head"
    return "attention" if any(part in name for part in _MIXERS) else "ffn"


def calibration_facts(
    inputs: Inputs, evaluation: TokenSet, evaluation_facts: Mapping[str, Any]
) -> dict[str, Any]:
    """Return facts of calibration, training and evaluation data, and how much text the windows that were used
    share.
    """
    facts: dict[str, Any] = {
        "evaluation_data": evaluation_facts["title"],
        "evaluation_digest": evaluation.digest(),
    }
    if _is_calibrated(inputs):
        calib = load_token_set(inputs[Port.CALIB].path / TOKENS_NAME)
        num_samples, seq_len = calib.tokens_NS.shape
        facts |= {
            "data": calib.source["title"],
            "license": calib.source["license"],
            "num_samples": num_samples,
            "seq_len": seq_len,
            "digest": calib.digest(),
            "overlap": _overlap(inputs, calib, evaluation, "calibration"),
            **_shapes(calib, evaluation, "shape"),
        }
    if "distillation" in dense_facts(inputs):
        training = load_token_set(inputs[Port.DENSE].path / TOKENS_NAME)
        facts |= {
            "training_data": training.source["title"],
            "training_license": training.source["license"],
            "training_digest": training.digest(),
            "training_overlap": _overlap(inputs, training, evaluation, "training"),
            **_shapes(training, evaluation, "training_shape"),
        }
    if "recovery" in quantization(inputs):
        training = load_token_set(inputs[Port.QUANTIZED].path / TOKENS_NAME)
        facts |= {
            "recovery_data": training.source["title"],
            "recovery_license": training.source["license"],
            "recovery_digest": training.digest(),
            "recovery_overlap": _overlap(inputs, training, evaluation, "codes' training"),
            **_shapes(training, evaluation, "recovery_shape"),
        }
    if Port.DRAFT in inputs.ports:
        training = load_token_set(inputs[Port.DRAFT].path / TOKENS_NAME)
        facts |= {
            "draft_data": training.source["title"],
            "draft_license": training.source["license"],
            "draft_digest": training.digest(),
            "draft_overlap": _overlap(inputs, training, evaluation, "draft's training"),
            **_shapes(training, evaluation, "draft_shape"),
        }
    return facts


def _shapes(seen: TokenSet, evaluation: TokenSet, name: str) -> dict[str, Any]:
    """Return what text a model was made with and what it is judged by, plain or chat; nothing where both are
    plain."""
    shapes = {name: shape_of(seen.source), "evaluation_shape": shape_of(evaluation.source)}
    return {} if set(shapes.values()) == {TEXT} else shapes


def _is_calibrated(inputs: Inputs) -> bool:
    """Return whether the recipe has calibration text and a stage read it: pruning does, and quantization
    unless it is data-free."""
    reads_none = quantization(inputs).get("data_free", False) and "pruning" not in dense_facts(inputs)
    return Port.CALIB in inputs.ports and not reads_none


def _overlap(inputs: Inputs, seen: TokenSet, evaluation: TokenSet, name: str) -> str:
    tokenizer, _ = load_tokenizer(inputs.source.path)

    def texts(tokens: TokenSet) -> Iterator[Document]:
        return (
            Document(str(idx), decode(tokenizer, row.tolist())) for idx, row in enumerate(tokens.tokens_NS)
        )

    shared = overlap(texts(seen), texts(evaluation))
    found = f"{shared.num_shared} of {shared.num_ngrams} 13-word sequences of the evaluation text"
    return f"{found} occur in the {name} text"


def artifact_facts(
    inputs: Inputs,
    candidate: Input,
    stated: CandidateFacts,
    sizes: list[dict[str, Any]],
    kv_cache: Mapping[str, Any] | None,
    draft_bytes: int | None,
) -> dict[str, Any]:
    """Return facts of the candidate: what it was made from, its scheme and format, and its size."""
    scheme = stated.scheme
    return {
        "digest": candidate.digest,
        **({"foreign": True} if stated.foreign else {}),
        "source": inputs.source.name,
        "source_revision": inputs.source.revision,
        "source_digest": inputs.source.digest,
        "scheme": None if scheme is None else scheme.name,
        "exceptions": exceptions_of(scheme),
        "format": stated.format,
        **({"kv_cache": kv_cache["format"]} if kv_cache is not None else {}),
        "sizes": sizes,
        **({"draft_bytes": draft_bytes} if draft_bytes is not None else {}),
    }


def license_of(inputs: Inputs) -> str:
    """Return the licence in the source's own model card, else `other`."""
    card = inputs.source.path / MODEL_CARD
    if not card.exists():
        return "other"
    try:
        check_within(inputs.source.path, card)
        read = read_text(card, max_bytes=MAX_CARD_BYTES).lstrip().splitlines()
    except (StorageError, OSError):  # a card decides nothing but this line
        return "other"
    lines = read[1 : read.index("---", 1)] if "---" in read[:1] and "---" in read[1:] else []
    stated = [line.partition(":")[2].strip() for line in lines if line.startswith("license:")]
    return stated[0] if stated and stated[0] else "other"
