"""Fuzz tests of everything that reads what somebody else made; `python -m tests.fuzz` runs a campaign.

    documents.py   JSON, YAML, safetensors and plain text, each with its mutations
    targets.py     the readers, each as `run(data, directory)`
    models.py      tiny checkpoints, artifacts and a registry that the targets need around their input
    law.py         what must hold for every input: the result or the right error, in 2 s and 1 GiB
    minimise.py    a failing input made small
    campaign.py    one target's inputs, and workers that take the targets in turn
    seeds.py       writes `corpus/`, the inputs that mutations start from

`crashes/` holds every input that ever failed; the tests run all of them.
"""
