"""The V4.1 family as torch modules; knows tensors, not requests."""
