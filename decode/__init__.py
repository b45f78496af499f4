"""The decode role: engine and store, and the receiving end of the hand-off."""
