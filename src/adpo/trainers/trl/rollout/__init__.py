"""One rollout: sampling, endings, members."""
