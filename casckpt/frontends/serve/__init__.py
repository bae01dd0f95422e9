"""A store that answers as a Hugging Face Hub does: `serve`. Needs the extra ``serve``."""
