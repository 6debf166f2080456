"""Packhorse: BERT without padding.

The public names; the heavy ones are imported on first use, so that `import packhorse` stays cheap.
"""

__version__ = "0.1.0"
