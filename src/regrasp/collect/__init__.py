"""Experience: what environments and policies gave, step by step, and how it is recorded."""
