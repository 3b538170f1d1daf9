"""`recover`: train codes, scales and norms of the quantized model to predict what its source predicts, with
the rounding in the forward pass (`compress/distill/codes.py`, `norm_weights.py`). The result is a model in
the same scheme.

Training can be stopped at any time, resumes where it was, and may be shared by several ranks.

spec.py       what a recipe states     training.py     teacher, student and the loop
estimate.py   for `compress plan`
"""

from collections.abc import Mapping

import torch

from compress.artifact.manifest import open_artifact
from compress.artifact.writer import ArtifactWriter
from compress.context import Context
from compress.data.model_tokens import TOKENS_NAME, data_identity
from compress.data.tokens import save_token_set
from compress.errors import UsageError
from compress.export import open_weights
from compress.models.canonical import CanonicalStore
from compress.stages import STAGES, Inputs, Port
from compress.stages.distill.learning import learning_facts
from compress.stages.distill.text import TrainingText, shared_text
from compress.stages.recover.estimate import estimate
from compress.stages.recover.spec import Recover
from compress.stages.recover.training import Recovered, recovery_facts, train_codes


def _depends(spec: Recover, device: str) -> Mapping[str, str]:
    """Return the identity of the text, the kind of device, and the dtype that is computed in."""
    return {
        **data_identity(spec, device),
        "device": torch.device(device).type,
        "dtype": str(spec.computes_in(torch.device(device))),
    }


def recover_codes(spec: Recover, inputs: Inputs, ctx: Context) -> tuple[Recovered, TrainingText]:
    """Train codes, scales and norms on all ranks. Rank 0 reads the text and writes the training state.

    Raises:
        UsageError: no weight has codes, a LoRA's rank is above that of a linear, too little text, or a loss
            that is not finite.
        Interrupted: the run was asked to stop.
    """
    store = CanonicalStore(open_artifact(inputs[Port.QUANTIZED].path))
    scheme = store.scheme
    if scheme is None:
        raise UsageError(
            "recover: every weight of the quantized model stayed in 16 bits, so there are no codes to train. "
            "Leave out `recover`."
        )
    if spec.lora is not None:
        spec.lora.check_rank(
            store.arch, "recover", is_trained=lambda name: scheme.for_linear(name) is not None
        )
    source = open_weights(inputs.source.path)
    quantized = open_weights(inputs[Port.QUANTIZED].path)
    text = shared_text(spec, inputs.source, source, ctx, device=torch.device(ctx.device))
    return train_codes(spec, source, quantized, text, ctx, digest=inputs.source.digest), text


@STAGES.stage(
    "recover",
    version=5,
    takes=(Port.SOURCE, Port.QUANTIZED),
    gives=Port.QUANTIZED,
    spec=Recover,
    estimate=estimate,
    depends=_depends,
    on_all_ranks=recover_codes,
)
def recover(spec: Recover, inputs: Inputs, out: ArtifactWriter, ctx: Context) -> None:
    recovered, text = recover_codes(spec, inputs, ctx)
    before = open_artifact(inputs[Port.QUANTIZED].path).manifest
    recovered.write(out)
    save_token_set(text.training, out.path / TOKENS_NAME)
    # the errors of single linears were those of the codes before
    carried = {key: value for key, value in before.facts.items() if key != "layers"}
    teacher = {"name": inputs.source.portable_name, "digest": inputs.source.digest}
    facts = {
        **recovery_facts(spec, recovered, teacher),
        "data": text.facts,
        **learning_facts(spec, spec.computes_in(torch.device(ctx.device)), recovered.curve),
    }
    out.describe(
        role="quantized",
        arch=before.arch,
        layers=before.layers,
        scheme=before.scheme,
        facts={**carried, "recovery": facts},
    )
