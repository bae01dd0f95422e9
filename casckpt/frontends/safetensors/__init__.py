"""safetensors files and Hugging Face folders, in and out."""
