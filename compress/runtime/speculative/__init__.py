"""Speculative decoding: a proposer guesses k tokens, the model computes k + 1 rows of a request in one step, and keeps what it would have
said.

A proposer is one file of this package: a frozen dataclass of options, registered by its name, whose `build` gives a `Proposer`. It may say
anything; what comes out is decided by the model's own logits (`acceptance.py`). `verify.py` runs the step, `speculation.py` puts them
together for the engine.
"""

from compress.plugins import PluginSet
from compress.runtime.speculative.proposer import ProposerOptions

PROPOSERS: PluginSet[type[ProposerOptions]] = PluginSet("proposer", "compress.runtime.speculative")
