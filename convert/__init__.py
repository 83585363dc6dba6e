"""Hugging Face checkpoints to .colibri files, and a look into them."""
