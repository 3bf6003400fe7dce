"""How alike two sets of features are: centred kernel alignment."""
