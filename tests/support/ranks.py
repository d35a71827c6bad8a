"""What tests of several processes share."""

import socket


def on(num_ranks):
    return ("--trainer.devices", str(num_ranks), "--trainer.strategy", "ddp")


def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def end(processes, *, timeout_s):
    """Exit codes and outputs; processes that do not end in time are killed, and the test fails."""
    try:
        outputs = [process.communicate(timeout=timeout_s) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [process.returncode for process in processes], outputs
