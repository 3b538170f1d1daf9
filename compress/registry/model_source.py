"""The source model of a recipe as a directory on this machine: bundled with the package, a path, from the
Hugging Face hub, or pulled from a registry.

A hub name is resolved to a commit before anything is fetched, and only model and tokenizer
files come: no pickles, no code. The digest covers every file that decides the model's function or its text,
and nothing else in the directory.
"""

import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import compress
from compress.digest import digest_files, digest_json
from compress.errors import StorageError, UsageError, did_you_mean
from compress.registry.local_copy import kept_copy, local_copy
from compress.registry.ref import parse_ref
from compress.registry.stored import resolve
from compress.registry.transfer import check_pushed_signature
from compress.sign.signature import Verifier, check_directory
from compress.untrusted.files import check_within, open_plain
from compress.untrusted.parse import Malformed, read_json

WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json")
TEXT_FILES = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "preprocessor_config.json",
    "processor_config.json",
    "tekken.json",
    "chat_template.jinja",
    "chat_template.json",
    "video_preprocessor_config.json",
    "additional_chat_templates/*.jinja",
)
DOCUMENT_FILES = tuple(
    f"{name}{suffix}"
    for name in ("LICENSE", "LICENCE", "NOTICE", "USE_POLICY", "SYSTEM_PROMPT")
    for suffix in ("", ".md", ".txt")
)
"""Files that travel with a model and decide neither its function nor its text, so that its digest leaves them
out.
"""
README_NAME = "README.md"
SOURCE_README_NAME = "SOURCE_README.md"
"""The name of a source's README in a checkpoint, whose README is the model card."""
MODEL_FILES = ("config.json", *WEIGHT_FILES, *TEXT_FILES)
FETCHED_FILES = (*MODEL_FILES, *DOCUMENT_FILES, README_NAME)
CONSOLIDATED_FILES = ("consolidated*.safetensors", "consolidated*.safetensors.index.json")
"""Files in which Mistral publishes the weights of `model.safetensors` again, in a layout of its own."""
NOT_FETCHED_FILES = (*CONSOLIDATED_FILES, "*/*.safetensors", "*/*.safetensors.index.json")
"""Files of weights that are not fetched: Mistral's own layout, and further layouts in folders (`original/` of
gpt-oss)."""
_READ_FIRST = ("model.safetensors", "model.safetensors.index.json")
_MAX_CONFIG_BYTES = 16 << 20
_MAX_INDEX_BYTES = 64 << 20
_HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")
BUILTIN = {"reference": Path(compress.__file__).parent / "reference"}


@dataclass(frozen=True)
class ModelSource:
    """`name` is how the model card names the base model; `revision` is the commit of a hub model, or the
    manifest's digest of an artifact from a registry.
    """

    path: Path
    name: str
    revision: str | None
    digest: str

    @property
    def portable_name(self) -> str:
        """Return the name for a manifest: that of a directory without its place, so that the digest of what
        is made from it depends neither on the place nor on how a recipe, or the lock of its run, spells it.
        """
        return self.path.resolve().name if Path(self.name) == self.path else self.name

    def text_files(self) -> list[Path]:
        """Return the tokenizer and generation files, which every checkpoint made from this model gets."""
        return _matching(self.path, TEXT_FILES)

    def copy_text_files(self, directory: Path) -> None:
        """Copy the tokenizer and generation files to a checkpoint."""
        for file in self.text_files():
            copy = directory / file.relative_to(self.path)
            copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(file, copy)

    def copy_documents(self, directory: Path) -> None:
        """Copy licences and notices to a checkpoint, and the source's README under a name that leaves room
        for the card's.
        """
        for file in _matching(self.path, DOCUMENT_FILES):
            shutil.copyfile(file, directory / file.name)
        for file in _matching(self.path, (SOURCE_README_NAME,)) or _matching(self.path, (README_NAME,)):
            shutil.copyfile(file, directory / SOURCE_README_NAME)


@dataclass(frozen=True)
class Required:
    """The signature that a model must have: by whom, and for a directory its file, None for the usual one."""

    verifier: Verifier
    signature: Path | None = None


