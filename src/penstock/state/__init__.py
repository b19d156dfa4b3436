"""State: how keys and values become bytes, and where those bytes are kept."""
