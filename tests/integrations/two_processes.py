"""A test file run as two processes of one training."""

import forked


def run(file, folder, *words):
    """The file's own worker, on that folder and with these words, twice; what both said."""
    return forked.run_two(file, folder, *words)
