"""The embedded model, and models from a ``.gguf`` file."""
