"""The store of colibri: two RocksDB databases, truth and pages."""