def resolve_model(
    scheme: str,
    name: str,
    revision: str | None,
    *,
    offline: bool = False,
    required: Required | None = None,
) -> ModelSource:
    """Return a model with its directory and its digest, fetched if it is not here and signed as required;
    reads every file of it once, and once more where a signature is required.

    Raises:
        UsageError: no such builtin model or directory.
        SignatureRefused: it is not signed as required; nothing was fetched.
        StorageError: the hub cannot be reached or does not have it.
    """
    path, commit = locate_model(scheme, name, revision, offline=offline, required=required)
    return ModelSource(path, f"builtin://{name}" if scheme == "builtin" else name, commit, model_digest(path))


def locate_model(
    scheme: str,
    name: str,
    revision: str | None,
    *,
    offline: bool = False,
    required: Required | None = None,
) -> tuple[Path, str | None]:
    """Return a model's directory, fetched if it is not here and signed as required, and the commit of a hub
    model or the digest of an artifact from a registry.

    Raises:
        UsageError: no such builtin model, directory or reference; or a registry is needed offline.
        StorageError: the hub or the registry cannot be reached or does not have it.
    """
    if scheme == "registry":
        return _pulled(name, offline=offline, required=required)
    if required is not None and scheme != "path":
        raise UsageError(f"a signature of '{name}' cannot be required: only a part of it is fetched.")
    if scheme == "builtin":
        if name not in BUILTIN:
            raise UsageError(f"there is no bundled model '{name}'.{did_you_mean(name, BUILTIN)}")
        return BUILTIN[name], None
    if scheme == "hf":
        return _fetch(name, revision, offline=offline)
    path = Path(name)
    if path.is_file():
        raise UsageError(
            f"{path} is a file; a model is the directory that holds its config.json and tensors."
        )
    if not path.is_dir():
        of_hub = f" For the model of the hub write hf://{name}." if _HUB_NAME.fullmatch(name) else ""
        raise UsageError(f"the model directory {path} does not exist (looked from {Path.cwd()}).{of_hub}")
    if required is not None:
        check_directory(path, required.verifier, signature=required.signature)
    return path, None


def fetch_config(name: str, revision: str | None, *, offline: bool, shipped: list[str]) -> dict[str, Any]:
    """Return `config.json` alone of a hub model, for planning.

    Raises:
        StorageError: the hub cannot be reached or does not have it; names the models whose shapes ship with
            the package.
    """
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        file = hf_hub_download(name, "config.json", revision=revision, local_files_only=offline)
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise StorageError(
            f"the shapes of '{name}' are not known here and its config.json could not be "
            f"had{' offline' if offline else ''}. Shapes that "
            f"ship with the package: {', '.join(shipped)}."
        ) from error
    try:
        config = read_json(Path(file), max_bytes=_MAX_CONFIG_BYTES, spells_constants=True)
    except Malformed as error:
        raise UsageError(f"config.json of '{name}' is not valid JSON: {error}.") from None
    if not isinstance(config, dict):
        raise UsageError(f"config.json of '{name}' is not a JSON object.")
    return config


def kept_model(name: str, revision: str | None, *, offline: bool) -> ModelSource | None:
    """Return a hub model whose files a run would take from the cache on this machine as they are. Returns
    None where some must be fetched, or where the hub does not answer and the revision is no commit; fetches
    nothing.

    Raises:
        UsageError: no model of the hub can have the name.
    """
    try:
        path, commit = _fetch(name, revision, offline=offline, only_kept=True)
        return ModelSource(path, name, commit, model_digest(path)) if _is_whole(path) else None
    except StorageError:
        return None


def _is_whole(path: Path) -> bool:
    """Return whether a directory has a config and all files of weights that an index of it names."""
    if not (path / "config.json").exists():
        return False
    index = path / "model.safetensors.index.json"
    if not index.exists():
        return any(path.glob("*.safetensors"))
    try:
        stated = read_json(index, max_bytes=_MAX_INDEX_BYTES)
    except Malformed:
        return False
    files = stated.get("weight_map") if isinstance(stated, dict) else None
    return isinstance(files, dict) and all((path / str(file)).exists() for file in set(files.values()))


