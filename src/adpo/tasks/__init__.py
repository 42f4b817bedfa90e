"""Problems, rewards, and how answers are checked."""
