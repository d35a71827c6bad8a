"""What a run writes and shows while it runs, one Lightning callback per file.

Checkpoints of logits, the mask's parts, signals of a scheduler, the progress bar, pictures for TensorBoard. A callback
reads what the learner publishes (`data.types.BlockResult`); it knows neither the learner's nor the data's module.
"""
