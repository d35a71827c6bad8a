"""Several processes: who they are, what they send each other, and what happens when one fails.

`collectives` is the only file that calls torch.distributed's collectives. `launch` compares the processes that were
started with those the trainer knows, `strategy` is Lightning's DDP with time limits, `failures` tells the other ranks.
"""
