"""The words all rooms share: ids, requests, messages, states, limits, errors, clock."""
