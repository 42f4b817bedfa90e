"""Log-probabilities from packed sequences: no padding, shared prompts."""
