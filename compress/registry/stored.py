"""Artifacts and evidence as a registry holds them, found by reference.

Manifests are read and checked against one another; files of weights are not read.
"""

from compress.artifact.manifest import MANIFEST_NAME, Manifest
from compress.errors import StorageError, UsageError, did_you_mean
from compress.registry.blobs import read_blob
from compress.registry.image import ARTIFACT, PROMOTION, SIGNATURE, Descriptor, ImageManifest, file_layers
from compress.registry.protocol import Registry, Tag, open_registry
from compress.registry.ref import Ref, parse_ref


def resolve(ref: Ref | str) -> Ref:
    """Return a reference pinned to the digest that it means now.

    Raises:
        UsageError: nothing has that name, tag or digest; the nearest one is named.
    """
    ref = as_ref(ref)
    return ref.pinned(find(open_repository(ref), ref).digest)


def tagged_artifact(registry: Registry, name: str, tag: str) -> str | None:
    """Return the digest of the artifact that `name:tag` points to; None when nothing has that tag."""
    registry = registry.repository(name)
    found = registry.read_tag(name, tag)
    return None if found is None else read_artifact(registry, found)[1].digest


def artifact_of(ref: Ref) -> str:
    """Return the digest of the artifact that a pinned reference means.

    Raises:
        UsageError: the registry holds no such artifact.
        StorageError: its manifests are damaged, or cannot be read.
    """
    registry = open_repository(ref)
    return read_artifact(registry, find(registry, ref))[1].digest


def open_repository(ref: Ref) -> Registry:
    """Return the registry of a reference, as it is used for its name.

    Raises:
        UsageError: nothing serves its scheme, or the registry cannot have that name.
    """
    return open_registry(ref.registry).repository(ref.name)


def list_tags(registry: Registry | str) -> tuple[Tag, ...]:
    """Return every tag of a registry, sorted."""
    return (open_registry(registry) if isinstance(registry, str) else registry).tags()


def newest_evidence(registry: Registry, ref: Ref) -> tuple[Descriptor, ImageManifest]:
    """Return the newest evidence of an artifact.

    Raises:
        UsageError: the reference means nothing, or there is no evidence.
        StorageError: the evidence is about another artifact.
    """
    subject = find(registry, ref)
    attached = evidence_of(registry, subject)
    if not attached:
        raise UsageError(f"{ref} has no evidence attached; push it with a report to attach one.")
    return attached[-1], read_evidence(registry, attached[-1], subject)


def evidence_of(registry: Registry, subject: Descriptor) -> tuple[Descriptor, ...]:
    """Return the evidence that refers to an artifact, oldest first, without the records of its promotions
    and its signatures.
    """
    others = (PROMOTION, SIGNATURE)
    return tuple(each for each in registry.attached(subject) if each.artifact_type not in others)


def as_ref(ref: Ref | str) -> Ref:
    """Return a reference, parsed where it is text."""
    return parse_ref(ref) if isinstance(ref, str) else ref


def find(registry: Registry, ref: Ref) -> Descriptor:
    """Return the manifest that a reference means.

    Raises:
        UsageError: nothing has that name, tag or digest; the nearest one is named.
    """
    found = registry.find(ref.digest) if ref.digest else registry.read_tag(ref.name, ref.tag)
    if found is None:
        if ref.digest:
            raise UsageError(f"{ref.registry} holds no manifest {ref.digest}.")
        if tags := [item.tag for item in registry.tags() if item.name == ref.name]:
            raise UsageError(
                f"'{ref.name}' in {ref.registry} has no tag '{ref.tag}'.{did_you_mean(ref.tag, tags)}"
            )
        raise UsageError(f"{ref.registry} holds nothing named '{ref.name}'.{_nearest_name(ref)}")
    return found


def _nearest_name(ref: Ref) -> str:
    """Return ` Did you mean 'x'?`, or nothing where the registry does not list its names."""
    try:
        names = {item.name for item in open_registry(ref.registry).tags()}
    except StorageError:
        return ""
    return did_you_mean(ref.name, names)


def read_artifact(registry: Registry, descriptor: Descriptor) -> tuple[ImageManifest, Manifest]:
    """Return the manifest of the image and that of the artifact, checked against one another.

    Raises:
        UsageError: the image is no artifact of this project.
        StorageError: the manifests list different files, or one is damaged.
    """
    image = ImageManifest.from_bytes(read_blob(registry, descriptor), f"manifest {descriptor.digest}")
    if image.artifact_type != ARTIFACT:
        raise UsageError(
            f"{descriptor.digest} is not an artifact of compress but of type {image.artifact_type}."
        )
    manifest = Manifest.from_bytes(read_blob(registry, image.config), where=str(image.config))
    if file_layers(manifest.files) != image.layers:
        raise StorageError(
            f"manifest {descriptor.digest} lists other files than its {MANIFEST_NAME}; push the artifact "
            f"again."
        )
    return image, manifest


def read_evidence(registry: Registry, descriptor: Descriptor, subject: Descriptor) -> ImageManifest:
    """Return the manifest of evidence that is attached to an artifact.

    Raises:
        StorageError: the evidence is about another artifact.
    """
    image = ImageManifest.from_bytes(read_blob(registry, descriptor), f"manifest {descriptor.digest}")
    if image.subject is None or image.subject.digest != subject.digest:
        raise StorageError(
            f"the evidence {descriptor.digest} is attached to {subject.digest} but speaks of another "
            f"artifact; push it again."
        )
    return image
