"""What a manifest is made of: its head, and sections that are read and proved apart."""
