"""Formulas of the terms: value of a mask, expectation, gradient. One file per term."""
