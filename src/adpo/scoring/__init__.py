"""Log-probabilities of completions under a causal language model."""
