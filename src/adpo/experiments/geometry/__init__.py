"""The paper's Figure 1 and what it speaks of, computed from the core."""
