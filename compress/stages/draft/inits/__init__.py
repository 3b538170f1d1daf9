"""Kinds of drafts, one file each. A kind is a spec that estimates what its training needs, trains the draft
against its target model on all ranks, and returns a result that writes itself into the artifact.

What all kinds share (text, steps, the target model as a decoder) is prepared for them in `DraftTask`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Protocol

import torch
from pydantic import Field

from compress.artifact.writer import ArtifactWriter
from compress.context import Context
from compress.distill.learn import Curve
from compress.models.arch import Arch
from compress.models.decoder import Decoder
from compress.plugins import PluginSet
from compress.recipe import MAX_SIZE
from compress.registry.model_source import ModelSource
from compress.stages import Estimate, PlanFacts
from compress.stages.distill.models import NamedTeacher
from compress.stages.distill.text import TrainingText
from compress.stages.draft.learning import DraftLearning

LayerIdx = Annotated[int, Field(ge=0, le=MAX_SIZE)]


@dataclass(frozen=True)
class DraftTask:
    """The inputs of making a draft; the same on every rank.

    Attributes:
        source: the recipe's model.
        target: the compressed model as it will be served.
        decoder: the target as a decoder in `dtype` on `device`, dequantized, without gradients.
        text: windows to train and to measure on.
    """

    spec: DraftLearning
    source: ModelSource
    target: NamedTeacher
    decoder: Decoder
    text: TrainingText
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True)
class TrainedDraft:
    """A trained draft.

    Attributes:
        curve: the measurements while it was trained.
        facts: `kind`, `params`, `before` and `after` with {kl, top1, acceptance, acceptance_length}, and what
            else its kind adds.
        write: called on rank 0; writes the files into the artifact and returns the arguments of `describe`:
            arch, layers, scheme.
    """

    curve: Curve
    facts: Mapping[str, Any]
    write: Callable[[ArtifactWriter], Mapping[str, Any]]


@dataclass(frozen=True)
class ServedDraft:
    """The layers and the numbers that the runtime holds of a draft.

    Attributes:
        arch: the layers of one head or model.
        num_params: parameters in the dtype of the computation.
        num_heads: how many times the runtime holds pages for the layers of `arch`: 0 of an assistant, which
            reads the target's pages.
        own_logits: numbers of matrices of logits that a GPU holds in FP8.
        copied_logits: numbers of a copy in FP8 of the target's matrix of logits, which only a GPU holds.
    """

    arch: Arch
    num_params: int
    num_heads: int = 1
    own_logits: int = 0
    copied_logits: int = 0


class Init(Protocol):
    """The spec of one kind of draft."""

    def served(self, facts: PlanFacts) -> ServedDraft:
        """Return what the runtime holds of such a draft; `facts.arch` is the target's.

        Raises:
            UsageError, UnsupportedFormat: such a draft cannot be made.
        """

    def estimate(self, spec: DraftLearning, facts: PlanFacts) -> Estimate:
        """Return what training needs; `facts.arch` is the target's.

        Raises:
            UsageError, UnsupportedFormat: such a draft cannot be made.
        """

    def make(self, task: DraftTask, ctx: Context) -> TrainedDraft:
        """Train the draft on all ranks; resumable.

        Raises:
            Interrupted: the run was asked to stop.
        """


INITS: PluginSet[type[Init]] = PluginSet("draft", "compress.stages.draft.inits")
