"""One function per operation; a dispatcher picks the implementation."""
