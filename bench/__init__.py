"""How fast colibri is, beside what the machine can do and beside other engines. bench/README.md says how to run it."""
