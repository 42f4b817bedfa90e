"""Processes, devices, files, and what a result says about where it was made."""
