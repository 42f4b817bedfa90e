"""The experiments: protocol, run and figures of each."""
