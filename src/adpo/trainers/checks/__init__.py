"""What trainers refuse at the start, before anything is spent."""
