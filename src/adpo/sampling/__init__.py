"""Completions from a model."""