def model_digest(path: Path) -> str:
    """Return the digest of the files of a model that decide its function or its text. Consolidated weights
    count where nothing else can be read, so that it does not matter whether they were fetched, too.
    """
    files = _matching(path, MODEL_FILES)
    if any((path / name).exists() for name in _READ_FIRST):
        files = [file for file in files if not any(map(file.match, CONSOLIDATED_FILES))]
    names = [file.relative_to(path).as_posix() for file in files]
    return digest_json(dict(zip(names, digest_files(files), strict=True)))


def _matching(path: Path, patterns: tuple[str, ...]) -> list[Path]:
    """Return the files of a directory and of its folders that match a pattern, in order of their names.

    Raises:
        StorageError: one is no plain file, or a link that leads out of the directory.
    """
    found = {file for pattern in patterns for file in path.glob(pattern) if not file.is_dir()}
    for file in found:
        check_within(path, file)
        try:
            open_plain(file).close()
        except OSError as error:
            raise StorageError(f"{file} cannot be read: {error.strerror or error}.") from error
    return sorted(found, key=lambda file: file.relative_to(path).as_posix())


def _pulled(name: str, *, offline: bool, required: Required | None) -> tuple[Path, str]:
    """Return the copy on this machine of an artifact, and the digest of its manifest. Offline, only a
    directory is a registry, and a reference by digest that was pulled before is found, with the signature
    that it was pulled with.
    """
    ref = parse_ref(name)
    if offline and ref.scheme != "layout":
        if ref.digest is not None and (kept := kept_copy(ref.digest)) is not None:
            if required is not None:
                check_directory(kept, required.verifier)
            return kept, ref.digest
        raise UsageError(
            f"'{name}' is in a registry, which cannot be asked offline; write it by digest or pull it."
        )
    pinned = resolve(ref)
    if required is not None:
        check_pushed_signature(pinned, required.verifier)
    return local_copy(pinned), str(pinned.digest)


def _fetch(name: str, revision: str | None, *, offline: bool, only_kept: bool = False) -> tuple[Path, str]:
    """Return the directory of a hub model and its commit. With `only_kept` the hub may be asked for the
    commit and the names of its files, and no file comes from there.

    Raises:
        UsageError: no model of the hub can have the name.
        StorageError: the hub cannot be reached or does not have it, or files are not on this machine.
    """
    from huggingface_hub import HfApi, constants, snapshot_download

    # HTTPError is that of the HTTP client, which differs between versions
    from huggingface_hub.errors import HFValidationError, HTTPError  # type: ignore[attr-defined]
    from huggingface_hub.utils import filter_repo_objects  # type: ignore[attr-defined]

    allowed = list(FETCHED_FILES)
    ignored = list(NOT_FETCHED_FILES)
    offline = offline or constants.HF_HUB_OFFLINE  # the hub's client sends no request then
    is_commit = revision is not None and re.fullmatch(r"[0-9a-f]{40}", revision) is not None
    try:
        commit: str | None = revision
        files: list[str] = []
        if not offline and (only_kept or not is_commit):
            try:
                info = HfApi().model_info(name, revision=revision)
            except (HTTPError, OSError):
                if not is_commit:  # a run takes what is kept of a commit where nobody answers
                    raise
            else:
                commit = info.sha
                files = [each.rfilename for each in info.siblings or ()]
        path = Path(
            snapshot_download(
                name,
                revision=commit,
                allow_patterns=allowed,
                ignore_patterns=ignored,
                local_files_only=offline or only_kept,
            )
        )
        wanted = filter_repo_objects(files, allow_patterns=allowed, ignore_patterns=ignored)
        if only_kept and not all((path / each).exists() for each in wanted):
            raise FileNotFoundError("some of its files are not there")
    except HFValidationError as error:
        raise UsageError(f"'{name}' is not the name of a model on the Hugging Face hub: {error}") from None
    except (HTTPError, OSError) as error:  # a hub that answers with an error, or nobody who answers
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        where = "in the local cache" if offline else "from the Hugging Face hub"
        raise StorageError(
            f"the model '{name}' at revision '{revision or 'main'}' could not be had {where}: {reason}"
        ) from error
    return path, path.name
