"""The method: from logits and an objective to a mask.

`loop` is the whole of it on one screen, without Lightning; `step` is one step, `solve` what follows the last one.
`module` is the LightningModule that takes the same steps over many blocks, `policy` holds the logits, `state` what a
block remembers between steps.
"""
