"""The binding to libcolibri: a thin shelf over cffi. Internal; applications use the client."""
