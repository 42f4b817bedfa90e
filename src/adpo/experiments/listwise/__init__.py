"""Whole lists or pairs? Preference learning of a language model at equal compute, on held-out prompts."""
