"""Networks for other tasks than classification, and their parts."""
