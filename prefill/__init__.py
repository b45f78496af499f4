"""The prefill role: engine and store, and the sending end of the hand-off."""
