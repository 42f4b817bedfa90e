"""Listwise preference data: read, tabled, tokenised, ranked."""
