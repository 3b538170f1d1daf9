"""The sampling kernel: the next token of each row from its logits."""
