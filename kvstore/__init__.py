"""Persists and finds 128-token-aligned KV and window state; bytes in, bytes out."""
