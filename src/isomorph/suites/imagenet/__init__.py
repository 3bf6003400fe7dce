"""ImageNet's test sets: which classes count, where they lie, and ReaL's answers."""
