"""Experiment 1: contextual bandits under twelve kinds of noise."""
