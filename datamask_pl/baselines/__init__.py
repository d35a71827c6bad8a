"""The selections that a learned mask is compared with."""
