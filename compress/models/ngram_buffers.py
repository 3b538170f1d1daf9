"""Tensors of a checkpoint that hold what n-grams are hashed with (`ngrams.py`): the factors of tokens, and
the rows of each head and its first row in the table. `transformers` reads them from the checkpoint, and here
they follow from the config, so the two have to be the same."""

from compress.errors import UnsupportedArch
from compress.models.arch import Arch
from compress.models.family import Family
from compress.models.family_files import FamilyFiles


def check_ngram_buffers(arch: Arch, files: FamilyFiles, family: Family) -> None:
    """Check the tensors of all layers that a checkpoint stores.

    Raises:
        UnsupportedArch: one holds other numbers than the config states.
    """
    for idx, layer in enumerate(arch.layers):
        if layer.ngrams is None:
            continue
        facts = layer.ngrams
        expected = (facts.factors(arch.vocab_size), facts.head_sizes, facts.head_starts)
        for inside, numbers in zip(family.ngram_buffers, expected, strict=True):
            name = f"{family.layer_prefix}{idx}.{inside}"
            if name in files and files.get(name).flatten().tolist() != list(numbers):
                raise UnsupportedArch(
                    f"tensor '{name}' does not hold the numbers that the config of this {arch.family} model "
                    f"states, {', '.join(map(str, numbers[:3]))}, ...: n-grams would be hashed to other rows."
                )
