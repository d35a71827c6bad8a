"""Runs several fits one after the other in the processes of one launch, for a launch costs more than a small fit.

Every process is given its rank and the number of ranks, and the fits as JSON: lists of a port and arguments.
"""

import json
import os
import sys

import torch

from datamask_pl.cli import main

if __name__ == "__main__":
    torch.set_num_threads(1)
    rank, num_ranks, tasks = sys.argv[1:]
    for port, *args in json.loads(tasks):
        # Lightning removes some of them at the end of a fit
        os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "NODE_RANK": "0", "WORLD_SIZE": num_ranks}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        main(["fit", *args])
