"""Other libraries, with the objective of the core."""
