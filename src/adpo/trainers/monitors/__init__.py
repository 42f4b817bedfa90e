"""What watches optimizer steps: bad ones, empty ones, and whether anything was learnt."""
