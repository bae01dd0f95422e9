"""Results on the terminal, as pictures, and as a page of the documentation."""
