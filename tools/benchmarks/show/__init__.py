"""Shows results on the terminal, as plots, and as a documentation page."""
