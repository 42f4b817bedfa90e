"""Causal language models: tasks, rewards and how answers are checked."""
