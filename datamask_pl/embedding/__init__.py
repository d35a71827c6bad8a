"""From texts to features: read texts, turn them into vectors, write feature shards.

`texts` reads, `model` holds what turns a text into a vector, `files` writes one feature file per text file and resumes.
"""
