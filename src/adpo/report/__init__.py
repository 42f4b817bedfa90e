"""One page from the results of any command: no network, nothing that a model wrote is trusted."""
