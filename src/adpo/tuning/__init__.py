"""`adpo tune`: settings of a job chosen by trying them out."""
