"""What the tests of several parts share."""
