"""Learns which samples of a pre-training corpus to keep: DATAMASK on PyTorch Lightning."""

__version__ = "0.1.0"
