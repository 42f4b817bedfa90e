"""Trainers of TRL, transformers and verl, with the objective of the core."""
