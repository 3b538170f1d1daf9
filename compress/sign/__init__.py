"""Signatures of models: OpenSSF Model Signing bundles, made and checked with the package model-signing."""
