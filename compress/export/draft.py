"""The draft of a model, opened for speculative decoding: a draft model, an assistant, an EAGLE-3 head or the
MTP head of the model's own checkpoint, from whichever directory holds it.
"""

from pathlib import Path

from compress.artifact.manifest import MANIFEST_NAME, open_artifact
from compress.errors import UsageError
from compress.export import DRAFT_FOLDER, codecs, open_checkpoint, open_weights
from compress.export.speculators import is_eagle3, open_eagle3
from compress.models.assistant import KIND as ASSISTANT
from compress.models.assistant_reader import ASSISTANT_TYPES, is_assistant, read_assistant
from compress.models.config_file import CONFIG_NAME
from compress.models.eagle3 import draft_head
from compress.models.mtp import KIND, mtp_of_draft
from compress.models.mtp_reader import read_mtps
from compress.runtime.speculative.assistant import AssistantModel
from compress.runtime.speculative.draft_model import DraftModel
from compress.runtime.speculative.eagle3 import Eagle3
from compress.runtime.speculative.mtp import Mtp
from compress.runtime.speculative.proposer import ProposerOptions


def draft_within(checkpoint: Path) -> Path:
    """Return the directory of the draft that a checkpoint carries.

    Raises:
        UsageError: it carries none.
    """
    path = checkpoint / DRAFT_FOLDER
    if not path.is_dir():
        raise UsageError(
            f"{checkpoint} carries no draft (no folder '{DRAFT_FOLDER}'): a recipe with a `draft` stage "
            f"makes one; "
            "prompt lookup (ngram) needs none."
        )
    return path


def open_mtp(checkpoint: Path) -> Mtp:
    """Return the proposer options of the MTP head that a checkpoint holds for its own model.

    Raises:
        UsageError: it holds none.
        UnsupportedArch, UnsupportedFormat: it is not understood wholly.
    """
    if not (checkpoint / CONFIG_NAME).exists():
        raise UsageError(f"{checkpoint} is no checkpoint, and MTP heads are read from those.")
    first, *further = read_mtps(open_checkpoint(checkpoint), codecs())
    return Mtp(first, tuple(further))


def kind_of_draft(path: Path) -> str:
    """Return the name of the proposer that the draft in a directory is for, as other programs call it, too:
    that of a head in the layout of `speculators` or as the draft stage's own artifact, or of a draft model.
    An assistant is vLLM's method `mtp` with a model of its own.
    """
    if (path / MANIFEST_NAME).exists():
        kind = open_artifact(path).manifest.facts.get("draft", {}).get("kind")
        return str(kind) if kind in ("eagle3", KIND) else "draft_model"
    if is_assistant(path):
        return ASSISTANT
    return "eagle3" if is_eagle3(path) else "draft_model"


def open_assistant(path: Path) -> AssistantModel:
    """Return the proposer options of the assistant in a directory.

    Raises:
        UsageError: there is none in it.
        UnsupportedArch, UnsupportedFormat: it is not understood wholly.
    """
    if not is_assistant(path):
        raise UsageError(
            f"{path} holds no assistant: the model_type of its {CONFIG_NAME} must be "
            f"{' or '.join(ASSISTANT_TYPES)}."
        )
    return AssistantModel(read_assistant(path))


def open_draft(path: Path) -> ProposerOptions:
    """Return the proposer options of the draft in a directory.

    Raises:
        UsageError: there is no model in it.
        UnsupportedArch, UnsupportedFormat: it is not understood wholly.
    """
    kind = kind_of_draft(path)
    if kind == "draft_model":
        return DraftModel(open_weights(path))
    if kind == ASSISTANT:
        return open_assistant(path)
    if kind == KIND:
        return Mtp(mtp_of_draft(open_artifact(path)))
    has_manifest = (path / MANIFEST_NAME).exists()
    return Eagle3(draft_head(open_artifact(path)) if has_manifest else open_eagle3(path))
