"""Rules: which module becomes which, with its function preserved. One file a family of rules."""
