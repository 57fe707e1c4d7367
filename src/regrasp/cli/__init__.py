"""Parse, call, print."""
