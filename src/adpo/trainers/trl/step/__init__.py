"""One optimizer step on a rollout: rows, anchor, temperature, log."""
