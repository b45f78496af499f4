"""HTTP edge: protocols, tokenising, choice of replicas, streaming."""
