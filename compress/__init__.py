"""compress: one recipe from a Hugging Face checkpoint to a smaller, faster artifact with the proof attached."""

__version__ = "0.1.0"
