"""Files of models, and opening them."""
