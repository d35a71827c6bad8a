"""The selections that a learned mask is compared with.

`catalog` names them; each is a function of features, quality and a number to a mask.
"""
