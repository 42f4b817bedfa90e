"""Experiment 2: distilling policies that control MuJoCo bodies."""
