"""How long one update of a policy takes, by whom: stock TRL, and this package's trainers."""
