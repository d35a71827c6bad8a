"""Local search by swaps, which improves the mask after the last step."""
