"""The ModelPack form of an artifact: an image manifest with the media types of the CNCF model specification
(https://github.com/modelpack/model-spec, docs/spec.md and docs/config.md), so that programs which read
no other kind pull the same files.

Its layers are those of the artifact's own manifest, the same blobs under other media types, and
`compress.json`. Its bytes depend on the artifact alone.
"""

from typing import Any

from compress.artifact.manifest import MANIFEST_NAME, Manifest
from compress.digest import canonical_json, digest_bytes
from compress.registry.image import Descriptor, ImageManifest

MODELPACK_SUFFIX = ".modelpack"
MODELPACK = "application/vnd.cncf.model.manifest.v1+json"
MODELPACK_CONFIG = "application/vnd.cncf.model.config.v1+json"
FILEPATH = "org.cncf.model.filepath"
_LAYER = "application/vnd.cncf.model.{}.v1.raw"


def modelpack_image(image: ImageManifest, manifest: Manifest) -> tuple[ImageManifest, bytes]:
    """Return the ModelPack manifest of an artifact, and its config blob."""
    files = (
        *image.layers,
        Descriptor(image.config.media_type, image.config.digest, image.config.size_bytes, MANIFEST_NAME),
    )
    layers = tuple(
        Descriptor(_LAYER.format(_kind(str(each.title))), each.digest, each.size_bytes, each.title)
        for each in files
    )
    config = canonical_json(_config(manifest, layers))
    described = Descriptor(MODELPACK_CONFIG, digest_bytes(config), len(config))
    return ImageManifest(MODELPACK, described, layers, title_key=FILEPATH), config


def _config(manifest: Manifest, layers: tuple[Descriptor, ...]) -> dict[str, Any]:
    arch = manifest.arch or {}
    family = arch.get("family")
    config: dict[str, Any] = {"format": "safetensors"}
    if isinstance(family, str):
        config["architecture"] = family
    if manifest.scheme:
        config["quantization"] = str(manifest.scheme.get("name") or manifest.scheme.get("kind") or "mixed")
    return {
        "descriptor": {"title": manifest.role},
        "config": config,
        "modelfs": {"type": "layers", "diffIds": [layer.digest for layer in layers]},
    }


def _kind(path: str) -> str:
    """Return the kind of a file in the words of the specification."""
    if path.endswith((".safetensors", ".gguf", ".bin")):
        return "weight"
    if path.endswith((".md", ".txt")) or path.startswith(("LICENSE", "NOTICE")):
        return "doc"
    return "weight.config"
