"""What a run writes and shows: checkpoints, the mask, progress."""
