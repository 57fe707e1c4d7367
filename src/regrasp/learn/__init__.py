"""Training: the one loop, what it minimises, and how well the result does on episodes it has not seen."""
