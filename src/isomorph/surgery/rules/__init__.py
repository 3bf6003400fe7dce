"""Rules: which module becomes which, with the function kept. One file a family."""
