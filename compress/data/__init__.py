"""Calibration and evaluation text: corpora, data cards and the token sets cut from them."""
