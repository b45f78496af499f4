"""Composition root: actors, placement, supervision, command line."""
