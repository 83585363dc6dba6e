"""The wire between daemon and client: messages, codec, framing, errors. Bytes in, events out, no I/O."""
