"""Runs of language-model training, as `adpo train` and `adpo eval` carry them out."""
