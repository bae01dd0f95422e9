"""What a program holds: `Store`, and how one is opened."""
