"""The peak memory of scoring a model, loaded or streamed, in a process of its own:

python -m tests.support.streamed_peak MODEL SPEC WAY PLACE
"""

import sys
from pathlib import Path

import torch

from compress.export import open_weights
from compress.runtime.engine import Engine
from compress.runtime.streamed_model import StreamedModel
from compress.stages.validate.spec import Validate
from compress.validate.kept_scores import KeptScores
from tests.support.stage_peak import alone, resident


def peak_bytes_of_scoring(model: Path, spec: str, way: str, place: Path) -> int:
    """Return the peak resident size of scoring in a new process, less the size after its imports."""
    return alone("tests.support.streamed_peak", str(model), spec, way, str(place))


def _run(model: str, text: str, way: str, place: str) -> int:
    spec = Validate.model_validate_json(text)
    source = open_weights(Path(model))
    generator = torch.Generator().manual_seed(0)
    shape = spec.num_samples, spec.seq_len
    tokens_NS = torch.randint(source.arch.vocab_size, shape, generator=generator, dtype=torch.int32)
    batch_size = spec.windows_at_once(source.arch)
    assert spec.apart is not None
    kept = KeptScores(
        Path(place),
        tokens_NS,
        identity={},
        batch_size=batch_size,
        top_k=spec.apart.top_k,
        log=lambda text: None,
    )
    after_import = resident("VmRSS")
    device = torch.device("cpu")
    config = spec.engine_config(speculates=False)
    if way == "streamed":
        kept.fill(StreamedModel(source, device=device, config=config).score(tokens_NS, batch_size=batch_size))
    else:
        runner = Engine(source, device=device, config=config).runner
        with torch.inference_mode():
            kept.fill(runner.score(batch) for batch in tokens_NS.split(batch_size))
    return resident("VmHWM") - after_import


if __name__ == "__main__":
    print(_run(*sys.argv[1:]))
