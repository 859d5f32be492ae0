"""What a model is and how its files are read: families, file formats, text, the bundled model.

Nothing here computes with weights; only core/ is below. `families` describes a config.json as a ModelSpec, `formats` reads and writes
files, `text` turns text to tokens and back.
"""
