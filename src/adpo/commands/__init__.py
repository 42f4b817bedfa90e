"""Commands of the command line that have files of their own: arguments and messages."""
