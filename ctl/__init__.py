"""colibrictl."""
