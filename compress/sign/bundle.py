"""The statement of an OpenSSF Model Signing bundle: the files of a model and their SHA-256 digests, in an
in-toto statement inside a DSSE envelope inside a Sigstore bundle (v0.3, JSON).

    {"mediaType": "application/vnd.dev.sigstore.bundle.v0.3+json",
     "verificationMaterial": {"publicKey": {"hint": <sha256 of the key>}} or {"certificate": ...},
     "dsseEnvelope": {"payloadType": "application/vnd.in-toto+json", "payload": <base64>,
                      "signatures": [{"sig": <base64>}]}}

    payload: {"_type": "https://in-toto.io/Statement/v1", "subject": [...],
              "predicateType": "https://model_signing/signature/v1.0",
              "predicate": {"serialization": {"method": "files", ...},
                            "resources": [{"name": <path>, "algorithm": "sha256", "digest": <hex>}, ...]}}

Reading a bundle proves nothing: `check_made_by` of signature.py checks who signed it.
"""

import base64
import binascii
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from compress.artifact.manifest import MANIFEST_NAME, check_relative
from compress.errors import SignatureRefused
from compress.untrusted.fields import Fields
from compress.untrusted.files import read_bytes
from compress.untrusted.parse import Malformed, parse_json

BUNDLE_TYPE = "application/vnd.dev.sigstore.bundle.v0.3+json"
MAX_BUNDLE_BYTES = 32 << 20
_PAYLOAD_TYPE = "application/vnd.in-toto+json"
_STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
_PREDICATE_TYPE = "https://model_signing/signature/v1.0"
_HEX = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Bundle:
    """A bundle as it was read: its bytes, the files it states (path -> `sha256:<hex>`), and the hint of the
    public key that it names, None in one that was signed without a key. `where` names it in errors.
    """

    data: bytes
    files: Mapping[str, str]
    key_hint: str | None
    where: str


def read_bundle(path: Path) -> Bundle:
    """Return the bundle in a file.

    Raises:
        SignatureRefused: there is no such file, or it is no bundle.
    """
    try:
        data = read_bytes(path, max_bytes=MAX_BUNDLE_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        raise SignatureRefused(
            f"there is no signature at {path}.",
            where=path,
            hint="`compress sign` makes one; --signature names another place.",
        ) from None
    return parse_bundle(data, str(path))


def parse_bundle(data: bytes, where: str) -> Bundle:
    """Return what a bundle states.

    Raises:
        SignatureRefused: it is malformed, or names its files in another way than by path and SHA-256.
    """
    bundle = _parsed(data, where)
    if (stated := bundle.text("mediaType")) != BUNDLE_TYPE:
        _refuse(where, f"it is a bundle of the type {stated:.100}, and {BUNDLE_TYPE} is read here")
    envelope = bundle.fields("dsseEnvelope")
    if envelope.text("payloadType") != _PAYLOAD_TYPE:
        _refuse(where, "what it signs is no in-toto statement")
    try:
        payload = base64.b64decode(envelope.text("payload"), validate=True)
    except (binascii.Error, ValueError):
        _refuse(where, "its payload is not base64")
    return Bundle(data, _files(_parsed(payload, where), where), _key_hint(bundle, where), where)


def _parsed(data: bytes, where: str) -> Fields:
    try:
        return Fields(parse_json(data), where, SignatureRefused)
    except Malformed as error:
        _refuse(where, f"{error}")


def _files(statement: Fields, where: str) -> dict[str, str]:
    if statement.text("_type") != _STATEMENT_TYPE or statement.text("predicateType") != _PREDICATE_TYPE:
        _refuse(where, "what it signs is not the list of a model's files (OpenSSF Model Signing 1.0)")
    predicate = statement.fields("predicate")
    method = predicate.fields("serialization").text("method")
    if method != "files":
        _refuse(where, f"it names its files by {method:.40}; sign the model file by file")
    files: dict[str, str] = {}
    for item in predicate.items("resources"):
        resource = Fields(item, f"a file in {where}", SignatureRefused)
        name = resource.text("name")
        digest = resource.text("digest")
        if resource.text("algorithm") != "sha256" or not _HEX.fullmatch(digest):
            _refuse(where, f"it has no SHA-256 digest of the file {name!r:.100}")
        if name != MANIFEST_NAME:
            check_relative(name, where)
        if name in files:
            _refuse(where, f"it names the file {name!r:.100} twice")
        files[name] = f"sha256:{digest}"
    if not files:
        _refuse(where, "it names no file")
    return files


def _key_hint(bundle: Fields, where: str) -> str | None:
    material = bundle.fields("verificationMaterial")
    if not material.has("publicKey"):
        return None
    key = material.fields("publicKey")
    if not key.has("hint"):
        _refuse(where, "it does not say which key made it, as those of model-signing before 1.0; sign again")
    return key.text("hint")


def _refuse(where: str, reason: str) -> NoReturn:
    raise SignatureRefused(f"{where} is not a signature that can be checked: {reason}.", where=where)
