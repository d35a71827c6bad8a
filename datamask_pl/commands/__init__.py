"""The commands of cli.py other than `fit`, one module each."""
