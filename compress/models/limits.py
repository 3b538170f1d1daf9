"""The kinds and ranges of numbers that are read of a model, from a config or a manifest."""

ROPE_KINDS = ("default", "linear", "llama3", "yarn", "longrope", "proportional")
MAX_SIZE = 1 << 24
"""Largest width, number of heads, and vocabulary that is read: 100 times those of the largest models, and
small enough that no product of two overflows."""
MAX_LAYERS = 4096
MAX_POSITIONS = 1 << 31
THETAS = (1.01, 1e15)
FACTORS = (1.0, 1e6)
"""Ranges of a rope's base and of the factor that its positions are stretched by."""
FREQUENCY_FACTORS = (1e-6, 1e6)
FREQUENCY_EXPONENTS = (-14.0, 14.0)
SCALES = (-1e6, 1e6)
CAPS = (1e-3, 1e6)
SPARSITIES = (1e-3, 0.999)
"""Ranges of the factors of single frequencies (`longrope`), of their logarithms, of scales, of caps, and of
the shares of gates that are 0."""
