"""Drawn masks: how they are drawn, their scores, advantages, and the control variate."""
