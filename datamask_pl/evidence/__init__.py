"""What shows that a mask is good: measures, competitors, pictures."""
