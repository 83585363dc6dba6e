"""colibrictl: the client at a shell, and the offline commands. docs/cli.md has every command, option and exit code.

main finds out whether the installation has what the commands need; command holds what they have in common (the
connection, --json, errors as one line); output prints; one module per group of commands. A command is argument checks,
one library call, output.
"""
