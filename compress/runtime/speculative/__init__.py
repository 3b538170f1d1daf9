"""Speculative decoding: a proposer drafts k tokens, and the model verifies them in one step of k + 1 rows a
request.

A proposer is one file of this package: a frozen dataclass of options, registered by its name, whose `build`
returns a `Proposer`. It may propose anything: which tokens are kept depends on the model's own logits
(`acceptance.py`). `verify.py` runs the step, `decoding.py` launches steps for the engine, and
`speculation.py` has the options and counts that callers see.
"""

from compress.plugins import PluginSet
from compress.runtime.speculative.proposer import ProposerOptions

PROPOSERS: PluginSet[type[ProposerOptions]] = PluginSet("proposer", "compress.runtime.speculative")
