"""Evaluation: what a checkpoint scores at its operating points."""
