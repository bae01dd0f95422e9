"""Results for people: on the terminal, as pictures, as a page of the documentation."""
