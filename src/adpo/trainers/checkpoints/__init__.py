"""Checkpoints that are whole, of this run, and hold all that a step needs."""
