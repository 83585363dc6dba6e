"""colibri: the thin client."""
