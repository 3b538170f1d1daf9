"""The assistant that a recipe names for speculation with the candidate: where it lies, and what it needs."""

from collections.abc import Mapping
from pathlib import Path

from compress.errors import StorageError, UsageError
from compress.export.draft import open_assistant
from compress.models.arch import Arch
from compress.models.assistant import target_layers
from compress.models.assistant_reader import assistant_facts
from compress.models.config_file import read_config
from compress.recipe import parse_model_ref
from compress.registry.model_source import locate_model
from compress.runtime.speculative.assistant import AssistantModel
from compress.stages.distill.models import identity_of
from compress.stages.draft.inits import ServedDraft
from compress.stages.validate.spec import Speculation


def assistant_identity(spec: Speculation | None) -> Mapping[str, str]:
    """Return the identity of the assistant for a cache key, without using the network; empty where none is
    named.

    Raises:
        UsageError: there is no such model, or the name may mean another one tomorrow.
    """
    named = None if spec is None else spec.assistant
    return {} if named is None else {"assistant": identity_of(named)}


def named_assistant(spec: Speculation, *, offline: bool) -> AssistantModel | None:
    """Return the options of the assistant that a recipe names, downloaded if it is on the hub; None where it
    names none.

    Raises:
        UsageError: there is no such model, or it is no assistant.
        UnsupportedArch, UnsupportedFormat: it is not understood wholly.
    """
    return None if spec.assistant is None else open_assistant(_located(spec.assistant, offline=offline))


def served_assistant(spec: Speculation | None, target: Arch) -> ServedDraft | None:
    """Return what the runtime holds of the assistant that a recipe names; None where it names none, or the
    assistant is not on this machine yet. It has no pages, and computes logits by its own matrix.

    Raises:
        UsageError: there is no such directory, it holds no assistant, or one of another model.
        UnsupportedArch, UnsupportedFormat: its config is not supported.
    """
    if spec is None or spec.assistant is None:
        return None
    try:
        path = _located(spec.assistant, offline=True)
    except StorageError:  # of the hub, or of a registry: it is fetched when the stage runs
        return None
    facts = assistant_facts(read_config(path))
    target_layers(facts, target)
    return ServedDraft(facts.arch, facts.num_params, num_heads=0)


def _located(ref: str, *, offline: bool) -> Path:
    """Return the directory of a model that a recipe names."""
    model = parse_model_ref(ref)
    if offline and model.scheme == "registry":
        try:
            return locate_model(model.scheme, model.name, model.revision, offline=True)[0]
        except UsageError as error:  # a registry is needed
            raise StorageError(str(error)) from None
    return locate_model(model.scheme, model.name, model.revision, offline=offline)[0]
